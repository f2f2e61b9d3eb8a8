"""The engine thread of a stage that follows a leader."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from engine.core.batch import ForwardBatch
from engine.pipeline.stages import FollowerStage
from engine.sampling.sampler import RequestSampler
from pool.pipeline.stage_channel import PoolChannel
from pool.stage.stage import Stage
from runtime.errors import IntegrityError, PeerLostError
from transfer.transport.forming import Forming

logger = logging.getLogger(__name__)


class FollowerEngine:
    """The engine thread of a follower.

    It serves frames while the pool is formed, and waits for orders otherwise. The thread calls
    `on_connected` when the channel takes frames of a forming. It calls `on_broken` when an error
    has ended the serving and the pool must form again.
    """

    def __init__(
        self,
        stage: Stage,
        sampler: RequestSampler,
        channel: PoolChannel,
        *,
        rank: int,
        size: int,
        on_step: Callable[[float, ForwardBatch], None],
        frame_timeout_s: float = 10,
    ) -> None:
        self._follower = FollowerStage(
            stage.executor,
            sampler,
            channel,
            rank=rank,
            size=size,
            drafter=stage.drafter,
            on_step=on_step,
            frame_timeout_s=frame_timeout_s,
            ranks=stage.ranks,
        )
        self._ranks = stage.ranks
        self._sampler = sampler
        self._channel = channel
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue(1024)
        self._formed = False
        self._stopping = False
        self.on_broken: Callable[[], object] = lambda: None
        self.on_connected: Callable[[Forming], object] = lambda forming: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def form(self, addresses: list[bytes], forming: Forming) -> None:
        """Connect the batch channel for a new forming of the pool. Any thread."""
        self._order(lambda: self._connect(addresses, forming))

    def leave(self) -> Future[None]:
        """Stop serving until the pool is formed again. Any thread.

        Return a future that is done when the running step is over.
        """
        self._ranks.abandon()
        return self.submit(self._leave)

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run `call` between two steps; return a future of its end. Any thread."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a waiter cannot cancel it

        def run() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - the waiter raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        self._order(run)
        return done

    def stop(self, timeout_s: float = 10) -> None:
        self._order(self._stop)
        self._thread.join(timeout_s)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put_nowait(order)
        self._channel.wake()

    def _connect(self, addresses: list[bytes], forming: Forming) -> None:
        self._channel.connect(addresses, forming)
        self._ranks.use(self._channel, self._channel.parts)
        self._sampler.reset()  # a new leader starts its request keys again
        self._formed = True
        self.on_connected(forming)

    def _leave(self) -> None:
        self._formed = False

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            try:
                if not self._formed:
                    self._orders.get()()
                    continue
                self._follower.step(1.0)
                while not self._orders.empty():
                    self._orders.get_nowait()()
            except (PeerLostError, IntegrityError) as error:
                logger.warning("the pool broke: %s", error)
                self._break()
            except Exception:  # at the edge of the thread, every error must be reported to the pool
                logger.exception("stage step failed")
                self._break()

    def _break(self) -> None:
        self._formed = False
        self.on_broken()

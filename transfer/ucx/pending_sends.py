"""Frames that UCX has only partly sent, and the thread that sends the rest.

A frame larger than the queues between two processes is sent in pieces, as the receiver makes room.
The receiver makes room only between its own steps. A sender that waited would lose one of its own
steps for every large frame, so a thread sends the rest while the sender computes.
"""

import threading
import time
from dataclasses import dataclass

from transfer.ucx.api import UcxRequest, UcxWorker

_BESIDE_WAIT_S = 2e-4  # shared memory does not report that a full queue has room again


@dataclass
class PendingSend:
    """Frame that UCX has not sent completely.

    `request` needs `frame` until it is completed. At `deadline_s` of `time.monotonic` the receiver
    counts as lost, because it has not accepted the whole frame within `timeout_s`. It is a float
    rather than a Deadline, as every frame has one. The result of an abandoned send is ignored.
    """

    rank: int
    request: UcxRequest
    frame: bytes | bytearray | memoryview
    deadline_s: float
    timeout_s: float
    is_abandoned: bool = False


class PendingSends:
    """Pending sends of at most `max_bytes`, or a single one.

    The holder of `using` may use the worker and must progress it. All methods except `close`
    require the lock.
    """

    def __init__(self, worker: UcxWorker, *, max_bytes: int) -> None:
        self._worker = worker
        self._max_bytes = max_bytes
        self._sends: list[PendingSend] = []
        self._wanted = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.using = threading.Lock()

    @property
    def any(self) -> bool:
        return bool(self._sends)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` fit in addition to the pending sends."""
        return sum(len(send.frame) for send in self._sends) + num_bytes <= self._max_bytes

    def add(self, send: PendingSend) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stage sends", daemon=True)
            self._thread.start()
        self._sends.append(send)
        self._wanted.set()

    def take_completed(self) -> list[PendingSend]:
        """Remove the completed sends, successful or not; return those that are not abandoned."""
        done = [send for send in self._sends if send.request.completed]
        if done:
            self._sends = [send for send in self._sends if send not in done]
        return [send for send in done if not send.is_abandoned]

    def overdue(self) -> PendingSend | None:
        now = time.monotonic()
        return next(
            (send for send in self._sends if now >= send.deadline_s and not send.is_abandoned), None
        )

    def abandon(self, rank: int | None = None) -> None:
        """Abandon the sends to this stage, or all if None."""
        for send in self._sends:
            send.is_abandoned |= rank is None or send.rank == rank

    def close(self) -> None:
        """Stop the thread."""
        self._closing = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._wanted.wait()
            if self.using.acquire(blocking=False):  # otherwise its holder progresses
                try:
                    while self._worker.progress_once():
                        pass
                    if all(send.request.completed for send in self._sends):
                        self._wanted.clear()
                finally:
                    self.using.release()
            time.sleep(_BESIDE_WAIT_S)

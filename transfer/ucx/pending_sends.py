"""Frames on their way that UCX has not taken as a whole, and the thread that moves them while their
sender computes.

A frame larger than the queues between two processes leaves in pieces, as the receiver makes room.
The receiver makes room only between its own steps, so a sender that waited would lose a step of its
own for every large frame.
"""

import threading
import time
from dataclasses import dataclass

from transfer.ucx.api import UcxRequest, UcxWorker

_BESIDE_WAIT_S = 2e-4  # shared memory does not report that a full queue has room again


@dataclass
class PendingSend:
    """`request` needs `frame` until it is completed. At `deadline_s` of the monotonic clock the
    receiver counts as lost, which has then not taken the whole frame for `timeout_s`. The end of a
    send that `is_abandoned` is not looked at."""

    rank: int
    request: UcxRequest
    frame: bytes | bytearray | memoryview
    deadline_s: float
    timeout_s: float
    is_abandoned: bool = False


class PendingSends:
    """At most `max_bytes` of them, or one. The holder of `using` may use the worker, and has to
    progress it; everything but `close` is for the holder."""

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
        """Beside those that wait already."""
        return sum(len(send.frame) for send in self._sends) + num_bytes <= self._max_bytes

    def add(self, send: PendingSend) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stage sends", daemon=True)
            self._thread.start()
        self._sends.append(send)
        self._wanted.set()

    def take_completed(self) -> list[PendingSend]:
        """Those that are done, well or not, and not abandoned."""
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
        """Those to this stage; None: all."""
        for send in self._sends:
            send.is_abandoned |= rank is None or send.rank == rank

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._wanted.wait()
            if self.using.acquire(blocking=False):  # else its holder progresses
                try:
                    while self._worker.progress_once():
                        pass
                    if all(send.request.completed for send in self._sends):
                        self._wanted.clear()
                finally:
                    self.using.release()
            time.sleep(_BESIDE_WAIT_S)

"""The frame channel between stages of one process, over bounded queues; for tests."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from runtime.errors import DeadlineError, InternalError, PeerLostError


@dataclass
class _Mailboxes:
    """Frames in flight by (sender, receiver), and the lost ranks, under one condition."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    frames: dict[tuple[int, int], deque[bytes]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    woken: set[int] = field(default_factory=set)


class InProcessChannel:
    """One rank's end. Create those of a whole pool with `InProcessChannel.pool(size)`."""

    head_bytes = 0  # no other process can reach the mailboxes

    def __init__(
        self, mailboxes: _Mailboxes, rank: int, *, max_frame_bytes: int, max_frames: int
    ) -> None:
        self._boxes = mailboxes
        self._rank = rank
        self._max_frame_bytes = max_frame_bytes
        self._max_frames = max_frames

    @classmethod
    def pool(
        cls, size: int, *, max_frame_bytes: int = 1 << 28, max_frames: int = 64
    ) -> list["InProcessChannel"]:
        boxes = _Mailboxes()
        return [
            cls(boxes, rank, max_frame_bytes=max_frame_bytes, max_frames=max_frames)
            for rank in range(size)
        ]

    def send(self, rank: int, frame: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        if len(frame) > self._max_frame_bytes:
            raise InternalError(
                f"frame of {len(frame)} bytes is over the channel's limit of {self._max_frame_bytes}"
            )
        boxes = self._boxes
        with boxes.changed:
            queue = boxes.frames.setdefault((self._rank, rank), deque())
            room = boxes.changed.wait_for(
                lambda: len(queue) < self._max_frames or rank in boxes.gone, timeout_s
            )
            if rank in boxes.gone:
                raise PeerLostError(f"stage {rank} is gone")
            if not room:
                raise DeadlineError(f"stage {rank} took no frame for {timeout_s} s")
            queue.append(bytes(frame))
            boxes.changed.notify_all()

    def receive(self, rank: int, *, timeout_s: float) -> memoryview | None:
        boxes = self._boxes
        deadline_s = time.monotonic() + timeout_s
        with boxes.changed:
            queue = boxes.frames.setdefault((rank, self._rank), deque())
            while not queue:
                if rank in boxes.gone:
                    raise PeerLostError(f"stage {rank} is gone")
                remaining_s = deadline_s - time.monotonic()
                if self._rank in boxes.woken or remaining_s <= 0:
                    boxes.woken.discard(self._rank)
                    return None
                boxes.changed.wait(remaining_s)
            boxes.changed.notify_all()
            return memoryview(queue.popleft())

    def check(self, rank: int) -> None:
        with self._boxes.changed:
            if rank in self._boxes.gone:
                raise PeerLostError(f"stage {rank} is gone")

    def fail(self, rank: int, reason: str) -> None:
        """Mark a rank as lost, for this rank and all others."""
        with self._boxes.changed:
            self._boxes.gone.add(rank)
            self._boxes.changed.notify_all()

    def wake(self) -> None:
        with self._boxes.changed:
            self._boxes.woken.add(self._rank)
            self._boxes.changed.notify_all()

    def close(self) -> None:
        """Mark this rank as lost for the others."""
        self.fail(self._rank, "closed")

"""How one stage hands bytes to the next. The worker injects it: UCX between processes, in-process for tests."""

from typing import Protocol


class StageChannel(Protocol):
    """One process's way to every other stage of its pool. Frames arrive whole, in order per sender.

    A channel belongs to one thread (the engine thread). Frames larger than the limit agreed at construction are
    refused by `send` before anything leaves.
    """

    def send(self, rank: int, frame: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Returns when the frame may be reused. Raises PeerLostError when the peer is gone, DeadlineError on time."""
        ...

    def receive(self, rank: int, *, timeout_s: float) -> memoryview | None:
        """The next frame from `rank`, valid until the next call; None when none came in time. Raises PeerLostError."""
        ...

    def wake(self) -> None:
        """Make a `receive` that waits in the owner's thread return early. The one call other threads may make."""
        ...

    def close(self) -> None: ...

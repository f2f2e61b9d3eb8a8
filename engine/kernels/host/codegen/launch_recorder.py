"""The recorder of a thread's kernel launches, if there is one."""

from contextvars import ContextVar
from typing import Protocol


class LaunchRecorder(Protocol):
    """A recorder of kernel launches for replay."""

    def add_launch(self, function: int, arguments: bytes, seat_bytes: int) -> None:
        """Record a call of the C function at this address with this record.

        `seat_bytes` is the size of all seats together.
        """
        ...

    def keep(self, memory: object) -> None:
        """Keep memory that the recorded launches read, other than tensors of the recording."""
        ...


# The recorder of this thread's launches.
recorders: ContextVar[LaunchRecorder | None] = ContextVar("recorders", default=None)


def keep_for_replays(*memory: object) -> None:
    """Have the active recorder, if there is one, keep memory that the last launch has read."""
    if (recorder := recorders.get()) is not None:
        for each in memory:
            recorder.keep(each)

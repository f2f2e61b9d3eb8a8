"""Faults that a storm requests of a process: a few numbers in a file that both have mapped.

control = Control.create(path)          # the storm
control.flip_items(1)                   # the next item that the process sends has one wrong bit

Control.open(path)                      # the process, through `bench.storm.child`
"""

import mmap
import struct
from pathlib import Path
from typing import Self

_FIELDS = struct.Struct("<QQd")  # frames and items still to damage, clock offset in seconds
_FRAMES = struct.Struct("<Q")
_ITEMS = struct.Struct("<Q")
_CLOCK = struct.Struct("<d")
_ITEMS_AT = 8
_CLOCK_AT = 16


class Control:
    """Requested faults; each number has one writer at a time, so that no lock is needed."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Wrap mapped memory; use `create` or `open`."""
        self._memory = memory

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create a file without requested faults."""
        path.write_bytes(bytes(_FIELDS.size))
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _FIELDS.size))

    def reset(self) -> None:
        """Cancel all requested faults."""
        self._memory[:] = bytes(_FIELDS.size)

    def flip_frames(self, count: int) -> None:
        """Damage the next `count` frames to another stage."""
        _FRAMES.pack_into(self._memory, 0, count)

    def flip_items(self, count: int) -> None:
        """Damage the next `count` items of a handoff."""
        _ITEMS.pack_into(self._memory, _ITEMS_AT, count)

    def shift_clock(self, seconds: float) -> None:
        """Shift the wall clock of the process by this offset from now on."""
        _CLOCK.pack_into(self._memory, _CLOCK_AT, seconds)

    @property
    def clock_shift_s(self) -> float:
        return float(_CLOCK.unpack_from(self._memory, _CLOCK_AT)[0])

    @property
    def frames_to_flip(self) -> int:
        return int(_FRAMES.unpack_from(self._memory, 0)[0])

    @property
    def items_to_flip(self) -> int:
        return int(_ITEMS.unpack_from(self._memory, _ITEMS_AT)[0])

    def takes_frame(self) -> bool:
        """Return whether to damage this frame, and count it."""
        left = self.frames_to_flip
        if left:
            self.flip_frames(left - 1)
        return left > 0

    def takes_item(self) -> bool:
        """Return whether to damage this item, and count it."""
        left = self.items_to_flip
        if left:
            self.flip_items(left - 1)
        return left > 0

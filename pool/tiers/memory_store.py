"""A tier in the memory of the process, for pools in the memory of a device.

It is lost with the process. Objects that were not used for the longest time make room for others.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pool.tiers.block_store import Content, ObjectKey, StagePart
from pool.tiers.copies import ReportedCopies, TierCopies


class MemoryStore:
    """Objects in a bounded number of bytes. Implements `BlockStore` for one stage."""

    def __init__(self, max_bytes: int, copies: TierCopies | None = None) -> None:
        """Begin empty; `copies` has what is there."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._copies = copies or ReportedCopies().of_tier()
        self._objects = OrderedDict[ObjectKey, NDArray[np.uint8]]()  # the latest used last
        self._parts: dict[tuple[bytes, Content], set[StagePart]] = {}
        self._lock = threading.Lock()

    def check(self) -> None:
        """Do nothing: it begins empty."""

    def parts(self, blocks: Sequence[bytes], content: Content) -> Iterator[Collection[StagePart]]:
        for block in blocks:
            with self._lock:
                found = tuple(self._parts.get((block, content), ()))
            yield found

    def get(self, key: ObjectKey, pieces: Sequence[memoryview]) -> int | None:
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            return None
        if len(found) == sum(map(len, pieces)):
            copy_into(pieces, found)
        return len(found)

    def put(self, key: ObjectKey, pieces: Sequence[memoryview]) -> bool:
        size = sum(map(len, pieces))
        if size > self.max_bytes:
            return False
        self._make_room(key, size)
        content = joined(pieces)
        with self._lock:
            self._objects[key] = content
            self._parts.setdefault((key.block, key.content), set()).add(key.part)
            self.num_bytes += size
            self._copies.stored(key.block, key.content)
        return True

    def prefetch(self, key: ObjectKey) -> None:
        """Do nothing: it is as near as it can be."""

    def use(self, keys: Iterable[ObjectKey]) -> None:
        with self._lock:
            for key in keys:
                if key in self._objects:
                    self._objects.move_to_end(key)

    def remove(self, key: ObjectKey) -> None:
        with self._lock:
            self._remove(key)

    def interrupt(self) -> None:
        """Do nothing: no call waits."""

    def close(self) -> None:
        with self._lock:
            self._objects.clear()
            self._parts.clear()
            self.num_bytes = 0

    def _make_room(self, key: ObjectKey, num_bytes: int) -> None:
        """Remove what an object replaces, and old ones until there is room for it."""
        with self._lock:
            self._remove(key)
            while self.num_bytes + num_bytes > self.max_bytes:
                self._remove(next(iter(self._objects)))

    def _remove(self, key: ObjectKey) -> None:
        found = self._objects.pop(key, None)
        if found is None:
            return
        self.num_bytes -= len(found)
        parts = self._parts[key.block, key.content]
        parts.remove(key.part)
        if not parts:
            del self._parts[key.block, key.content]
        self._copies.removed(key.block, key.content)


# Both let other threads run meanwhile, unlike `bytes.join` and assignments to slices.


def joined(pieces: Sequence[memoryview]) -> NDArray[np.uint8]:
    """Return the bytes of the pieces, one after the other."""
    nothing = np.empty(0, np.uint8)  # a stage may have no layer with states
    return np.concatenate([nothing, *(np.frombuffer(piece, np.uint8) for piece in pieces)])


def copy_into(pieces: Sequence[memoryview], content: NDArray[np.uint8]) -> None:
    """Copy bytes into the pieces, one after the other, which have their size."""
    start = 0
    for piece in pieces:
        np.copyto(np.frombuffer(piece, np.uint8), content[start : start + len(piece)])
        start += len(piece)

"""A tier in the memory of the process, for pools in the memory of a device.

It is lost with the process. Objects that were not used for the longest time make room for others.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pool.tiers.block_store import Content, ObjectKey, StagePart, parts_among

Name = tuple[bytes, str]  # of a block, and of an object among those of the block


class MemoryStore:
    """Objects in a bounded number of bytes. Implements `BlockStore` for one stage."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._objects = OrderedDict[Name, NDArray[np.uint8]]()  # the latest used last
        self._labels: dict[bytes, set[str]] = {}  # of the objects of a block
        self._lock = threading.Lock()

    def check(self) -> None:
        """Do nothing: it begins empty."""

    def parts(self, blocks: Sequence[bytes], content: Content) -> Iterator[Collection[StagePart]]:
        for block in blocks:
            with self._lock:
                labels = tuple(self._labels.get(block, ()))
            yield parts_among(labels, content)

    def get(self, key: ObjectKey, pieces: Sequence[memoryview]) -> int | None:
        with self._lock:
            found = self._objects.get((key.block, key.label))
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
            self._objects[key.block, key.label] = content
            self._labels.setdefault(key.block, set()).add(key.label)
            self.num_bytes += size
        return True

    def prefetch(self, key: ObjectKey) -> None:
        """Do nothing: it is as near as it can be."""

    def use(self, keys: Iterable[ObjectKey]) -> None:
        with self._lock:
            for key in keys:
                name = key.block, key.label
                if name in self._objects:
                    self._objects.move_to_end(name)

    def remove(self, key: ObjectKey) -> None:
        with self._lock:
            self._remove((key.block, key.label))

    def interrupt(self) -> None:
        """Do nothing: no call waits."""

    def close(self) -> None:
        with self._lock:
            self._objects.clear()
            self._labels.clear()
            self.num_bytes = 0

    def _make_room(self, key: ObjectKey, num_bytes: int) -> None:
        """Remove what an object replaces, and old ones until there is room for it."""
        with self._lock:
            self._remove((key.block, key.label))
            while self.num_bytes + num_bytes > self.max_bytes:
                self._remove(next(iter(self._objects)))

    def _remove(self, name: Name) -> None:
        found = self._objects.pop(name, None)
        if found is None:
            return
        self.num_bytes -= len(found)
        block, label = name
        self._labels[block].remove(label)
        if not self._labels[block]:
            del self._labels[block]


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

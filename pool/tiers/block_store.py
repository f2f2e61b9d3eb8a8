"""The places for copies of blocks, and the objects in them.

A copy of a block consists of objects: one for each part of a stage, and one more for each part of
the recurrent state after it. Any pool of the same model may have written them.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from engine.core.layer_range import LayerRange, TensorRank
from engine.memory.layout import CacheKind, PoolGeometry

_PART = re.compile(r"(\d+)-(\d+)\.(\d+)of(\d+)")


class Tier(StrEnum):
    """The kinds of places, in the order in which they are asked."""

    HOST = "host"
    DISK = "disk"
    SERVER = "server"

    @property
    def owner(self) -> str:
        """Return the owner of the leases of its reads and writes."""
        return "cache server" if self is Tier.SERVER else f"{self} cache"


class Content(StrEnum):
    """The content of an object."""

    PAGE = "page"
    STATE = "state"

    def has(self, kind: CacheKind) -> bool:
        """Return whether objects of this content have this kind of cache."""
        return kind.is_paged if self is Content.PAGE else kind.is_state


@dataclass(frozen=True)
class StagePart:
    """The layers of a stage, and the rank's part of them."""

    layers: LayerRange
    tensor: TensorRank

    @classmethod
    def of(cls, geometry: PoolGeometry) -> Self:
        return cls(geometry.layers, geometry.tensor)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the part with this text, or None if there is no such part."""
        found = _PART.fullmatch(text)
        if found is None:
            return None
        start, end, rank, size = map(int, found.groups())
        if start >= end or rank >= size:
            return None
        return cls(LayerRange(start, end), TensorRank(rank, size))

    def __str__(self) -> str:
        return f"{self.layers}.{self.tensor.rank}of{self.tensor.size}"


@dataclass(frozen=True)
class ObjectKey:
    """The name of an object: its block, its content and the part that it holds."""

    block: bytes
    content: Content
    part: StagePart

    @property
    def label(self) -> str:
        """Return the name among the objects of the block."""
        return f"{self.content}.{self.part}"


def parts_among(labels: Iterable[str], content: Content) -> list[StagePart]:
    """Return the parts of this content among objects of one block, by their labels."""
    prefix = f"{content}."
    parts = (
        StagePart.parse(label.removeprefix(prefix)) for label in labels if label.startswith(prefix)
    )
    return [part for part in parts if part is not None]


class BlockStore(Protocol):
    """A place for objects, which other processes may share.

    It may lose or damage any of them at any time. Errors of the place are logged, and show as
    objects that are missing or are not stored. All methods but `put` and `check` are for any thread.
    """

    @property
    def num_bytes(self) -> int:
        """Return the size of all objects, as it was lately."""
        ...

    @property
    def max_bytes(self) -> int:
        """Return the size to which they are bounded."""
        ...

    def check(self) -> None:
        """Look the place over, once before the first `put`."""
        ...

    def parts(self, blocks: Sequence[bytes], content: Content) -> Iterator[Collection[StagePart]]:
        """Return which parts of each block are there, in the order of the blocks."""
        ...

    def get(self, key: ObjectKey, pieces: Sequence[memoryview]) -> int | None:
        """Copy an object into the pieces, one after the other, if it has exactly their size.

        Return its size in bytes, or None if there is no such object.
        """
        ...

    def put(self, key: ObjectKey, pieces: Sequence[memoryview]) -> bool:
        """Store an object that consists of the pieces; return whether it is stored.

        An object of the same name is replaced. The pieces are not kept.
        """
        ...

    def prefetch(self, key: ObjectKey) -> None:
        """Begin to bring an object nearer that is read soon, if it is there."""
        ...

    def use(self, keys: Iterable[ObjectKey]) -> None:
        """Note that objects were used, the most needed ones last."""
        ...

    def remove(self, key: ObjectKey) -> None:
        """Remove a damaged object, if it is there."""
        ...

    def interrupt(self) -> None:
        """Have a call that goes on for too long fail, if that is possible."""
        ...

    def close(self) -> None:
        """Release what it holds of this process. Nothing is called afterwards."""
        ...

"""What the transfer plane needs of a stage's pools: bytes by layer, kind and index. `engine.memory` satisfies it."""

from typing import Protocol

from engine.memory.layout import Buffer, CacheKind, PoolGeometry


class PoolMemory(Protocol):
    """Memory of one stage's pools, on the host or on a device."""

    @property
    def geometry(self) -> PoolGeometry: ...

    def view(self, layer_id: int, kind: CacheKind, first_index: int, count: int) -> Buffer:
        """Where `count` consecutive records (pages or slots) are, no copy: a writable memoryview of host pools, else
        what the stage's transport reaches. Raises InternalError for a layer, kind or index this stage does not have,
        naming it and the stage's range."""
        ...

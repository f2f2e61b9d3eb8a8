"""What the transfer plane needs of a stage's pools: bytes by layer, kind and index. `engine.memory` satisfies it."""

from typing import Protocol

from engine.memory.layout import CacheKind, PoolGeometry


class PoolMemory(Protocol):
    """Host memory of one stage's pools."""

    @property
    def geometry(self) -> PoolGeometry: ...

    def view(self, layer_id: int, kind: CacheKind, first_index: int, count: int) -> memoryview:
        """Writable bytes of `count` consecutive records (pages or slots), no copy. Raises InternalError for a layer,
        kind or index this stage does not have, naming it and the stage's range."""
        ...

"""Records of a stage's pools as bytes in host memory, one set at a time.

Pools in host memory give their own bytes. Those of a device pass through a pinned buffer.
"""

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from engine.memory.layout import CacheSpec, PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.staging import CopyQueue

COPY_POLL_S = 50e-6  # between two looks at copies of a block


class RecordMemory(Protocol):
    """The records of a stage's pools with one index, as one thread reads and fills them."""

    @property
    def geometry(self) -> PoolGeometry: ...

    def begin(self, *, load: bool) -> None:
        """Wait until the records that are read next, or with `load` filled, are not in use."""
        ...

    def fetched(self, specs: Sequence[CacheSpec], index: int) -> list[memoryview]:
        """Return the bytes of these caches' records, valid until the next call."""
        ...

    def blank(self, specs: Sequence[CacheSpec], index: int) -> list[memoryview]:
        """Return memory for the bytes of these records; `stored` follows once it is filled."""
        ...

    def stored(self, specs: Sequence[CacheSpec], index: int) -> None:
        """Put into the pools what the memory of the last `blank` holds."""
        ...


class HostRecords:
    """The records of pools in host memory, in place. Implements `RecordMemory` for any thread."""

    def __init__(self, pools: StagePools) -> None:
        self._pools = pools

    @property
    def geometry(self) -> PoolGeometry:
        return self._pools.geometry

    def begin(self, *, load: bool) -> None:
        """Do nothing: steps that were launched are over."""

    def fetched(self, specs: Sequence[CacheSpec], index: int) -> list[memoryview]:
        return [self._pools.view(spec.layer_id, spec.kind, index, 1) for spec in specs]

    def blank(self, specs: Sequence[CacheSpec], index: int) -> list[memoryview]:
        return self.fetched(specs, index)

    def stored(self, specs: Sequence[CacheSpec], index: int) -> None:
        """Do nothing: the memory is that of the pools."""


class DeviceRecords:
    """The records of pools on a device, copied through two buffers. Implements `RecordMemory`.

    One thread calls `fetched`, and one `blank` and `stored`, each after `begin`. Each waits for its
    copies without a limit, because the device may use the memory until they are over.
    """

    def __init__(
        self, pools: StagePools, fetching: CopyQueue, storing: CopyQueue, *, pinned: bool = True
    ) -> None:
        """Create it without buffers; a thread's first call allocates its own."""
        self._pools = pools
        self._fetching = _Passage(fetching, pinned=pinned)
        self._storing = _Passage(storing, pinned=pinned)

    @property
    def geometry(self) -> PoolGeometry:
        return self._pools.geometry

    def begin(self, *, load: bool) -> None:
        # Blocks enter the prefix cache once the step that computes them is launched, and memory may be
        # free while a step of an aborted request still fills it.
        (self._storing if load else self._fetching).settle()

    def fetched(self, specs: Sequence[CacheSpec], index: int) -> list[memoryview]:
        passage = self._fetching
        host = passage.pieces(specs)
        passage.copy(list(zip(host, self._records(specs, index), strict=True)))
        return [piece.numpy().data for piece in host]

    def blank(self, specs: Sequence[CacheSpec], index: int) -> list[memoryview]:
        return [piece.numpy().data for piece in self._storing.pieces(specs)]

    def stored(self, specs: Sequence[CacheSpec], index: int) -> None:
        passage = self._storing
        passage.copy(list(zip(self._records(specs, index), passage.pieces(specs), strict=True)))

    def _records(self, specs: Sequence[CacheSpec], index: int) -> list[Tensor]:
        return [self._pools.records(spec.layer_id, spec.kind, index, 1) for spec in specs]


class _Passage:
    """A buffer in host memory and the copies of one thread to or from it."""

    def __init__(self, copies: CopyQueue, *, pinned: bool) -> None:
        self._copies = copies
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._has_entered = False

    def settle(self) -> None:
        """Wait until all is computed that the device was given before."""
        if not self._has_entered:
            self._copies.enter_thread()
            self._has_entered = True
        self._copies.settle()

    def pieces(self, specs: Sequence[CacheSpec]) -> list[Tensor]:
        """Return stretches of the buffer for one record each."""
        ends = list(accumulate((spec.record_bytes for spec in specs), initial=0))
        if len(self._buffer) < ends[-1]:
            self._buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=self._pinned)
        return [self._buffer[start:end] for start, end in pairwise(ends)]

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy to the first of each pair from the second, and wait until it is over."""
        ends = [self._copies.copy(target, source) for target, source in pairs]
        while not all(end.query() for end in ends):
            time.sleep(COPY_POLL_S)

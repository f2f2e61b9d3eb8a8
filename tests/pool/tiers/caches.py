"""Pools of a small hybrid model with known bytes, on stages and ranks of any number."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.core.layer_range import LayerRange, TensorRank
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.records import DeviceRecords, HostRecords, RecordMemory
from pool.tiers.block_store import BlockStore
from pool.tiers.folder import CacheFolder
from pool.tiers.stage_blocks import StageBlocks
from runtime.process.host_memory import MIB

PAGE_SIZE, NUM_PAGES, NUM_SLOTS, NUM_LAYERS = 2, 9, 4, 5
HEADS, DIM, RANK, CHANNELS = 4, 3, 5, (4, 8)


def specs() -> tuple[CacheSpec, ...]:
    """Return caches that are divided by heads, by two blocks of channels, and not at all."""
    found = list[CacheSpec]()
    for layer in range(NUM_LAYERS):
        if layer % 2:
            shape = (2, HEADS, PAGE_SIZE, DIM)
            found.append(
                CacheSpec(layer, CacheKind.KV, shape, "float32", 4, split_axis=1, blocks=(HEADS,))
            )
            found.append(CacheSpec(layer, CacheKind.LATENT, (PAGE_SIZE, RANK), "int32", 4))
        else:
            inputs = (3, sum(CHANNELS))
            found.append(
                CacheSpec(
                    layer, CacheKind.CONV, inputs, "float32", 4, split_axis=1, blocks=CHANNELS
                )
            )
    return tuple(found)


def value(spec: CacheSpec, number: int) -> torch.Tensor:
    """Return the whole record of a block with this number."""
    seed = torch.Generator().manual_seed(number * 100 + spec.layer_id * 10 + len(spec.kind))
    return torch.randint(1, 1 << 20, spec.record_shape, generator=seed, dtype=torch.int32).to(
        getattr(torch, spec.dtype)
    )


def part_of(spec: CacheSpec, record: torch.Tensor, tensor: TensorRank) -> torch.Tensor:
    """Return a rank's part of a record, by slices of each block."""
    if spec.split_axis is None:
        return record
    pieces, start = [], 0
    for length in spec.blocks:
        block = record.narrow(spec.split_axis, start, length)
        pieces.append(block.tensor_split(tensor.size, spec.split_axis)[tensor.rank])
        start += length
    return torch.cat(pieces, spec.split_axis)


class HostCopies:
    """A device's queue of copies, in host memory. Each copy is over only when it is asked for."""

    def __init__(self) -> None:
        self.num_entered = 0
        self.num_settled = 0

    def enter_thread(self) -> None:
        self.num_entered += 1

    def settle(self) -> None:
        self.num_settled += 1

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> "HostCopies.Event":
        assert self.num_entered == 1
        assert self.num_settled, "the device may still use the records"
        return self.Event(target, source)

    @dataclass
    class Event:
        target: torch.Tensor
        source: torch.Tensor
        num_asked: int = 0

        def query(self) -> bool:
            self.num_asked += 1
            if self.num_asked == 2:
                self.target.copy_(self.source)
            return self.num_asked >= 2


def records(pools: StagePools, *, on_device: bool) -> RecordMemory:
    if on_device:
        return DeviceRecords(pools, HostCopies(), HostCopies(), pinned=False)
    return HostRecords(pools)


def stage(
    store: BlockStore,
    layers: LayerRange,
    tensor: TensorRank,
    *,
    key: bytes | None,
    on_device: bool = False,
) -> tuple[StageBlocks, StagePools]:
    geometry = PoolGeometry(PAGE_SIZE, NUM_PAGES, NUM_SLOTS, layers, specs(), tensor)
    pools = StagePools(geometry)
    return StageBlocks(store, records(pools, on_device=on_device), key=key), pools


def folder(path: Path) -> CacheFolder:
    return CacheFolder(path, 64 * MIB)


def layout(num_stages: int, num_ranks: int) -> list[tuple[LayerRange, TensorRank]]:
    bounds = [round(stage * NUM_LAYERS / num_stages) for stage in range(num_stages + 1)]
    return [
        (LayerRange(start, end), TensorRank(rank, num_ranks))
        for start, end in itertools.pairwise(bounds)
        for rank in range(num_ranks)
    ]


def fill(pools: StagePools, number: int, index: int) -> None:
    """Write the block with this number to the page and the slot with this index."""
    geometry = pools.geometry
    for spec in specs():
        if spec.layer_id in geometry.layers:
            tensor = pools.of_kind(spec.kind)[spec.layer_id]
            tensor[index] = part_of(spec, value(spec, number), geometry.tensor)


def holds(pools: StagePools, number: int, index: int, *, paged: bool) -> bool:
    """Return whether the page with this index, or else the slot, has the block with this number."""
    geometry = pools.geometry
    return all(
        np.array_equal(
            pools.of_kind(spec.kind)[spec.layer_id][index].cpu().numpy(),
            part_of(spec, value(spec, number), geometry.tensor).numpy(),
        )
        for spec in specs()
        if spec.layer_id in geometry.layers and spec.kind.is_paged is paged
    )

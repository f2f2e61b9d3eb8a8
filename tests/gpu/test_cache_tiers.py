"""Blocks between a device's pools and tiers: as they were, also those that are being computed."""

from pathlib import Path

import pytest
import torch

from engine.core.layer_range import LayerRange, TensorRank
from engine.memory.layout import PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.records import DeviceRecords
from engine.memory.staging import CudaCopies
from pool.tiers.block_store import BlockStore, Tier
from pool.tiers.memory_store import MemoryStore
from pool.tiers.stage_blocks import BlockMove, StageBlocks
from runtime.process.host_memory import MIB
from tests.pool.tiers.caches import (
    NUM_LAYERS,
    NUM_PAGES,
    NUM_SLOTS,
    PAGE_SIZE,
    fill,
    folder,
    holds,
    specs,
)

NAMES = tuple(bytes([number]) * 16 for number in range(1, 4))
BUSY_CYCLES = 200_000_000  # of the device, about 0.1 s


@pytest.mark.parametrize("place", ["disk", "host"])
def test_blocks_come_back_as_they_were(device: torch.device, place: str, tmp_path: Path) -> None:
    geometry = PoolGeometry(
        PAGE_SIZE, NUM_PAGES, NUM_SLOTS, LayerRange(0, NUM_LAYERS), specs(), TensorRank()
    )
    pools = StagePools(geometry, device=str(device))
    store: BlockStore = MemoryStore(MIB) if place == "host" else folder(tmp_path)
    blocks = StageBlocks(
        store, DeviceRecords(pools, CudaCopies(device), CudaCopies(device)), key=bytes(32)
    )
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    for number in (1, 2, 3):
        fill(pools, number, number)  # after it, on the same stream
    stored = BlockMove(
        Tier(place), load=False, names=NAMES, page_ids=(1, 2, 3), slot_id=3, state_of=NAMES[2]
    )
    assert blocks.writing.submit(blocks.move, stored).result(60) == 3
    read = BlockMove(
        Tier(place), load=True, names=NAMES, page_ids=(7, 5, 8), slot_id=2, state_of=NAMES[2]
    )
    assert blocks.reading.submit(blocks.move, read).result(60) == 3
    for number, page_id in enumerate((7, 5, 8), start=1):
        assert holds(pools, number, page_id, paged=True)
    assert holds(pools, 3, 2, paged=False)
    blocks.close()

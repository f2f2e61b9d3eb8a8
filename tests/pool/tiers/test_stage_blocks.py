"""Blocks of stages and ranks in tiers: every layout reads what any other one wrote."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.layer_range import LayerRange, TensorRank
from engine.memory.pools import StagePools
from pool.tiers.block_store import BlockStore, Content, ObjectKey, StagePart, Tier
from pool.tiers.cache_server import CacheServer
from pool.tiers.memory_store import MemoryStore
from pool.tiers.stage_blocks import BlockMove, StageBlocks
from runtime.observe.metrics.instruments import TIERS
from runtime.process.host_memory import MIB
from tests.pool.tiers.caches import fill, folder, holds, layout, stage
from tests.support.cache_servers import KEY, running_server

NAMES = tuple(bytes([number]) * 16 for number in range(1, 4))
WRITTEN = BlockMove(Tier.DISK, load=False, names=NAMES, page_ids=(1, 2, 3))
READ = replace(WRITTEN, load=True)
SIZES = list(itertools.product((1, 2, 3), (1, 2, 3, 4)))
Parts = Sequence[tuple[LayerRange, TensorRank]]


class Place:
    """A place for copies, which outlives the stages that use it."""

    def __init__(self, store: BlockStore, *, on_device: bool = False) -> None:
        self.store = store
        self._on_device = on_device
        self._key = None if isinstance(store, MemoryStore) else KEY
        self._open: list[StageBlocks] = []

    def stage(self, layers: LayerRange, tensor: TensorRank) -> tuple[StageBlocks, StagePools]:
        blocks, pools = stage(self.store, layers, tensor, key=self._key, on_device=self._on_device)
        self._open.append(blocks)
        return blocks, pools

    def close(self) -> None:
        for blocks in self._open:
            blocks.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(folder(tmp_path))
    yield found
    found.close()


@pytest.fixture(params=["folder", "device", "host memory", "server"])
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as opened:
        match request.param:
            case "host memory":
                store: BlockStore = MemoryStore(MIB)
            case "server":
                server = opened.enter_context(running_server(tmp_path))
                store = CacheServer(server.url, KEY, expire_s=60)
            case _:
                store = folder(tmp_path)
        found = Place(store, on_device=request.param == "device")
        yield found
        found.close()


def write(place: Place, parts: Parts) -> None:
    """Write blocks 1 to 3, and the state after the last."""
    for layers, tensor in parts:
        blocks, pools = place.stage(layers, tensor)
        for number in (1, 2, 3):
            fill(pools, number, number)
        stored = replace(WRITTEN, slot_id=3, state_of=NAMES[-1])
        assert blocks.move(stored) == 3


def check_read(place: Place, layers: LayerRange, tensor: TensorRank) -> None:
    """Read all blocks into other pages, and the state into another slot."""
    blocks, pools = place.stage(layers, tensor)
    assert blocks.num_known(NAMES, with_state=True) == 3
    move = replace(READ, page_ids=(7, 5, 8), slot_id=2, state_of=NAMES[-1])
    assert blocks.move(move) == 3
    for number, page_id in enumerate((7, 5, 8), start=1):
        assert holds(pools, number, page_id, paged=True)
    assert holds(pools, 3, 2, paged=False)


@pytest.mark.parametrize("written", SIZES, ids=str)
def test_any_layout_reads_what_another_one_wrote(written: tuple[int, int], place: Place) -> None:
    write(place, layout(*written))
    for size in SIZES:
        for layers, tensor in layout(*size):
            check_read(place, layers, tensor)


def test_another_layout_reads_what_was_written_to_any_place(any_place: Place) -> None:
    write(any_place, layout(3, 2))
    for size in ((3, 2), (2, 4), (1, 1)):
        for layers, tensor in layout(*size):
            check_read(any_place, layers, tensor)


def test_stages_with_overlapping_layers_complete_each_other(place: Place) -> None:
    one = TensorRank()
    write(place, [(LayerRange(0, 3), one), (LayerRange(1, 4), one), (LayerRange(2, 5), one)])
    check_read(place, LayerRange(0, 5), one)


@pytest.mark.parametrize(
    "parts",
    [
        layout(3, 1)[:2],
        layout(2, 2)[:3],
        [(LayerRange(0, 2), TensorRank()), (LayerRange(3, 5), TensorRank())],
    ],
    ids=["a stage", "a rank", "a layer between"],
)
def test_a_block_with_a_part_missing_is_not_known(parts: Parts, place: Place) -> None:
    write(place, parts)
    blocks, _ = place.stage(LayerRange(0, 5), TensorRank())
    assert blocks.num_known(NAMES, with_state=False) == 0
    assert blocks.move(READ) == 0


@pytest.mark.parametrize("name", ["0-5.0of3", "0-5.7of2", "5-0.0of1", "0-5.0of0", "x", "0-99.0of1"])
def test_files_with_other_names_are_passed_over(name: str, place: Place, tmp_path: Path) -> None:
    write(place, layout(1, 1))
    for path in list(tmp_path.rglob("page.0-5.0of1")):
        path.rename(path.with_name(f"page.{name}"))
    blocks, _ = place.stage(LayerRange(0, 5), TensorRank())
    assert blocks.move(READ) == 0


def test_blocks_before_a_damaged_one_are_read(
    any_place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    write(any_place, layout(1, 1))
    blocks, pools = any_place.stage(LayerRange(0, 5), TensorRank())
    store, part = any_place.store, StagePart.of(pools.geometry)
    whole = [memoryview(bytearray(store.get(key, ()) or 0)) for key in page_keys(part)]
    for key, pieces in zip(page_keys(part)[1:], whole[1:], strict=True):
        assert store.get(key, (pieces,)) == len(pieces)
        assert store.put(key, (pieces[:-1],))
    assert blocks.move(replace(READ, page_ids=(4, 5, 6))) == 1
    assert holds(pools, 1, 4, paged=True)
    warned = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert len(warned) == 1, "though two are damaged"
    assert blocks.num_known(NAMES, with_state=False) == 1
    there = [list(parts) for parts in store.parts(NAMES, Content.PAGE)]
    assert there == [[part], [], []], "damaged objects are removed, also later ones"
    for number in (1, 2, 3):
        fill(pools, number, number)
    assert blocks.move(WRITTEN) == 3
    check_read(any_place, LayerRange(0, 5), TensorRank())


def page_keys(part: StagePart) -> list[ObjectKey]:
    return [ObjectKey(name, Content.PAGE, part) for name in NAMES]


def test_a_block_that_another_stage_lacks_is_written_again(any_place: Place) -> None:
    write(any_place, layout(1, 1))
    blocks, pools = any_place.stage(LayerRange(0, 5), TensorRank())
    blocks.forget(NAMES[1], Content.PAGE)
    assert blocks.num_known(NAMES, with_state=False) == 1
    fill(pools, 2, 2)
    assert blocks.move(WRITTEN) == 3
    assert blocks.num_known(NAMES, with_state=True) == 3
    blocks.forget(NAMES[2], Content.STATE)
    assert blocks.num_known(NAMES, with_state=False) == 3
    assert blocks.num_known(NAMES, with_state=True) == 0


def test_metrics_know_all_tiers() -> None:
    assert [*Tier] == [*TIERS]


def test_a_state_is_known_only_with_the_blocks_before_it(place: Place) -> None:
    blocks, pools = place.stage(LayerRange(0, 5), TensorRank())
    fill(pools, 2, 2)
    both = replace(WRITTEN, names=NAMES[:2], page_ids=(1, 2), slot_id=2, state_of=NAMES[1])
    assert blocks.move(both) == 2
    assert blocks.move(replace(WRITTEN, names=NAMES[2:], page_ids=(3,))) == 1
    assert blocks.num_known(NAMES, with_state=False) == 3
    assert blocks.num_known(NAMES, with_state=True) == 2
    assert blocks.num_known(NAMES[:1], with_state=True) == 0
    assert blocks.num_known(NAMES[1:2], with_state=True) == 1

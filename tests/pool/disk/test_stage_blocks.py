"""Blocks of stages and ranks on disk: every layout reads what any other one wrote."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.core.layer_range import LayerRange, TensorRank
from pool.disk.part_file import Content, StagePart
from pool.disk.stage_blocks import BlockMove
from tests.pool.disk.caches import fill, holds, layout, stage

NAMES = tuple(bytes([number]) * 16 for number in range(1, 4))
SIZES = list(itertools.product((1, 2, 3), (1, 2, 3, 4)))
Parts = Sequence[tuple[LayerRange, TensorRank]]


def write(folder: Path, parts: Parts) -> None:
    """Write blocks 1 to 3, and the state after the last."""
    for layers, tensor in parts:
        blocks, pools = stage(folder, layers, tensor)
        for number in (1, 2, 3):
            fill(pools, number, number)
        move = BlockMove(load=False, names=NAMES, page_ids=(1, 2, 3), slot_id=3, state_of=NAMES[-1])
        assert blocks.move(move) == 3
        blocks.close()


def check_read(folder: Path, layers: LayerRange, tensor: TensorRank) -> None:
    """Read all blocks into other pages, and the state into another slot."""
    blocks, pools = stage(folder, layers, tensor)
    assert blocks.num_known(NAMES, with_state=True) == 3
    move = BlockMove(load=True, names=NAMES, page_ids=(7, 5, 8), slot_id=2, state_of=NAMES[-1])
    assert blocks.move(move) == 3
    for number, page_id in enumerate((7, 5, 8), start=1):
        assert holds(pools, number, page_id, paged=True)
    assert holds(pools, 3, 2, paged=False)
    blocks.close()


@pytest.mark.parametrize("written", SIZES, ids=str)
def test_any_layout_reads_what_another_one_wrote(written: tuple[int, int], tmp_path: Path) -> None:
    write(tmp_path, layout(*written))
    for size in SIZES:
        for layers, tensor in layout(*size):
            check_read(tmp_path, layers, tensor)


def test_stages_with_overlapping_layers_complete_each_other(tmp_path: Path) -> None:
    one = TensorRank()
    write(tmp_path, [(LayerRange(0, 3), one), (LayerRange(1, 4), one), (LayerRange(2, 5), one)])
    check_read(tmp_path, LayerRange(0, 5), one)


@pytest.mark.parametrize(
    "parts",
    [
        layout(3, 1)[:2],
        layout(2, 2)[:3],
        [(LayerRange(0, 2), TensorRank()), (LayerRange(3, 5), TensorRank())],
    ],
    ids=["a stage", "a rank", "a layer between"],
)
def test_a_block_with_a_part_missing_is_not_known(parts: Parts, tmp_path: Path) -> None:
    write(tmp_path, parts)
    blocks, _ = stage(tmp_path, LayerRange(0, 5), TensorRank())
    assert blocks.num_known(NAMES, with_state=False) == 0
    assert blocks.move(BlockMove(load=True, names=NAMES, page_ids=(1, 2, 3))) == 0
    blocks.close()


@pytest.mark.parametrize("name", ["0-5.0of3", "0-5.7of2", "5-0.0of1", "0-5.0of0", "x", "0-99.0of1"])
def test_files_with_other_names_are_passed_over(name: str, tmp_path: Path) -> None:
    write(tmp_path, layout(1, 1))
    for path in list(tmp_path.rglob("page.0-5.0of1")):
        path.rename(path.with_name(f"page.{name}"))
    blocks, _ = stage(tmp_path, LayerRange(0, 5), TensorRank())
    assert blocks.move(BlockMove(load=True, names=NAMES, page_ids=(1, 2, 3))) == 0
    blocks.close()


def test_blocks_before_a_damaged_one_are_read(tmp_path: Path) -> None:
    write(tmp_path, layout(1, 1))
    blocks, pools = stage(tmp_path, LayerRange(0, 5), TensorRank())
    part = str(StagePart.of(pools.geometry))
    for name in NAMES[1:]:
        (path,) = tmp_path.rglob(f"{name.hex()}/{Content.PAGE}.{part}")
        path.write_bytes(path.read_bytes()[:-1])
    assert blocks.move(BlockMove(load=True, names=NAMES, page_ids=(4, 5, 6))) == 1
    assert holds(pools, 1, 4, paged=True)
    assert blocks.num_known(NAMES, with_state=False) == 1
    assert len(list(tmp_path.rglob("page.*"))) == 1, "damaged files are removed, also later ones"
    for number in (1, 2, 3):
        fill(pools, number, number)
    assert blocks.move(BlockMove(load=False, names=NAMES, page_ids=(1, 2, 3))) == 3
    check_read(tmp_path, LayerRange(0, 5), TensorRank())
    blocks.close()


def test_a_state_is_known_only_with_the_blocks_before_it(tmp_path: Path) -> None:
    blocks, pools = stage(tmp_path, LayerRange(0, 5), TensorRank())
    fill(pools, 2, 2)
    both = BlockMove(load=False, names=NAMES[:2], page_ids=(1, 2), slot_id=2, state_of=NAMES[1])
    assert blocks.move(both) == 2
    assert blocks.move(BlockMove(load=False, names=NAMES[2:], page_ids=(3,))) == 1
    assert blocks.num_known(NAMES, with_state=False) == 3
    assert blocks.num_known(NAMES, with_state=True) == 2
    assert blocks.num_known(NAMES[:1], with_state=True) == 0
    assert blocks.num_known(NAMES[1:2], with_state=True) == 1
    blocks.close()

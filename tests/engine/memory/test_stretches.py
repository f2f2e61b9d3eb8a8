"""Transfers between ranks of pools with different rank counts: each byte once, to its place."""

import math
from itertools import product

import numpy as np
import pytest

from engine.core.layer_range import LayerRange, TensorRank
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry, Stretch, stretches
from runtime.errors import ConfigError

KV = CacheSpec(
    0, CacheKind.KV, (2, 8, 4, 3), "float32", 4, split_axis=1, blocks=(8,), may_repeat=True
)
FEW_HEADS = CacheSpec(
    0, CacheKind.KV, (2, 2, 4, 3), "float32", 4, split_axis=1, blocks=(2,), may_repeat=True
)
CONV = CacheSpec(0, CacheKind.CONV, (3, 32), "float32", 4, split_axis=1, blocks=(8, 8, 16))
STATE = CacheSpec(0, CacheKind.STATE, (8, 2, 5), "float32", 4, split_axis=0, blocks=(8,))
LATENT = CacheSpec(0, CacheKind.LATENT, (4, 6), "float32", 4)
UNEVEN_HEADS = CacheSpec(
    0, CacheKind.KV, (2, 9, 4, 3), "float32", 4, split_axis=1, blocks=(9,), may_repeat=True
)
SERVED_HEADS = CacheSpec(  # two value heads of each of 11 key heads
    0, CacheKind.STATE, (22, 2, 5), "float32", 4, split_axis=0, blocks=(22,), num_units=11
)
UNEVEN_CHANNELS = CacheSpec(
    0, CacheKind.CONV, (3, 90), "float32", 4, split_axis=1, blocks=(27, 27, 36), num_units=9
)
WIDTHS = list(product((1, 2, 4, 8), repeat=2))


def kept(record: np.ndarray, spec: CacheSpec, rank: TensorRank) -> np.ndarray:
    """Return a rank's part of a whole record, by indexing."""
    if spec.split_axis is None:
        return record
    starts = np.cumsum([0, *spec.blocks[:-1]])
    index = np.concatenate(
        [
            np.arange(start + part.start, start + part.stop)
            for start, part in zip(starts, spec.parts(rank), strict=True)
        ]
    )
    return record.take(index, axis=spec.split_axis)


@pytest.mark.parametrize(
    ("spec", "source_size", "dest_size"),
    [
        (spec, *widths)
        for spec in (
            KV,
            FEW_HEADS,
            CONV,
            STATE,
            LATENT,
            UNEVEN_HEADS,
            SERVED_HEADS,
            UNEVEN_CHANNELS,
        )
        for widths in product((1, 2, 3, 4, 6, 8), repeat=2)
        if spec is not FEW_HEADS or 3 not in widths
    ],
)
def test_every_byte_arrives_once_at_its_place_s4_8(
    spec: CacheSpec, source_size: int, dest_size: int
) -> None:
    record = np.arange(math.prod(spec.record_shape), dtype=np.float32).reshape(spec.record_shape)
    for dest_rank in range(dest_size):
        dest = TensorRank(dest_rank, dest_size)
        wanted = np.ascontiguousarray(kept(record, spec, dest)).reshape(-1).view(np.uint8)
        assert wanted.nbytes == spec.of_rank(dest).record_bytes
        landed, writers = np.zeros_like(wanted), np.zeros(wanted.shape, np.int64)
        for source_rank in range(source_size):
            source = TensorRank(source_rank, source_size)
            own = np.ascontiguousarray(kept(record, spec, source)).reshape(-1).view(np.uint8)
            moved = stretches(spec, source, dest)
            for part in [Stretch(0, 0, own.nbytes)] if moved is None else moved:
                landed[part.dest_start : part.dest_start + part.num_bytes] = own[
                    part.source_start : part.source_start + part.num_bytes
                ]
                writers[part.dest_start : part.dest_start + part.num_bytes] += 1
        assert (writers == 1).all()
        assert (landed == wanted).all()


def test_channels_of_a_convolution_go_by_their_blocks_s4_8() -> None:
    """The upstream case, in elements of one row: blocks of 4, 4 and 8 channels become blocks of 2,
    2 and 4."""
    row = CacheSpec(0, CacheKind.CONV, (1, 32), "float32", 4, split_axis=1, blocks=(8, 8, 16))

    def moved(source: TensorRank, dest: TensorRank) -> list[tuple[int, int, int]]:
        return [
            (part.source_start // 4, part.dest_start // 4, part.num_bytes // 4)
            for part in stretches(row, source, dest) or ()
        ]

    assert moved(TensorRank(0, 2), TensorRank(0, 4)) == [(0, 0, 2), (4, 2, 2), (8, 4, 4)]
    assert moved(TensorRank(0, 2), TensorRank(1, 4)) == [(2, 0, 2), (6, 2, 2), (12, 4, 4)]
    assert moved(TensorRank(1, 2), TensorRank(1, 4)) == []
    assert moved(TensorRank(0, 4), TensorRank(0, 2)) == [(0, 0, 2), (2, 4, 2), (4, 8, 4)]
    assert moved(TensorRank(1, 4), TensorRank(0, 2)) == [(0, 2, 2), (2, 6, 2), (4, 12, 4)]


def test_fewer_heads_than_ranks_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--tp 4 leaves a rank without any of the 3 state of"):
        CacheSpec(0, CacheKind.STATE, (3, 2, 5), "float32", 4, split_axis=0, blocks=(3,)).of_rank(
            TensorRank(0, 4)
        )


@pytest.mark.parametrize(("source_size", "dest_size"), WIDTHS)
def test_a_draft_is_whole_and_the_first_ranks_own(source_size: int, dest_size: int) -> None:
    spec = CacheSpec(3, CacheKind.KV, (2, 2, 4, 3), "float32", 4, of_draft=True)
    moved = {
        (source, dest): stretches(
            spec, TensorRank(source, source_size), TensorRank(dest, dest_size)
        )
        for source in range(source_size)
        for dest in range(dest_size)
    }
    assert moved.pop((0, 0)) is None
    assert all(each == () for each in moved.values())
    kept_by = [
        PoolGeometry(4, 2, 0, LayerRange(0, 4), (spec,), TensorRank(rank, 2)).local_specs()
        for rank in range(2)
    ]
    assert kept_by == [(spec,), ()]

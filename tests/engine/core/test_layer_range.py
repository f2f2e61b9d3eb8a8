"""Layer ranges and their split over pipeline stages, against the rule written out by hand."""

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.layer_range import LayerRange, Placement, balanced_counts, get_pp_indices
from runtime.errors import ConfigError


def split(num_layers: int, size: int, partition: str | None = None) -> list[tuple[int, int]]:
    ranges = [get_pp_indices(num_layers, rank, size, partition) for rank in range(size)]
    return [(layers.start, layers.end) for layers in ranges]


@pytest.mark.parametrize(
    ("num_layers", "size", "expected"),
    [
        (32, 3, [(0, 10), (10, 21), (21, 32)]),
        (5, 4, [(0, 1), (1, 2), (2, 3), (3, 5)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (7, 1, [(0, 7)]),
        (1, 1, [(0, 1)]),
        (61, 4, [(0, 15), (15, 30), (30, 45), (45, 61)]),
        (8, 3, [(0, 2), (2, 5), (5, 8)]),
        (60, 2, [(0, 30), (30, 60)]),
        (11, 4, [(0, 2), (2, 5), (5, 8), (8, 11)]),
    ],
)
def test_s0_1_default_ranges(num_layers: int, size: int, expected: list[tuple[int, int]]) -> None:
    assert split(num_layers, size) == expected


@given(st.integers(1, 24).flatmap(lambda size: st.tuples(st.integers(size, 200), st.just(size))))
def test_s0_2_ranges_cover_all_layers_once_and_grow_towards_the_end(shape: tuple[int, int]) -> None:
    num_layers, size = shape
    ranges = [get_pp_indices(num_layers, rank, size) for rank in range(size)]
    assert [layer_id for layers in ranges for layer_id in layers] == list(range(num_layers))
    sizes = [len(layers) for layers in ranges]
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] <= 1


@pytest.mark.parametrize("partition", ["10,11,11", " 10, 11 ,11 "])
def test_s0_3_partition_names_the_counts(partition: str) -> None:
    assert split(32, 3, partition) == [(0, 10), (10, 21), (21, 32)]


def test_s0_3_partition_may_be_uneven() -> None:
    assert split(32, 3, "1,30,1") == [(0, 1), (1, 31), (31, 32)]


@pytest.mark.parametrize(
    ("partition", "fact"),
    [
        ("10,x,11", "comma-separated integers"),
        ("10,,22", "comma-separated integers"),
        ("10.5,11,10.5", "comma-separated integers"),
        ("16,16", "names 2 stages, the pool has 3"),
        ("8,8,8,8", "names 4 stages, the pool has 3"),
        ("10,11,12", "sums to 33, the model has 32"),
        ("10,11,10", "sums to 31, the model has 32"),
        ("-1,22,11", "a stage without layers"),
        ("0,21,11", "a stage without layers"),
    ],
)
def test_s0_3_bad_partition_is_refused_with_the_fact(partition: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact) as caught:
        get_pp_indices(32, 0, 3, partition)
    assert caught.value.field == "partition"


@pytest.mark.parametrize("partition", ["10,11,11", "x", "-1"])
def test_s0_3_a_pool_of_one_stage_ignores_the_partition(partition: str) -> None:
    assert split(1, 1, partition) == [(0, 1)]


@pytest.mark.parametrize("partition", [None, "1,1,1"])
def test_s0_4_more_stages_than_layers_is_refused(partition: str | None) -> None:
    with pytest.raises(
        ConfigError, match="3 pipeline stages need at least 3 layers, the model has 2"
    ) as caught:
        get_pp_indices(2, 0, 3, partition)
    assert caught.value.field == "pipeline_size"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_other_partition_has_a_cheaper_dearest_stage(
    costs: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(costs)))
    counts = balanced_counts(costs, size)
    assert len(counts) == size
    assert min(counts) > 0
    assert sum(counts) == len(costs)
    every = [
        dearest(costs, (0, *cuts, len(costs)))
        for cuts in combinations(range(1, len(costs)), size - 1)
    ]
    assert dearest(costs, list(accumulate(counts, initial=0))) == min(every)


def dearest(costs: Sequence[int], cuts: Sequence[int]) -> int:
    return max(sum(costs[start:end]) for start, end in pairwise(cuts))


def test_more_balanced_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="3 pipeline stages need at least 3 layers, the model has 2"
    ):
        balanced_counts([1, 1], 3)


@pytest.mark.parametrize("rank", [-1, 3])
def test_rank_outside_the_pool_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"must be in 0\.\.2") as caught:
        get_pp_indices(32, rank, 3)
    assert caught.value.field == "pipeline_rank"


def test_layer_range_is_half_open() -> None:
    layers = LayerRange(3, 6)
    assert [layer_id in layers for layer_id in range(2, 8)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    assert list(layers) == [3, 4, 5]
    assert len(layers) == 3
    assert str(layers) == "3-6"
    assert len(LayerRange(4, 4)) == 0


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3)])
def test_layer_range_refuses_nonsense(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="0 <= start <= end"):
        LayerRange(start, end)


@given(*[st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted) for _ in range(2)])
def test_intersection_is_the_common_layers(first: list[int], second: list[int]) -> None:
    left, right = LayerRange(*first), LayerRange(*second)
    assert set(left.intersect(right)) == set(left) & set(right)


def test_placement_knows_the_ends_of_the_pipeline() -> None:
    ends = [
        (p.pipeline_rank == 0, p.is_last_stage) for p in (Placement(rank, 3) for rank in range(3))
    ]
    assert ends == [(True, False), (False, False), (False, True)]
    assert Placement().is_last_stage

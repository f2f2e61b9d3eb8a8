"""Pool sizes against sums done by hand. The shapes of S4 are 60 layers of which every fourth
attends."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.layer_range import LayerRange, get_pp_indices
from engine.memory.budget import (
    PoolBudget,
    decode_requests,
    describe_pools,
    plan_pools,
    stage_costs,
)
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from runtime.errors import ConfigError

PAGE, CONV, STATE = 4096, 96, 1000  # bytes per layer


def specs_of(num_layers: int = 60, interval: int = 4) -> list[CacheSpec]:
    specs = []
    for layer_id in range(num_layers):
        if layer_id % interval == interval - 1:
            specs.append(CacheSpec(layer_id, CacheKind.KV, (2, 2, 64, 8), "bfloat16", 2))
        else:
            specs.append(CacheSpec(layer_id, CacheKind.CONV, (3, 16), "bfloat16", 2))
            specs.append(CacheSpec(layer_id, CacheKind.STATE, (10, 5, 5), "float32", 4))
    return specs


def partition_of(size: int, num_layers: int = 60, counts: str | None = None) -> list[LayerRange]:
    return [get_pp_indices(num_layers, rank, size, counts) for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "full", "linear"),
    [
        (1, [15], [45]),
        (2, [7, 8], [23, 22]),
        (3, [5, 5, 5], [15, 15, 15]),
        (4, [3, 4, 4, 4], [12, 11, 11, 11]),
        (7, [2, 2, 2, 2, 2, 2, 3], [6, 6, 6, 7, 7, 7, 6]),
    ],
)
def test_s4_1_memory_of_each_stage(size: int, full: list[int], linear: list[int]) -> None:
    costs = stage_costs(specs_of(), partition_of(size))
    assert [cost.page_bytes for cost in costs] == [n * PAGE for n in full]
    assert [cost.slot_bytes for cost in costs] == [n * (CONV + STATE) for n in linear]
    assert sum(cost.page_bytes for cost in costs) == 15 * PAGE
    assert sum(cost.slot_bytes for cost in costs) == 45 * (CONV + STATE)


def test_s4_2_slots_are_charged_with_the_largest_share() -> None:
    costs = stage_costs(specs_of(), partition_of(2))
    assert (
        max(cost.slot_bytes for cost in costs) * 45 == sum(cost.slot_bytes for cost in costs) * 23
    )


def test_s4_2_pages_by_hand() -> None:
    """Two stages, 9 slots, 10 MB each: the second has less room for pages although its slots cost
    less.

    Stage 0: (10_000_000 - 9 * 23 * 1096) // (7 * 4096) = 340.
    Stage 1: (10_000_000 - 9 * 22 * 1096) // (8 * 4096) = 298.
    """
    budget = plan_pools(
        specs_of(),
        partition_of(2),
        budget_bytes=10_000_000,
        page_size=64,
        max_context_tokens=6_400,
        num_requests=8,
    )
    assert budget == PoolBudget(num_pages=298, num_slots=9)


def test_s4_2_the_stage_with_the_dearest_slots_can_be_the_narrow_one() -> None:
    """Stage 0 has no attention: it limits the slots; stage 1 the pages, (400_000 - 4 * 2 * 1096) //
    4096 = 95."""
    specs = specs_of(num_layers=8)
    partition = [LayerRange(0, 3), LayerRange(3, 6), LayerRange(6, 8)]
    budget = plan_pools(
        specs,
        partition,
        budget_bytes=400_000,
        page_size=64,
        max_context_tokens=2048,
        num_requests=3,
    )
    assert budget == PoolBudget(num_pages=95, num_slots=4)
    with pytest.raises(ConfigError, match=r"stage 0 \(layers 0-3\) needs 4 slots \* 3288"):
        plan_pools(
            specs,
            partition,
            budget_bytes=4 * 3 * 1096 - 1,
            page_size=64,
            max_context_tokens=64,
            num_requests=3,
        )


@given(st.integers(1, 12), st.integers(1, 6), st.integers(100_000, 3_000_000))
def test_s4_2_the_budget_holds_on_every_stage_and_one_more_page_does_not(
    size: int, num_requests: int, budget_bytes: int
) -> None:
    specs, partition = specs_of(), partition_of(size)
    try:
        budget = plan_pools(
            specs,
            partition,
            budget_bytes=budget_bytes,
            page_size=64,
            max_context_tokens=1024,
            num_requests=num_requests,
        )
    except ConfigError:
        needs = [
            17 * c.page_bytes + (num_requests + 1) * c.slot_bytes
            for c in stage_costs(specs, partition)
        ]
        assert max(needs) > budget_bytes
        return
    used = [
        budget.num_pages * c.page_bytes + budget.num_slots * c.slot_bytes
        for c in stage_costs(specs, partition)
    ]
    one_more = [
        used + c.page_bytes for used, c in zip(used, stage_costs(specs, partition), strict=True)
    ]
    assert max(used) <= budget_bytes
    assert max(one_more) > budget_bytes or budget.num_pages == 1 + num_requests * 16


def test_tree_states_are_budgeted_for_running_requests_only() -> None:
    """Qwen3.5-9B as published: 24 of 32 layers are recurrent, with 32 heads of 128 x 128 in fp32
    and a convolution over three past inputs of (2 * 16 + 32) * 128 channels in bf16; 8 attend with
    4 key heads of 256. 16 run, 48 hold memory.

    A state is 24 * (2 MiB + 48 KiB) = 49.125 MiB, a record of 16 nodes 786 MiB, a page of 64 tokens
    2 MiB. For 17 records and 49 slots 17 * 786 + 49 * 49.125 = 15769.125 MiB; of 20 GiB 4710.875
    MiB remain: 2355 pages. Records for all who hold memory would be 49 * 786 MiB = 37.6 GiB.
    """
    specs = []
    for layer_id in range(32):
        if layer_id % 4 == 3:
            specs.append(CacheSpec(layer_id, CacheKind.KV, (2, 4, 64, 256), "bfloat16", 2))
        else:
            specs.append(CacheSpec(layer_id, CacheKind.CONV, (3, 8192), "bfloat16", 2))
            specs.append(CacheSpec(layer_id, CacheKind.STATE, (32, 128, 128), "float32", 4))
    nodes = [
        replace(spec, record_shape=(16, *spec.record_shape))
        for spec in specs
        if not spec.kind.is_paged
    ]
    (cost,) = stage_costs(specs, [LayerRange(0, 32)], nodes)
    assert (cost.page_bytes, cost.slot_bytes, cost.scratch_bytes) == (
        2 << 20,
        49.125 * 2**20,
        786 << 20,
    )

    def plan(budget_mib: int, num_scratch: int) -> PoolBudget:
        return plan_pools(
            specs,
            [LayerRange(0, 32)],
            budget_bytes=budget_mib << 20,
            page_size=64,
            max_context_tokens=32768,
            num_requests=48,
            scratch=nodes,
            num_scratch=num_scratch,
        )

    assert plan(20 << 10, 17) == PoolBudget(num_pages=2355, num_slots=49)
    with pytest.raises(ConfigError, match=r"17 states of trees \* 824180736 \+ 49 slots"):
        plan(15769, 17)
    with pytest.raises(ConfigError, match="49 states of trees"):
        plan(37 << 10, 49)


def test_s4_1_the_log_shows_what_a_stage_allocates() -> None:
    """298 pages of 7 layers and 9 slots of 23: 298 * 28672 + 9 * 25208 bytes, 8.4 MiB; the null
    records are counted in the bytes only."""
    layers = partition_of(2)[0]
    assert describe_pools(PoolGeometry(64, 298, 9, layers, tuple(specs_of()))) == (
        "layers 0-30, 297 pages of 64 tokens and 28672 bytes, 8 state slots of 25208 bytes, 8.4 MiB of cache"
    )
    plain = tuple(spec for spec in specs_of() if spec.kind is CacheKind.KV)
    assert describe_pools(PoolGeometry(64, 2, 0, layers, plain)).endswith(
        "1 pages of 64 tokens and 28672 bytes, 0 state slots of 0 bytes, 0.1 MiB of cache"
    )


def test_more_pages_than_the_requests_can_use_are_not_made() -> None:
    budget = plan_pools(
        specs_of(),
        partition_of(1),
        budget_bytes=10**12,
        page_size=64,
        max_context_tokens=1000,
        num_requests=5,
    )
    assert budget == PoolBudget(num_pages=1 + 5 * 16, num_slots=6)


def test_a_plain_model_has_no_slots() -> None:
    specs = [
        CacheSpec(layer_id, CacheKind.KV, (2, 2, 64, 8), "bfloat16", 2) for layer_id in range(3)
    ]
    budget = plan_pools(
        specs,
        partition_of(2, 3),
        budget_bytes=2 * PAGE * 11,
        page_size=64,
        max_context_tokens=640,
        num_requests=4,
    )
    assert budget == PoolBudget(num_pages=11, num_slots=0)


def test_a_model_without_attention_still_counts_pages() -> None:
    """Requests are admitted by pages; those of such a model cost nothing."""
    specs = [spec for spec in specs_of(num_layers=3) if not spec.kind.is_paged]
    budget = plan_pools(
        specs,
        partition_of(3, 3),
        budget_bytes=3 * 1096,
        page_size=64,
        max_context_tokens=128,
        num_requests=2,
    )
    assert budget == PoolBudget(num_pages=1 + 2 * 2, num_slots=3)


def test_the_smallest_budget_that_fits_one_request() -> None:
    """One null page and 2 pages of 15 layers, 3 slots of 45: 3 * 15 * 4096 + 3 * 45 * 1096 =
    332280."""

    def plan(budget_bytes: int) -> PoolBudget:
        return plan_pools(
            specs_of(),
            partition_of(1),
            budget_bytes=budget_bytes,
            page_size=64,
            max_context_tokens=65,
            num_requests=2,
        )

    assert plan(332_280) == PoolBudget(num_pages=3, num_slots=3)
    with pytest.raises(ConfigError) as caught:
        plan(332_279)
    assert caught.value.field == "budget_bytes"
    assert str(caught.value) == (
        "cache budget of 332279 bytes is too small for one request of 65 tokens: stage 0 (layers 0-60) "
        "needs 3 slots * 49320 + (1 null page + 2 pages) * 61440 = 332280 bytes"
    )


@pytest.mark.parametrize(
    ("max_running", "num_landing", "num_requests"),
    [(16, 0, 48), (1, 0, 3), (32, 0, 96), (32, 5, 37), (33, 0, 33), (64, 10, 74)],
)
def test_s4_6_requests_a_decode_pool_holds(
    max_running: int, num_landing: int, num_requests: int
) -> None:
    assert decode_requests(max_running, num_landing=num_landing) == num_requests


def test_s4_6_rows_of_a_pool_of_16_are_49_with_the_null_row() -> None:
    assert decode_requests(16) + 1 == 49

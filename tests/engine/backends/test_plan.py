"""The plan marker's truth table with the CPU backend, and what a plan lists."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.backends.plan import AttentionPlan, build_plan
from engine.contracts.attention import AttentionGeometry
from engine.core import rows as rows_of_batch
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecRow
from engine.core.rows import build_batch
from runtime.errors import StalePlanError
from tests.support.kernels.attention import poisoned_pool
from tests.support.kernels.batches import Row, make_batch

GEOMETRY = AttentionGeometry(num_heads=4, num_kv_heads=2, head_dim=8, page_size=16, scale=0.3)
ROWS = (Row(1, 3, (1,)), Row(1, 20, (2, 3)))
PADDING = Row(1)  # writes to the null page
LAYERS = (0, 1, 2)


def build() -> CpuAttention:
    pools = {layer_id: poisoned_pool(8, GEOMETRY) for layer_id in LAYERS}
    for pool in pools.values():
        pool[1:4] = torch.randn(3, *pool.shape[1:], generator=torch.Generator().manual_seed(0))
    return CpuAttention(kv_pools=pools, geometry=GEOMETRY)


def draw(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(num_tokens, 4, 8, generator=generator),
        torch.randn(num_tokens, 2, 8, generator=generator),
        torch.randn(num_tokens, 2, 8, generator=generator),
    )


def planned(batch: ForwardBatch) -> AttentionPlan:
    return build_plan(batch, GEOMETRY, num_pages=64)


def pad(batch: ForwardBatch, *, with_token_ids: bool = True) -> None:
    """Grow the batch by one padding row, in place, as a captured graph of a fixed size would."""
    padded = make_batch(ForwardMode.DECODE, [*ROWS, PADDING])
    for name in (
        "request_keys",
        "query_lens",
        "context_lens",
        "token_ids",
        "positions",
        "page_tables",
        "slot_ids",
        "sampling",
    ):
        setattr(batch, name, getattr(padded, name))
    if not with_token_ids:
        batch.token_ids = None


def forward(backend: CpuAttention, batch: ForwardBatch) -> list[Tensor]:
    """Run a forward as every path does: check the plan, then run all layers."""
    if batch.needs_forward_metadata_init():
        backend.plan(batch)
    q, k, v = draw(3)
    count = batch.num_tokens
    return [backend.run(layer_id, q[:count], k[:count], v[:count], batch) for layer_id in LAYERS]


def content(batch: ForwardBatch) -> list[object]:
    """Copy every number of the plan."""
    plan = batch.forward_metadata_plan
    assert isinstance(plan, AttentionPlan)
    values = [getattr(plan, f.name) for f in fields(plan)]
    values += [getattr(plan.rows, f.name) for f in fields(plan.rows)]
    return [
        value.tolist() if isinstance(value, Tensor) else value
        for value in values
        if value is not plan.rows
    ]


def test_a_fresh_batch_is_planned_once_for_all_layers_and_forwards() -> None:
    backend, batch = build(), make_batch(ForwardMode.DECODE, ROWS)
    first, second = forward(backend, batch), forward(backend, batch)
    assert backend.num_plans == 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_batch_padded_after_planning_is_refused_and_keeps_its_plan() -> None:
    backend, batch = build(), make_batch(ForwardMode.DECODE, ROWS)
    backend.plan(batch)
    before, plan = content(batch), batch.forward_metadata_plan
    pad(batch)
    assert not batch.needs_forward_metadata_init()
    with pytest.raises(StalePlanError, match="2 rows and 2 tokens, the batch has 3 and 3"):
        forward(backend, batch)
    assert backend.num_plans == 1
    assert batch.forward_metadata_plan is plan
    assert content(batch) == before


def test_a_replan_equivalent_batch_of_the_same_shape_is_not_planned_again() -> None:
    backend, batch = build(), make_batch(ForwardMode.DECODE, ROWS)
    backend.plan(batch, replan_equivalent=True)
    forward(backend, batch)
    assert backend.num_plans == 1


def test_a_replan_equivalent_batch_is_replanned_with_equal_bits() -> None:
    backend, batch = build(), make_batch(ForwardMode.DECODE, ROWS)
    backend.plan(batch, replan_equivalent=True)
    alone = forward(backend, batch)
    pad(batch)
    padded = forward(backend, batch)
    assert backend.num_plans == 2
    assert all(torch.equal(a, b[:2]) for a, b in zip(alone, padded, strict=True))


@pytest.mark.parametrize("with_token_ids", [True, False])
def test_a_batch_marked_after_padding_records_the_shape_and_keeps_the_plan(
    with_token_ids: bool,  # noqa: FBT001
) -> None:
    backend, batch = build(), make_batch(ForwardMode.DECODE, ROWS)
    backend.plan(batch)
    before = content(batch)
    pad(batch, with_token_ids=with_token_ids)
    batch.mark_forward_metadata_ready(backend)
    assert not batch.needs_forward_metadata_init()
    assert batch.forward_metadata_planned_bs == 3
    assert batch.forward_metadata_planned_num_tokens == (3 if with_token_ids else 0)
    assert content(batch) == before
    with pytest.raises(StalePlanError):  # a mark is no plan for the row that came later
        forward(backend, batch)
    assert backend.num_plans == 1


def test_a_batch_padded_before_planning_is_covered() -> None:
    backend, batch = build(), make_batch(ForwardMode.DECODE, ROWS)
    pad(batch)
    padded = forward(backend, batch)
    alone = forward(build(), make_batch(ForwardMode.DECODE, ROWS))
    assert all(torch.equal(a, b[:2]) for a, b in zip(alone, padded, strict=True))


def test_a_chunk_is_cut_into_tiles_of_which_the_longest_come_first() -> None:
    batch = make_batch(
        ForwardMode.PREFILL, [Row(3, 0, (1,)), Row(0, 16, (2,)), Row(516, 20, tuple(range(1, 36)))]
    )
    rows = planned(batch).rows
    assert rows.tiles.tolist() == [[2, 259, 256], [2, 3, 256], [2, 515, 4], [0, 0, 3]]
    assert rows.positions.tolist() == [0, 1, 2, *range(20, 536)]
    assert rows.num_in_order.tolist() == [3, 16, 536]
    assert rows.paths.shape == (519, 0)


def test_tree_nodes_attend_to_their_path_at_the_slots_of_plain_decoding() -> None:
    #      0          1 and 2 follow 0, 3 follows 2; the row's pages are 4 and 2, its nodes lie from 14 on
    rows = planned(
        build_batch(
            ForwardMode.VERIFY,
            [
                rows_of_batch.Row(
                    0, [9, 9, 9, 9], 14, [4, 2], 0, None, SpecRow(parents=(-1, 0, 0, 2))
                ),
                rows_of_batch.Row(1, [9], 3, [5], 0, None, SpecRow(parents=(-1,))),
            ],
        )
    ).rows
    assert rows.positions.tolist() == [14, 15, 15, 16, 3]
    assert rows.num_in_order.tolist() == [14, 3]
    first, second, third, fourth = 4 * 16 + 14, 4 * 16 + 15, 2 * 16, 2 * 16 + 1
    seen = [path[:count] for path, count in zip(rows.paths.tolist(), (1, 2, 2, 3, 1), strict=True)]
    assert seen == [[first], [first, second], [first, third], [first, third, fourth], [5 * 16 + 3]]

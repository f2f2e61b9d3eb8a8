"""The plan marker's truth table with the CPU backend, and what a plan lists."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.backends.plan import AttentionPlan, PageRun, RowGroup, build_plan
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.numerics import Numerics
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
    return CpuAttention(kv_pools=pools, geometry=GEOMETRY, numerics=Numerics.EXACT)


def draw(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(num_tokens, 4, 8, generator=generator), torch.randn(num_tokens, 2, 8, generator=generator),
            torch.randn(num_tokens, 2, 8, generator=generator))


def groups_of(batch: ForwardBatch) -> tuple[RowGroup, ...]:
    return build_plan(batch, GEOMETRY, torch.float32).groups


def pad(batch: ForwardBatch, *, with_token_ids: bool = True) -> None:
    """Grow the batch by one padding row, in place, as a captured graph of a fixed size would."""
    padded = make_batch(ForwardMode.DECODE, [*ROWS, PADDING])
    for name in ("request_ids", "query_lens", "context_lens", "token_ids", "positions", "page_tables", "slot_ids",
                 "sampling"):
        setattr(batch, name, getattr(padded, name))
    if not with_token_ids:
        batch.token_ids = None


def forward(backend: CpuAttention, batch: ForwardBatch) -> list[Tensor]:
    """What every forward path does: ask the one question, then run all layers."""
    if batch.needs_forward_metadata_init():
        backend.plan(batch)
    q, k, v = draw(3)
    count = batch.num_tokens
    return [backend.run(layer_id, q[:count], k[:count], v[:count], batch) for layer_id in LAYERS]


def content(batch: ForwardBatch) -> list[object]:
    """Every number of the plan, copied."""
    plan = batch.forward_metadata_plan
    assert isinstance(plan, AttentionPlan)
    values = [getattr(plan, f.name) for f in fields(plan)]
    values += [getattr(group, f.name) for group in plan.groups for f in fields(group)]
    return [value.tolist() if isinstance(value, Tensor) else value for value in values if value is not plan.groups]


def test_a_fresh_batch_is_planned_once_for_all_layers_and_forwards() -> None:
    backend, batch = build(), make_batch(ForwardMode.DECODE, ROWS)
    first, second = forward(backend, batch), forward(backend, batch)
    assert backend.num_plans == 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_batch_padded_after_planning_keeps_its_plan_to_the_byte_and_is_refused() -> None:
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


def test_a_replan_equivalent_batch_is_planned_again_after_padding_and_its_rows_keep_their_bits() -> None:
    backend, batch = build(), make_batch(ForwardMode.DECODE, ROWS)
    backend.plan(batch, replan_equivalent=True)
    alone = forward(backend, batch)
    pad(batch)
    padded = forward(backend, batch)
    assert backend.num_plans == 2
    assert all(torch.equal(a, b[:2]) for a, b in zip(alone, padded, strict=True))


@pytest.mark.parametrize("with_token_ids", [True, False])
def test_a_batch_marked_again_after_padding_records_the_new_shape_and_keeps_the_plan(
        with_token_ids: bool) -> None:  # noqa: FBT001
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


def test_rows_of_like_length_are_read_together_and_others_apart() -> None:
    rows = [Row(1, 199, tuple(range(1, 14))), Row(1, 0, (20,)), Row(1, 140, tuple(range(30, 39))),
            Row(1, 63, tuple(range(40, 44)))]
    groups = groups_of(make_batch(ForwardMode.DECODE, rows))
    assert [group.tokens.tolist() for group in groups] == [[0, 2], [1, 3]]
    tiles = [tile for group in groups for tile in group.tiles]
    assert [(tile.first_masked, tile.num_keys) for tile in tiles] == [(128, 256), (0, 64)]
    for tile, num_written in zip(tiles, ((200, 141), (1, 64)), strict=True):
        keys = torch.arange(tile.first_masked, tile.num_keys)
        assert tile.written is not None
        assert tile.written.tolist() == [[-int(key < count) for key in keys] for count in num_written]
    pages = groups[1].tiles[0].records.view(2, 2, 4)
    assert pages[:, 0].tolist() == [[80, 0, 0, 0], [4 * page for page in (40, 41, 42, 43)]]
    assert torch.equal(pages[:, 1], pages[:, 0] + 1)


def test_keys_that_all_tokens_see_are_not_masked() -> None:
    (group,) = groups_of(make_batch(ForwardMode.PREFILL, [Row(70, 130, tuple(range(1, 14)))]))
    (tile,) = group.tiles
    assert (tile.num_keys, tile.first_masked, tile.mask.shape) == (256, 128, (1, 1, 140, 128))
    seen = torch.arange(128, 256) <= 130 + torch.arange(70)[:, None]
    assert torch.equal(tile.mask[0, 0] == 0, seen.repeat_interleave(2, 0))
    (group,) = groups_of(make_batch(ForwardMode.DECODE, [Row(1, 127, tuple(range(1, 9)))]))
    assert (group.tiles[0].num_keys, group.tiles[0].first_masked) == (128, 128)
    assert group.tiles[0].written is None


def test_new_keys_are_written_in_runs_where_pages_take_several() -> None:
    long, short = Row(34, 30, (5, 6, 7, 8)), Row(1, 16, (1, 2))
    plan = build_plan(make_batch(ForwardMode.PREFILL, [long, short]), GEOMETRY, torch.float32)
    assert plan.runs == (PageRun(6, 14, 0, 2), PageRun(7, 0, 2, 16), PageRun(8, 0, 18, 16), PageRun(2, 0, 34, 1))
    for mode, rows in ((ForwardMode.DECODE, [short]), (ForwardMode.PREFILL, [Row(15, 9, (5, 6)), short])):
        assert build_plan(make_batch(mode, rows), GEOMETRY, torch.float32).runs == ()


def test_a_long_chunk_is_cut_into_tiles_that_read_up_to_their_end() -> None:
    (group,) = groups_of(make_batch(ForwardMode.PREFILL, [Row(300, 20, tuple(range(1, 21)))]))
    assert [(tile.start, tile.stop, tile.num_keys) for tile in group.tiles] == [(0, 128, 192), (128, 256, 320),
                                                                                (256, 300, 320)]


def test_long_contexts_are_cut_finer_and_gathered_in_smaller_groups() -> None:
    chunk = Row(256, 70_000, tuple(range(1, 1 + 4392)))
    (group,) = groups_of(make_batch(ForwardMode.PREFILL, [chunk]))
    assert {tile.stop - tile.start for tile in group.tiles} == {29, 24}
    rows = [Row(1, 2000, tuple(range(1, 127))) for _ in range(5)]
    groups = groups_of(make_batch(ForwardMode.DECODE, rows))
    assert [group.num_rows for group in groups] == [2, 2, 1]

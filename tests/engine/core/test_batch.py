"""The batch's rows against plain lists, and the plan marker against its truth table."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import Tensor

from engine.core.batch import (
    FieldRule,
    ForwardBatch,
    ForwardMode,
    GraphBucket,
    PlanMark,
    SamplingRow,
    ScoringRow,
    plan_where_needed,
)
from engine.core.draft_trees import CarriedKeys
from engine.core.request import SamplingParams
from engine.core.state_rows import StateRow, StateSnapshot

PLANNER, PLAN = object(), object()
NO_MARK = {  # the names by which a mark is asked for, and what they say without one
    "forward_metadata_ready": False,
    "forward_metadata_planned_bs": None,
    "forward_metadata_planned_num_tokens": None,
    "forward_metadata_replan_equivalent": False,
    "forward_metadata_planner": None,
    "forward_metadata_plan": None,
}


def build(
    lens: list[int], *, first_id: int = 0, mode: ForwardMode = ForwardMode.PREFILL
) -> ForwardBatch:
    """Build a batch whose every number encodes its row and token."""
    rows = [first_id + row for row in range(len(lens))]
    return ForwardBatch(
        mode=mode,
        request_keys=tuple(100 + row for row in rows),
        query_lens=tuple(lens),
        context_lens=tuple(10 * row for row in rows),
        token_ids=torch.tensor(
            [1000 * row + i for row, n in zip(rows, lens, strict=True) for i in range(n)]
        ),
        positions=torch.tensor(
            [10 * row + i for row, n in zip(rows, lens, strict=True) for i in range(n)]
        ),
        page_tables=torch.tensor(
            [[row * 2 + 1, row * 2 + 2] for row in rows], dtype=torch.int32
        ).reshape(-1, 2),
        slot_ids=torch.tensor([row + 1 for row in rows], dtype=torch.int32),
        sampling=tuple(SamplingRow(SamplingParams(seed=row), position=row) for row in rows),
        scoring=tuple(ScoringRow((row,), num_top=row) for row in rows),
        states=tuple(StateRow(row + 1, (StateSnapshot(10 * row + 1, row + 2),)) for row in rows),
        adapters=tuple(f"adapter {row}" for row in rows),
        spec_info=CarriedKeys(),
        graph_bucket=GraphBucket(mode, len(lens)),
    )


def marked(batch: ForwardBatch) -> ForwardBatch:
    batch.mark_forward_metadata_ready(PLANNER, plan=PLAN, replan_equivalent=True)
    return batch


def decode(num_rows: int) -> ForwardBatch:
    return build([1] * num_rows, mode=ForwardMode.DECODE)


def reshape(batch: ForwardBatch, *, num_rows: int, num_tokens: int) -> None:
    """Change the shapes of the same object, as padding does."""
    batch.request_keys = tuple(range(num_rows))
    batch.token_ids = torch.zeros(num_tokens, dtype=torch.long)


def test_s1_1_fresh_batch_plans() -> None:
    assert decode(2).needs_forward_metadata_init() is True


def test_s1_1_marked_batch_does_not_plan() -> None:
    batch = decode(2)
    batch.mark_forward_metadata_ready(PLANNER)
    assert batch.needs_forward_metadata_init() is False


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(4, 2), (2, 6), (4, 6)])
def test_s1_1_marked_then_reshaped_does_not_plan(num_rows: int, num_tokens: int) -> None:
    batch = decode(2)
    batch.mark_forward_metadata_ready(PLANNER, plan=PLAN)
    reshape(batch, num_rows=num_rows, num_tokens=num_tokens)
    assert batch.needs_forward_metadata_init() is False
    assert (batch.forward_metadata_planned_bs, batch.forward_metadata_planned_num_tokens) == (2, 2)
    assert batch.forward_metadata_plan is PLAN


def test_s1_1_opted_in_with_same_shapes_does_not_plan() -> None:
    batch = decode(2)
    batch.mark_forward_metadata_ready(PLANNER, replan_equivalent=True)
    assert batch.needs_forward_metadata_init() is False


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(4, 2), (2, 6), (1, 2), (2, 1)])
def test_s1_1_opted_in_with_another_shape_plans_again(num_rows: int, num_tokens: int) -> None:
    batch = decode(2)
    batch.mark_forward_metadata_ready(PLANNER, replan_equivalent=True)
    reshape(batch, num_rows=num_rows, num_tokens=num_tokens)
    assert batch.needs_forward_metadata_init() is True


def test_s1_1_marked_again_after_padding_records_the_new_shapes() -> None:
    batch = decode(2)
    batch.mark_forward_metadata_ready(PLANNER, plan=PLAN, replan_equivalent=True)
    reshape(batch, num_rows=4, num_tokens=6)
    batch.mark_forward_metadata_ready(PLANNER, replan_equivalent=True)
    assert batch.needs_forward_metadata_init() is False
    assert (batch.forward_metadata_planned_bs, batch.forward_metadata_planned_num_tokens) == (4, 6)
    assert batch.forward_metadata_plan is PLAN


def test_s1_1_mark_records_rows_tokens_and_planner() -> None:
    batch = build([3, 1, 3])
    batch.mark_forward_metadata_ready(PLANNER)
    assert (batch.forward_metadata_planned_bs, batch.forward_metadata_planned_num_tokens) == (3, 7)
    assert batch.forward_metadata_planner is PLANNER


def test_s1_1_without_input_ids_zero_tokens_are_recorded() -> None:
    batch = build([3, 1])
    batch.token_ids = None
    batch.mark_forward_metadata_ready(PLANNER, replan_equivalent=True)
    assert batch.forward_metadata_planned_num_tokens == 0
    assert batch.needs_forward_metadata_init() is False
    batch.token_ids = torch.zeros(4, dtype=torch.long)
    assert batch.needs_forward_metadata_init() is True


def test_s1_1_a_later_mark_can_withdraw_the_opt_in() -> None:
    batch = marked(decode(2))
    batch.mark_forward_metadata_ready(PLANNER)
    reshape(batch, num_rows=4, num_tokens=4)
    assert batch.needs_forward_metadata_init() is False


OPERATIONS: dict[str, Callable[[ForwardBatch], list[ForwardBatch]]] = {
    "filter": lambda batch: [batch.filter([0, 1, 2])],
    "split": lambda batch: list(batch.split(1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_s1_6_membership_operations_drop_the_marker(name: str) -> None:
    batch = marked(build([2, 1, 3]))
    for child in OPERATIONS[name](batch):
        assert child.needs_forward_metadata_init() is True
        assert {field: getattr(child, field) for field in NO_MARK} == NO_MARK
    assert batch.needs_forward_metadata_init() is False
    assert batch.forward_metadata_planner is PLANNER


def test_s1_6_every_field_is_classified() -> None:
    unclassified = [
        f.name for f in fields(ForwardBatch) if not isinstance(f.metadata.get("rule"), FieldRule)
    ]
    assert unclassified == []


def test_s1_6_the_mark_is_one_value_that_never_changes_and_is_dropped() -> None:
    dropped = {f.name for f in fields(ForwardBatch) if f.metadata["rule"] is FieldRule.DROPPED}
    assert dropped == {"plan_mark", "spec_info", "graph_bucket", "shares"}
    assert {name for name in vars(ForwardBatch) if name.startswith("forward_metadata")} == set(
        NO_MARK
    )
    mark = marked(decode(2)).plan_mark
    assert mark == PlanMark(PLANNER, PLAN, num_rows=2, num_tokens=2, replan_equivalent=True)
    with pytest.raises(FrozenInstanceError):
        mark.num_rows = 3  # type: ignore[misc]


class CountingPlanner:
    def __init__(self) -> None:
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        self.num_plans += 1
        batch.mark_forward_metadata_ready(self)


def test_s1_2_a_batch_is_planned_once() -> None:
    planner, batch = CountingPlanner(), decode(2)
    assert [plan_where_needed(batch, planner) for _ in range(3)] == [True, False, False]
    assert (planner.num_plans, batch.forward_metadata_planner) == (1, planner)


@pytest.mark.parametrize("name", OPERATIONS)
def test_s1_6_fields_follow_their_rule(name: str) -> None:
    """Every field of the parent differs from its default, so a rule that is not followed shows."""
    batch = marked(build([2, 1, 3]))
    for f in fields(ForwardBatch):
        assert f.metadata["rule"] is not FieldRule.DROPPED or getattr(batch, f.name) not in (
            None,
            False,
        ), f.name
    for child in OPERATIONS[name](batch):
        for f in fields(ForwardBatch):
            value = getattr(child, f.name)
            match f.metadata["rule"]:
                case FieldRule.CARRIED:
                    assert value == getattr(batch, f.name), f.name
                case FieldRule.DROPPED:
                    assert value == f.default, f.name
                case FieldRule.RECOMPUTED:
                    per = (
                        child.num_tokens if f.name in ("token_ids", "positions") else child.num_rows
                    )
                    assert len(value) == per, f.name


def rows_of(batch: ForwardBatch) -> list[tuple[object, ...]]:
    """Return all values of each row, row by row."""
    rows: list[tuple[object, ...]] = []
    start = 0
    for row in range(batch.num_rows):
        end = start + batch.query_lens[row]
        ids = None if batch.token_ids is None else batch.token_ids[start:end].tolist()
        rows.append(
            (
                batch.request_keys[row],
                batch.context_lens[row],
                ids,
                batch.positions[start:end].tolist(),
                batch.page_tables[row].tolist(),
                int(batch.slot_ids[row]),
                batch.sampling[row],
            )
        )
        start = end
    assert start == batch.num_tokens
    return rows


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2, 0], [3], [1, 1], []])
def test_filter_selects_rows_in_order(rows: list[int]) -> None:
    batch = build([2, 1, 3, 0])
    child = batch.filter(rows)
    assert rows_of(child) == [rows_of(batch)[row] for row in rows]
    assert (child.positions.dtype, child.page_tables.dtype, child.slot_ids.dtype) == (
        torch.int64,
        torch.int32,
        torch.int32,
    )


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_parts_of_a_split_are_the_whole(at: int) -> None:
    batch = build([2, 1, 3])
    first, second = batch.split(at)
    assert rows_of(first) + rows_of(second) == rows_of(batch)


def test_batches_of_hidden_states_stay_without_ids() -> None:
    batch = build([2, 1])
    batch.token_ids = None
    for child in [batch.filter([1]), *batch.split(1)]:
        assert child.token_ids is None


def test_counts_come_from_rows_and_positions() -> None:
    batch = build([2, 1, 3])
    assert (batch.num_rows, batch.num_tokens) == (3, 6)
    batch.token_ids = None
    assert batch.num_tokens == 6
    assert isinstance(batch.positions, Tensor)

"""The plan marker on every path of speculation: one plan per step and path, made before the
forward, never twice."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionBackend, AttentionGeometry
from engine.contracts.model import ForwardContext, StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import SpecRow, TokenTree
from engine.core.request import SampledToken, SamplingParams
from engine.core.rows import Row, build_batch
from engine.memory.layout import CacheSpec
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.contracts.drafter import Drafter
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from engine.speculative.drafters.frozen import FrozenDrafter
from runtime.errors import StalePlanError
from testing.batches import unmarked

PAGE_SIZE, HIDDEN, VOCAB = 16, 8, 32
GEOMETRY = AttentionGeometry(
    num_heads=2, num_kv_heads=1, head_dim=HIDDEN, page_size=PAGE_SIZE, scale=0.3
)


class ToyDraft:
    """One attention layer over random tables; notes the batches of its forwards as they were."""

    capture_layers = frozenset({0})
    vocab_size = VOCAB

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        tables = torch.randn(2, VOCAB, HIDDEN, generator=generator)
        self._table: Tensor = tables[0]
        self._head: Tensor = tables[1]
        self.forwards: list[tuple[AttentionBackend, bool, int]] = []

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        return GEOMETRY

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        return ()

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        return aux_hidden[0][tokens]

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        attention = context.attention
        assert attention is not None
        self.forwards.append((attention, batch.needs_forward_metadata_init(), batch.num_tokens))
        assert batch.token_ids is not None
        x = (hidden + self._table[batch.token_ids])[:, None]
        mixed = attention.run(0, x.expand(-1, 2, -1).contiguous(), x, x, batch).mean(1)
        return hidden + mixed

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._head.t()

    def target_ids(self, token_ids: Tensor) -> Tensor:
        return token_ids


class Bench:
    """A drafter with its plans and runs exposed."""

    def __init__(self, *, topk: int, steps: int) -> None:
        pools = {0: torch.zeros(20, 2, 1, PAGE_SIZE, HIDDEN)}
        self.model = ToyDraft()
        self.paged = CpuAttention(kv_pools=pools, geometry=GEOMETRY)
        self.steps = MultiStepAttention(kv_pools=pools, geometry=GEOMETRY)
        attention = DraftAttention.over_kv(self.paged, self.steps, PAGE_SIZE)
        self.drafter: Drafter = EagleDrafter(
            model=self.model, attention=attention, topk=topk, steps=steps
        )

    def propose(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        num_draft_tokens: int | None = 9,
        drawing: bool = True,
    ) -> list[TokenTree]:
        """Call once after a prefill of rows (context, tokens)."""
        sampling = SamplingRow(SamplingParams(), 0) if drawing else None
        batch = build_batch(
            ForwardMode.PREFILL,
            [
                Row(
                    key,
                    [3] * length,
                    context,
                    list(range(1 + 4 * key, 5 + 4 * key)),
                    0,
                    sampling,
                    SpecRow(
                        next_token_id=None if drawing else 5, num_draft_tokens=num_draft_tokens
                    ),
                )
                for key, (context, length) in enumerate(rows)
            ],
        )
        runs = [
            AcceptedRun(row, [0], [SampledToken(7 + row)])
            for row in range(len(rows) if drawing else 0)
        ]
        return self.drafter.propose(
            batch, StageOutput(aux_hidden={0: torch.randn(batch.num_tokens, HIDDEN)}), runs
        )


class FrozenToyDraft(ToyDraft):
    """Reads keys that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.needed_plans: list[bool] = []

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        assert context.cached_attention is not None
        assert batch.token_ids is not None
        self.needed_plans.append(batch.needs_forward_metadata_init())
        x = (hidden + self._table[batch.token_ids])[:, None]
        return hidden + context.cached_attention.read(
            0, x.expand(-1, 2, -1).contiguous(), batch
        ).mean(1)

    def onward(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("steps", [2, 5])
def test_s1_2_one_plan_per_step_and_path_none_inside_the_loop(topk: int, steps: int) -> None:
    bench = Bench(topk=topk, steps=steps)
    bench.propose([(0, 5), (0, 20)])
    assert (bench.paged.num_plans, bench.steps.num_plans) == (1, 1)
    assert [needs_plan for _, needs_plan, _ in bench.model.forwards] == [False] * steps
    assert [attention for attention, _, _ in bench.model.forwards] == [bench.paged] + [
        bench.steps
    ] * (steps - 1)
    assert [count for _, _, count in bench.model.forwards] == [25] + [2 * topk] * (steps - 1)


def test_s1_2_a_chain_over_frozen_keys_is_planned_once() -> None:
    bench, model = Bench(topk=1, steps=1), FrozenToyDraft()
    bench.drafter = drafter = FrozenDrafter(model=model, attention=bench.paged, steps=3)
    trees = bench.propose([(0, 5), (0, 20)])
    assert [len(tree) for tree in trees] == [3, 3]
    assert (bench.paged.num_plans, drafter.num_plans["draft_round"], model.needed_plans) == (
        1,
        1,
        [False] * 3,
    )


def test_s1_4_one_step_is_neither_planned_nor_run_as_multi_step() -> None:
    bench = Bench(topk=3, steps=1)
    bench.propose([(0, 5)])
    assert (bench.paged.num_plans, bench.steps.num_plans, len(bench.model.forwards)) == (1, 0, 1)


def test_s1_4_an_idle_batch_is_not_planned() -> None:
    bench = Bench(topk=3, steps=3)
    assert bench.propose([]) == []
    assert bench.propose([(0, 5)], num_draft_tokens=None) == [TokenTree()]
    assert (bench.paged.num_plans, bench.steps.num_plans, bench.model.forwards) == (0, 0, [])


def test_rows_that_do_not_draw_are_followed_and_grow_nothing() -> None:
    bench = Bench(topk=3, steps=3)
    assert bench.propose([(0, 5)], drawing=False) == []
    assert (bench.paged.num_plans, bench.steps.num_plans, len(bench.model.forwards)) == (1, 0, 1)


def round_batch(rows: int = 2, branches: int = 3) -> ForwardBatch:
    batch = build_batch(
        ForwardMode.DRAFT,
        [Row(key, [3] * branches, 5 + key, [1 + key], 0, None) for key in range(rows)],
    )
    assert not batch.forward_metadata_ready
    return batch


def run_step(attention: MultiStepAttention, batch: ForwardBatch) -> Tensor:
    x = torch.ones(batch.num_tokens, 1, HIDDEN)
    return attention.run(0, x.expand(-1, 2, -1).contiguous(), x, x, batch)


def test_s1_8_a_round_is_never_planned_again() -> None:
    attention, batch = Bench(topk=3, steps=3).steps, round_batch()
    attention.plan(batch)
    run_step(attention, batch)
    plan = batch.forward_metadata_plan
    with pytest.raises(StalePlanError, match="once"):
        attention.plan(batch)
    with pytest.raises(StalePlanError, match="once"):
        attention.plan(round_batch(), replan_equivalent=True)
    assert batch.forward_metadata_plan is plan
    run_step(attention, batch)


def test_s1_6_a_batch_that_changes_membership_loses_its_round() -> None:
    attention, batch = Bench(topk=3, steps=3).steps, round_batch()
    attention.plan(batch)
    for derived in (batch.filter([0]), unmarked(batch), *batch.split(1)):
        assert derived.needs_forward_metadata_init()
        with pytest.raises(StalePlanError):
            run_step(attention, derived)


def test_s1_7_a_plan_of_another_backend_is_refused() -> None:
    bench, other = Bench(topk=3, steps=3), Bench(topk=3, steps=3)
    batch = round_batch()
    bench.steps.plan(batch)
    for attention in (other.steps, other.paged, bench.paged):
        x = torch.ones(batch.num_tokens, 1, HIDDEN)
        with pytest.raises(StalePlanError):
            attention.run(0, x.expand(-1, 2, -1).contiguous(), x, x, batch)


def test_s1_5_a_padded_round_is_refused() -> None:
    attention, batch = Bench(topk=3, steps=3).steps, round_batch()
    attention.plan(batch)
    batch.request_keys += (9,)
    assert not batch.needs_forward_metadata_init(), (
        "not declared equivalent, so never planned again"
    )
    with pytest.raises(StalePlanError):
        run_step(attention, batch)


def test_drafted_tokens_leave_no_trace_in_the_pool() -> None:
    """A second proposal after the same tokens is the same, and reads nothing the first one
    drafted."""
    bench = Bench(topk=3, steps=4)
    torch.manual_seed(1)
    first = bench.propose([(0, 20)])
    torch.manual_seed(1)
    assert bench.propose([(0, 20)]) == first

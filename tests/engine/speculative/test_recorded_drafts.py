"""A draft whose steps are recorded and one that runs eagerly propose the same trees."""

import random
from collections.abc import Sequence

import pytest
import torch

from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionGeometry
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardMode, SamplingRow
from engine.core.draft_trees import SpecRow, TokenTree
from engine.core.request import SampledToken, SamplingParams
from engine.core.rows import Row, build_batch
from engine.speculative.attention.draft_attention import DraftAttention, RoundAttention
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.attention.multistep_paged import PagedRounds
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from engine.speculative.replay.recorded_drafts import RecordedDrafts
from engine.speculative.trees.draft_handoff import DraftEnd, HandedEnds
from runtime.errors import InternalError
from tests.engine.speculative.test_multistep_device import HEADS, KV_HEADS, round_of
from tests.engine.speculative.test_plan_marker import (
    GEOMETRY,
    HIDDEN,
    PAGE_SIZE,
    VOCAB,
    ToyDraft,
    round_batch,
)

MAX_NODES, PAGES_EACH = 4, 8
WIDE = AttentionGeometry(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=16, page_size=32, scale=0.4
)


class Draft:
    """A draft over pages of NaN, the null page included; each request has its own eight."""

    def __init__(self, topk: int, *, is_recorded: bool, steps: int = 3) -> None:
        self.pools = {0: torch.full((1 + 4 * PAGES_EACH, 2, 1, PAGE_SIZE, HIDDEN), float("nan"))}
        attention = DraftAttention.over_kv(
            CpuAttention(kv_pools=self.pools, geometry=GEOMETRY),
            MultiStepAttention(kv_pools=self.pools, geometry=GEOMETRY),
            PAGE_SIZE,
        )
        model, shape = ToyDraft(), (5, topk)
        self.ends = HandedEnds(
            torch.zeros(shape), torch.zeros(shape, dtype=torch.int64), torch.zeros(5, HIDDEN)
        )
        self.recorded = RecordedDrafts(
            model=model,
            attention=attention,
            topk=topk,
            steps=steps,
            max_nodes=MAX_NODES,
            rounds=PagedRounds(kv_pools=self.pools, geometry=GEOMETRY),
            num_eager=1,
        )
        self.drafter = EagleDrafter(
            model=model,
            attention=attention,
            topk=topk,
            steps=steps,
            handed=self.ends,
            recorded=self.recorded if is_recorded else None,
        )

    def propose(
        self,
        mode: ForwardMode,
        counts: dict[int, int],
        contexts: Sequence[int],
        accepted: dict[int, int],
        seed: int,
        *,
        num_nodes: int = 3,
        starts: Sequence[int] = (0,) * 4,
    ) -> list[TokenTree]:
        """Propose trees. counts: tokens that each request brings; accepted: accepted nodes of a
        chain; starts: of drafts."""
        batch = build_batch(
            mode,
            [
                Row(
                    key,
                    [3 + key] * count,
                    contexts[key],
                    list(range(1 + PAGES_EACH * key, 1 + PAGES_EACH * (key + 1))),
                    0,
                    SamplingRow(SamplingParams(), 0),
                    SpecRow(
                        tuple(range(-1, count - 1)),
                        num_draft_tokens=num_nodes,
                        draft_start=starts[key],
                    ),
                )
                for key, count in counts.items()
            ],
        )
        runs = [
            AcceptedRun(
                row,
                list(range(accepted[key])),
                [SampledToken((7 + key + place) % VOCAB) for place in range(accepted[key])],
            )
            for row, key in enumerate(counts)
        ]
        hidden = torch.randn(
            batch.num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)
        )
        return self.drafter.propose(batch, StageOutput(aux_hidden={0: hidden}), runs)

    def begin(self, contexts: dict[int, int], seed: int) -> list[TokenTree]:
        """Propose first trees of requests whose prompts and ends were handed over."""
        batch = build_batch(
            ForwardMode.PREBUILT,
            [
                Row(
                    key,
                    [],
                    context,
                    list(range(1 + PAGES_EACH * key, 1 + PAGES_EACH * (key + 1))),
                    1 + key,
                    None,
                    SpecRow(num_draft_tokens=3),
                )
                for key, context in contexts.items()
            ],
        )
        generator = torch.Generator().manual_seed(seed)
        for key, context in contexts.items():
            self.pools[0][1 + PAGES_EACH * key :][: -(-context // PAGE_SIZE)] = torch.randn(
                -(-context // PAGE_SIZE), 2, 1, PAGE_SIZE, HIDDEN, generator=generator
            )
        log_p = (
            torch.rand(len(contexts), self.ends.topk_p.shape[1], generator=generator)
            .sort(descending=True)[0]
            .log()
        )
        tokens = torch.randint(VOCAB, log_p.shape, generator=generator)
        hidden = torch.randn(len(contexts), HIDDEN, generator=generator)
        self.ends.put(batch.slot_ids.long(), DraftEnd(log_p, tokens, hidden))
        return self.drafter.begin(batch)


@pytest.mark.parametrize("topk", [1, 2])
def test_first_trees_are_those_of_eager_steps(topk: int) -> None:
    drafts = [Draft(topk, is_recorded=is_recorded) for is_recorded in (True, False)]
    for seed, contexts in enumerate(
        [{0: 5}, {2: 16}, {1: 40, 3: 1}, {0: 90}, {3: 17}, {2: 30, 0: 2}, {1: 3, 2: 64}]
    ):
        recorded, eager = (draft.begin(contexts, seed) for draft in drafts)
        assert recorded == eager
        assert [len(tree) for tree in recorded] == [3] * len(contexts)
    assert (drafts[0].recorded.num_recorded, drafts[0].recorded.num_replays) == (2, 3)
    assert (
        drafts[0].drafter.num_plans
        == drafts[1].drafter.num_plans
        == {"draft_extend": 0, "draft_round": 7}
    )


@pytest.mark.parametrize("topk", [1, 2])
def test_trees_are_those_of_eager_steps(topk: int) -> None:
    """Rows that come and go, across pages, with all or some of their nodes accepted."""
    drafts = [Draft(topk, is_recorded=is_recorded) for is_recorded in (True, False)]
    rng, contexts = random.Random(topk), [0] * 4
    prompts = [5, 30, 1, 17]
    for turn in range(60):
        mode = (
            ForwardMode.PREFILL
            if turn < len(prompts)
            else rng.choice([ForwardMode.VERIFY, ForwardMode.DECODE])
        )
        length = {ForwardMode.PREFILL: 0, ForwardMode.VERIFY: MAX_NODES, ForwardMode.DECODE: 1}[
            mode
        ]
        chosen = [turn] if turn < len(prompts) else rng.sample(range(4), rng.randint(1, 3))
        counts = {key: length or prompts[key] for key in chosen}
        accepted = {
            key: rng.randint(1, count) if mode is ForwardMode.VERIFY else count
            for key, count in counts.items()
        }
        recorded, eager = (
            draft.propose(mode, counts, contexts, accepted, turn) for draft in drafts
        )
        assert recorded == eager
        assert all(len(tree) == 3 for tree in recorded)
        for key in chosen:
            contexts[key] += accepted[key]
    assert max(contexts) > 3 * PAGE_SIZE
    assert drafts[0].recorded.num_replays > 30
    assert drafts[0].drafter.num_plans == drafts[1].drafter.num_plans


@pytest.mark.parametrize("topk", [1, 2])
def test_steps_that_only_follow_are_those_of_eager_steps(topk: int) -> None:
    """Trees are requested at times, of drafts that have followed all along; one began in
    mid-output."""
    drafts = [Draft(topk, is_recorded=is_recorded) for is_recorded in (True, False)]
    rng, contexts, starts = random.Random(topk), [0] * 4, (0, 0, 20, 0)
    contexts[2] = 20
    for turn in range(60):
        chosen, grows = rng.sample(range(4), rng.randint(1, 3)), turn % 5 == 4
        recorded, eager = (
            draft.propose(
                ForwardMode.DECODE,
                dict.fromkeys(chosen, 1),
                contexts,
                dict.fromkeys(chosen, 1),
                turn,
                num_nodes=3 * grows,
                starts=starts,
            )
            for draft in drafts
        )
        assert recorded == eager
        assert all(len(tree) == 3 * grows for tree in recorded)
        for key in chosen:
            contexts[key] += 1
    assert drafts[0].recorded.num_replays > 30
    assert (
        drafts[0].drafter.num_plans
        == drafts[1].drafter.num_plans
        == {"draft_extend": 60, "draft_round": 12}
    )


def test_a_restarted_draft_leaves_earlier_pages_unchanged() -> None:
    draft, accepted = Draft(1, is_recorded=True), {0: 1}
    draft.propose(ForwardMode.PREFILL, {0: 40}, [0] * 4, {0: 1}, 0)
    before = draft.pools[0][1:3].clone()
    for turn in range(4):
        trees = draft.propose(
            ForwardMode.DECODE, {0: 1}, [41 + turn] * 4, accepted, turn, starts=(41,) * 4
        )
        assert [len(tree) for tree in trees] == [3]
    assert torch.equal(draft.pools[0][1:3], before)
    assert draft.pools[0][3, :, :, :4].isfinite().all(), (
        "its own begin in the page of their position"
    )


def test_a_round_that_does_not_fit_runs_eagerly() -> None:
    """Nine steps after the first of three rows are 27 tokens, of a null page of 16."""
    draft = Draft(1, is_recorded=True, steps=10)
    trees = draft.propose(
        ForwardMode.DECODE, dict.fromkeys(range(3), 1), [0, 0, 0], dict.fromkeys(range(3), 1), 0
    )
    assert (draft.recorded.num_recorded, len(trees)) == (0, 3)


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("lengths", [(1,), (40, 64, 33)])
def test_a_round_equals_attention_to_gathered_keys(lengths: tuple[int, ...], branches: int) -> None:
    """Three steps of two layers, with new branches chosen in between."""
    generator = torch.Generator().manual_seed(1)
    pools = {layer: torch.randn(10, 2, KV_HEADS, 32, 16, generator=generator) for layer in range(2)}
    backends: tuple[RoundAttention, ...] = (
        PagedRounds(kv_pools=pools, geometry=WIDE),
        MultiStepAttention(kv_pools=pools, geometry=WIDE),
    )
    batches = [round_of(lengths, branches) for _ in backends]
    for backend, batch in zip(backends, batches, strict=True):
        backend.plan(batch)
    for _ in range(3):
        for layer in range(2):
            q = torch.randn(len(lengths) * branches, HEADS, 16, generator=generator)
            k, v = torch.randn(2, len(lengths) * branches, KV_HEADS, 16, generator=generator)
            found, expected = (
                backend.run(layer, q, k, v, batch)
                for backend, batch in zip(backends, batches, strict=True)
            )
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        parents = torch.randint(branches, (len(lengths), branches), generator=generator)
        for backend, batch in zip(backends, batches, strict=True):
            backend.reorder(batch, parents)


def test_a_round_ends_with_the_null_page() -> None:
    rounds = PagedRounds(kv_pools={0: torch.zeros(20, 2, 1, PAGE_SIZE, HIDDEN)}, geometry=GEOMETRY)
    batch = round_batch()
    assert rounds.has_room(batch.num_tokens, PAGE_SIZE // batch.num_tokens)
    assert not rounds.has_room(batch.num_tokens, PAGE_SIZE // batch.num_tokens + 1)
    rounds.plan(batch)
    x = torch.ones(batch.num_tokens, 1, HIDDEN)
    for _ in range(PAGE_SIZE // batch.num_tokens):
        rounds.run(0, x.expand(-1, 2, -1).contiguous(), x, x, batch)
    with pytest.raises(InternalError, match="fill the null page"):
        rounds.run(0, x.expand(-1, 2, -1).contiguous(), x, x, batch)
    with pytest.raises(InternalError, match="has no room for a round of 40"):
        rounds.plan(round_batch(branches=20))

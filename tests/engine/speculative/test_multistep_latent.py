"""Rounds of drafts with latent attention: planned once, refused when stale, and what a branch sees
by hand."""

import pytest
import torch
from torch import Tensor

from engine.contracts.latent import LatentGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.rows import Row, build_batch
from engine.speculative.attention.multistep_latent import MultiStepLatentAttention
from runtime.errors import InternalError, StalePlanError
from testing.batches import unmarked

PAGE_SIZE, HEADS, LATENT, ROPE, INDEX_HEADS, INDEX_DIM = 4, 3, 8, 4, 2, 5
CONTEXTS, BRANCHES = (6, 3), 2
PAGES = ([5, 2], [4])


def pools() -> tuple[Tensor, Tensor]:
    """Return latents and index keys, always the same; NaN for uncommitted entries."""
    generator = torch.Generator().manual_seed(0)
    latent, index = (
        torch.full((7, PAGE_SIZE, dim), float("nan")) for dim in (LATENT + ROPE, INDEX_DIM)
    )
    for context, pages in zip(CONTEXTS, PAGES, strict=True):
        for position in range(context):
            for pool in (latent, index):
                pool[pages[position // PAGE_SIZE], position % PAGE_SIZE] = torch.randn(
                    pool.shape[-1], generator=generator
                )
    return latent, index


def attention(max_selected: int = 0) -> MultiStepLatentAttention:
    latent, index = pools()
    return MultiStepLatentAttention(
        latent_pools={0: latent},
        index_pools={0: index},
        geometry=LatentGeometry(HEADS, LATENT, ROPE, PAGE_SIZE, 0.3, max_selected),
    )


def committed(pool: Tensor, row: int) -> list[Tensor]:
    return [
        pool[PAGES[row][position // PAGE_SIZE], position % PAGE_SIZE]
        for position in range(CONTEXTS[row])
    ]


def round_batch() -> ForwardBatch:
    return build_batch(
        ForwardMode.DRAFT,
        [
            Row(key, [3] * BRANCHES, context, pages, 0, None)
            for key, (context, pages) in enumerate(zip(CONTEXTS, PAGES, strict=True))
        ],
    )


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(
    rounds: MultiStepLatentAttention, batch: ForwardBatch, number: int, *, selects: bool
) -> Tensor:
    tokens = batch.num_tokens
    selected = (
        rounds.select(
            0,
            drawn(tokens, INDEX_HEADS, INDEX_DIM, seed=10 + number),
            drawn(tokens, INDEX_DIM, seed=20 + number),
            drawn(tokens, INDEX_HEADS, seed=30 + number),
            batch,
        )
        if selects
        else None
    )
    return rounds.run(
        0,
        drawn(tokens, HEADS, LATENT + ROPE, seed=40 + number),
        drawn(tokens, LATENT + ROPE, seed=50 + number),
        selected,
        batch,
    )


def chosen_by_hand(token: int, path: list[int], number: int, max_selected: int) -> list[int]:
    keys = committed(pools()[1], token // BRANCHES)
    keys += [drawn(4, INDEX_DIM, seed=20 + at)[before] for at, before in enumerate(path)]
    q, weights = (
        drawn(*shape, seed=seed + number)[token]
        for shape, seed in (((4, INDEX_HEADS, INDEX_DIM), 10), ((4, INDEX_HEADS), 30))
    )
    scores = [float((weights * torch.relu(q @ key * INDEX_DIM**-0.5)).sum()) for key in keys]
    return sorted(range(len(keys)), key=lambda key: (-scores[key], key))[:max_selected]


def seen_by_hand(paths: list[list[int]], number: int, *, max_selected: int) -> Tensor:
    """Compute attention; `paths`: per token the tokens of earlier steps that it continues, and
    itself."""
    outs = []
    for token, path in enumerate(paths):
        steps = [drawn(4, LATENT + ROPE, seed=50 + at)[before] for at, before in enumerate(path)]
        keys = torch.stack(committed(pools()[0], token // BRANCHES) + steps)
        chosen = (
            chosen_by_hand(token, path, number, max_selected)
            if max_selected
            else list(range(len(keys)))
        )
        q = drawn(4, HEADS, LATENT + ROPE, seed=40 + number)[token]
        outs.append((q @ keys[chosen].t() * 0.3).softmax(-1) @ keys[chosen][:, :LATENT])
    return torch.stack(outs)


@pytest.mark.parametrize("max_selected", [0, 4])
def test_a_branch_sees_the_committed_keys_and_its_own_path(max_selected: int) -> None:
    rounds, batch, selects = attention(max_selected), round_batch(), max_selected > 0
    rounds.plan(batch)
    paths = [[token] for token in range(4)]
    for number, parents in enumerate(
        (torch.tensor([[1, 1], [0, 1]]), torch.tensor([[0, 1], [1, 0]]), None)
    ):
        out = step(rounds, batch, number, selects=selects)
        torch.testing.assert_close(out, seen_by_hand(paths, number, max_selected=max_selected))
        if parents is not None:
            rounds.reorder(batch, parents)
            flat = [
                row * BRANCHES + int(parent)
                for row, of_row in enumerate(parents)
                for parent in of_row
            ]
            paths = [[*paths[parent], token] for token, parent in enumerate(flat)]


def test_s1_8_a_round_is_never_planned_again() -> None:
    rounds, batch = attention(), round_batch()
    rounds.plan(batch)
    step(rounds, batch, 0, selects=False)
    plan = batch.forward_metadata_plan
    with pytest.raises(StalePlanError, match="once"):
        rounds.plan(batch)
    with pytest.raises(StalePlanError, match="once"):
        rounds.plan(round_batch(), replan_equivalent=True)
    assert (batch.forward_metadata_plan, rounds.num_plans) == (plan, 1)


def test_s1_5_s1_6_s1_7_a_plan_that_is_not_this_round_s_is_refused() -> None:
    rounds, batch = attention(), round_batch()
    for stale in (unmarked(batch), batch.filter([0])):
        with pytest.raises(StalePlanError, match="not planned by this"):
            step(rounds, stale, 0, selects=False)
    attention().plan(batch)
    with pytest.raises(StalePlanError, match="not planned by this"):
        step(rounds, batch, 0, selects=False)
    padded = round_batch()
    rounds.plan(padded)
    padded.request_keys += (9,)
    with pytest.raises(
        StalePlanError, match="planned for 2 rows of 2 branches, the batch has 3 rows"
    ):
        step(rounds, padded, 0, selects=False)


def test_a_round_that_cannot_be_is_refused() -> None:
    uneven = build_batch(
        ForwardMode.DRAFT, [Row(0, [3], 6, [5, 2], 0, None), Row(1, [3, 3], 3, [4], 0, None)]
    )
    with pytest.raises(InternalError, match="one number of branches"):
        attention().plan(uneven)
    rounds, batch = attention(max_selected=4), round_batch()
    rounds.plan(batch)
    with pytest.raises(InternalError, match="layer 0 needs the keys selected for 4 tokens"):
        step(rounds, batch, 0, selects=False)

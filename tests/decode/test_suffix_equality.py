"""Drafts from requests' own text change no token and no bit, on every kind of pool."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from decode.speculation import VerifiedRow, VerifiedStep
from engine.core.request import Request, SamplingParams
from models.loader import ModelDescription
from tests.decode.test_speculation import SHAPES, assert_nothing_leaked, requests, shown
from tests.support.drafts.drafters import OracleDrafter, always
from tests.support.grids import mostly_long
from tests.support.models.tiny_models import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA3,
    GEMMA4,
    HYBRID,
    HYBRID_MOE,
    LLAMA,
    QWEN3_MOE,
    tiny,
)
from tests.support.pool.local_pool import SUFFIXES, Answer, Speculation, local_pool

TARGETS = {
    "llama": LLAMA,
    "hybrid": HYBRID,
    "hybrid-moe": HYBRID_MOE,
    "qwen3-moe": QWEN3_MOE,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": DEEPSEEK_V32,
    "gemma-3": {**GEMMA3, "sliding_window": 33},
    "gemma-4": {**GEMMA4, "sliding_window": 33},
}
# Outputs of these tokens only: matches are frequent, and continuations often wrong.
FEW = tuple((token, 100.0) for token in (5, 6, 7))


def wanted(max_tokens: int = 24) -> list[Request]:
    """Return requests with and without text that repeats, greedy and sampled."""
    rng = random.Random(1)
    few = tuple(rng.choice((5, 6, 7)) for _ in range(70))
    loop = (9, 8, 7, 6, 5) * 9
    more = [
        Request("few", few, max_tokens, SamplingParams(seed=3, logit_bias=FEW), num_top_logprobs=2),
        Request("few greedy", few[:33], max_tokens, SamplingParams(temperature=0, logit_bias=FEW)),
        Request("loop", loop, max_tokens, SamplingParams(temperature=0)),
    ]
    return [*more, *requests(max_tokens)]


def described(target: str) -> ModelDescription:
    return tiny(TARGETS[target], "float32")


def alone(description: ModelDescription, max_tokens: int = 24) -> list[Answer]:
    with local_pool(description, chunk_tokens=512) as pool:
        return [pool.generate([request])[0] for request in wanted(max_tokens)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("target", mostly_long(TARGETS, kept=["llama", "gemma-3"]))
def test_every_family_gives_the_same_bits(target: str) -> None:
    description = described(target)
    steps: list[VerifiedStep] = []
    with local_pool(description, 2, speculation=SUFFIXES) as pool:
        pool.scheduler.on_verified = lambda step, num_running: steps.append(step)
        answers = pool.generate(wanted())
        assert_nothing_leaked(pool)
    assert shown(answers) == shown(alone(description))
    drafted, accepted = (
        sum(step.num_drafted for step in steps),
        sum(sum(step.accepted) for step in steps),
    )
    assert 0 < accepted < drafted


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("target", ["llama", "hybrid"])
def test_stages_and_preemption_give_the_same_bits(target: str, size: int) -> None:
    """Pages are short, so requests lose theirs and are replayed."""
    description = described(target)
    with local_pool(description, size, speculation=SUFFIXES, num_pages=39) as pool:
        answers = pool.generate(wanted(48))
        assert_nothing_leaked(pool)
    assert shown(answers) == shown(alone(description, 48))
    assert any(answer.finished and answer.finished.num_preemptions for answer in answers)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2)])
def test_ranks_give_the_same_bits(tp: int, dp: int) -> None:
    description = described("llama")
    with local_pool(description, tp=tp, dp=dp, speculation=SUFFIXES) as pool:
        answers = pool.generate(wanted())
    assert shown(answers) == shown(alone(description))


@pytest.mark.parametrize(
    ("target", "shape", "size", "ranks"),
    [
        ("llama", "tree 4x4/15", 1, (1, 1)),
        ("llama", "chain 3", 3, (2, 2)),
        pytest.param("hybrid", "chain 5", 2, (1, 1), marks=pytest.mark.long),
        pytest.param("hybrid-moe", "tree 8x5/31", 1, (1, 1), marks=pytest.mark.long),
        ("gemma-3", "chain 5", 2, (1, 1)),
        pytest.param("deepseek-v3.2", "tree 4x4/15", 2, (1, 1), marks=pytest.mark.long),
    ],
)
def test_a_draft_model_beside_them_gives_the_same_bits(
    target: str, shape: str, size: int, ranks: tuple[int, int]
) -> None:
    description = described(target)
    expected = alone(description)
    truth = {
        key: [*request.prompt_token_ids, *(token.token_id for token in answer.tokens)]
        for key, (request, answer) in enumerate(zip(wanted(), expected, strict=True), start=1)
    }
    drafter = OracleDrafter(SHAPES[shape], truth, error_rate=0.3)
    both = Speculation(always(drafter), drafter.shape.nodes, proposers=("model", "suffix"))
    rows: list[VerifiedRow] = []
    tp, dp = ranks
    with local_pool(description, size, tp=tp, dp=dp, speculation=both) as pool:
        for scheduler in pool.schedulers:
            scheduler.on_verified = lambda step, num_running: rows.extend(step.rows)
        answers = pool.generate(wanted())
        assert_nothing_leaked(pool)
    assert shown(answers) == shown(expected)
    accepted = Counter[str]()
    for row in rows:
        accepted[row.proposer] += row.num_accepted
    assert accepted["model"] > 0
    assert accepted["suffix"] > 0


def test_a_request_that_declines_drafts_has_none() -> None:
    steps: list[VerifiedStep] = []
    declined = [replace(request, speculates=False) for request in wanted()]
    with local_pool(described("llama"), speculation=SUFFIXES) as pool:
        pool.scheduler.on_verified = lambda step, num_running: steps.append(step)
        pool.generate(declined)
    assert sum(step.num_drafted for step in steps) == 0

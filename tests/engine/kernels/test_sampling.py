"""Draws by the kernel against the same by numpy, row by row."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.core.batch import SamplingRow
from engine.core.request import ProblemCause, SampledToken, SamplingParams
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.tokens.sampling import NOT_HERE, sample_tokens
from engine.sampling.sampler import sample
from engine.sampling.uniform import uniform
from tests.support.kernels import numpy_sampling

RULES = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
]


def sampled(logits: Tensor, rules: list[SamplingParams]) -> list[int]:
    """Sample by the kernel at position 7."""
    rows = [
        (
            params.temperature,
            float(params.top_k),
            params.top_p,
            params.min_p,
            uniform(params.seed, 7),
        )
        for params in rules
    ]
    return sample_tokens(logits, rows, Team())


def by_numpy(logits: Tensor, rules: list[SamplingParams]) -> list[int]:
    return [
        numpy_sampling.sample(row.double().numpy(), params, 7)
        for row, params in zip(logits, rules, strict=True)
    ]


@pytest.mark.parametrize(
    "rule", RULES, ids=lambda rule: ",".join(f"{name}={value}" for name, value in rule.items())
)
@pytest.mark.parametrize(
    ("vocab_size", "spread"), [(1, 1.0), (63, 2.0), (64, 2.0), (1000, 0.5), (5000, 4.0)]
)
def test_tokens_are_those_of_numpy(vocab_size: int, spread: float, rule: dict[str, float]) -> None:
    logits = (
        torch.randn(200, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    )
    rules = [SamplingParams(seed=seed, **rule) for seed in range(len(logits))]  # type: ignore[arg-type]
    assert sampled(logits, rules) == by_numpy(logits, rules)
    assert sampled(logits.double(), rules) == by_numpy(logits, rules)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-8, 8).map(lambda number: number / 2), min_size=1, max_size=150),
    st.integers(0, 12),
    st.sampled_from([0.05, 0.33, 0.77, 0.951, 1.0]),
    st.sampled_from([0.0, 0.013, 0.37]),
    st.sampled_from([0.3, 1.0, 1.7]),
)
def test_only_tokens_that_pass_the_filters_are_sampled_by_their_share(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """At the middle of each token's share, and at both ends of the interval."""
    ids, weights = numpy_sampling.filtered(
        np.array(logits),
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
    )
    middles = (weights.cumsum() - weights / 2) / weights.sum()
    points = [0.0, *middles.tolist(), 1 - 2**-53]
    found = sample_tokens(
        torch.tensor([logits] * len(points)),
        [(temperature, float(top_k), top_p, min_p, point) for point in points],
        Team(),
    )
    assert found == [ids[0], *ids.tolist(), ids[-1]]


@pytest.mark.parametrize("top_k", [1, 3, 64, 100, 149])
def test_of_equal_logits_the_first_pass(top_k: int) -> None:
    logits = torch.randint(0, 3, (300, 150), generator=torch.Generator().manual_seed(0)).float()
    rules = [SamplingParams(seed=seed, top_k=top_k) for seed in range(len(logits))]
    assert sampled(logits, rules) == by_numpy(logits, rules)


@pytest.mark.parametrize("top_p", [0.25, 0.5])
def test_of_equal_weights_as_many_pass_as_hold_the_share(top_p: float) -> None:
    rules = [SamplingParams(seed=seed, top_p=top_p) for seed in range(400)]
    assert set(sampled(torch.zeros(len(rules), 64), rules)) == set(range(int(64 * top_p)))


def test_minus_infinity_is_never_sampled() -> None:
    logits = torch.full((500, 300), float("-inf"))
    logits[:, [5, 77, 299]] = torch.tensor([0.0, 1.0, -700.0])
    rules = [
        SamplingParams(seed=seed, top_k=top_k)
        for seed, top_k in zip(range(500), itertools.cycle((0, 2, 200)))
    ]
    assert set(sampled(logits, rules)) == {5, 77}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 64, 129])
def test_a_row_without_a_largest_number_ends_alone(value: float, place: int) -> None:
    logits = torch.randn(3, 130)
    fine = sampled(logits, [SamplingParams(seed=seed) for seed in range(3)])
    logits[1, place] = value
    rules = [SamplingParams(seed=seed) for seed in range(3)]
    assert sampled(logits, rules) == [fine[0], NOT_HERE, fine[2]]
    tokens = sample(logits, [SamplingRow(params, position=7) for params in rules])
    assert tokens[1].cause is ProblemCause.DEFECT
    assert [tokens[0], tokens[2]] == [SampledToken(fine[0]), SampledToken(fine[2])]

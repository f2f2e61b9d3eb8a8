"""The probability from which a drafted token pays, from steps of known costs."""

import random

import pytest

from decode.draft_costs import LEAST, MIN_STEPS, MOST, UNKNOWN_PROBABILITY, DraftCosts
from decode.speculation import VerifiedRow, VerifiedStep


def observed(costs: DraftCosts, drafted: int, seconds: float, requests: int = 1) -> None:
    rows = (VerifiedRow(drafted, 0), *[VerifiedRow(0, 0)] * (requests - 1))
    costs.observe(VerifiedStep(rows, seconds), requests)


def test_before_it_is_measured_it_is_a_guess() -> None:
    costs = DraftCosts()
    assert costs.least_probability() == UNKNOWN_PROBABILITY
    for _ in range(int(MIN_STEPS) - 2):
        observed(costs, 3, 1.0)
    assert costs.least_probability() == UNKNOWN_PROBABILITY
    for _ in range(200):
        observed(costs, 3, 1.0)  # always as many: the steps do not tell what a token costs
    assert costs.least_probability() == UNKNOWN_PROBABILITY


@pytest.mark.parametrize(
    ("start_s", "token_s", "requests", "expected"),
    [
        (0.040, 0.004, 1, 0.1),
        (0.033, 0.012, 1, 0.36),
        (0.114, 0.012, 8, 0.84),
        (0.040, 0.0, 1, LEAST),
        (0.010, 0.02, 1, MOST),
    ],
)
def test_it_is_the_cost_of_a_token_relative_to_what_a_plain_step_yields(
    start_s: float, token_s: float, requests: int, expected: float
) -> None:
    costs, rng = DraftCosts(), random.Random(0)
    for _ in range(300):
        drafted = rng.randrange(6) * requests
        observed(costs, drafted, (start_s + token_s * drafted) * rng.uniform(0.98, 1.02), requests)
    assert costs.least_probability() == pytest.approx(expected, abs=0.04)


def test_disturbed_steps_do_not_count_and_a_new_cost_is_learned() -> None:
    costs, rng = DraftCosts(), random.Random(0)
    for place in range(300):
        drafted = rng.randrange(6)
        observed(costs, drafted, 5.0 if place % 20 == 19 else 0.040 + 0.004 * drafted)
    assert costs.least_probability() == pytest.approx(0.1, abs=0.03)
    for _ in range(600):
        drafted = rng.randrange(6)
        observed(costs, drafted, 0.040 + 0.020 * drafted)
    assert costs.least_probability() == pytest.approx(0.5, abs=0.05)


def test_each_size_of_batches_has_its_own() -> None:
    costs, rng = DraftCosts(), random.Random(0)
    for _ in range(200):
        drafted = rng.randrange(6)
        observed(costs, drafted, 0.040 + 0.004 * drafted, 1)
        observed(costs, drafted, 0.100 + 0.010 * drafted, 8)
    assert costs.least_probability() == pytest.approx(0.8, abs=0.02)
    observed(costs, 0, 0.040, 1)
    assert costs.least_probability() == pytest.approx(0.1, abs=0.02)

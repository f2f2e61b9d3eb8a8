"""Estimates from one client's requests apply to its next ones and not to those of other clients."""

import pytest

from router.request.service_times import (
    FORGET_S,
    HALF_LIFE_S,
    MAX_CLIENTS,
    START_CAUTION,
    TRIAL_S,
    ClientHabits,
)
from runtime.clock import ManualClock


def test_output_lengths_are_estimated_from_similar_limits() -> None:
    """The first counts for 0.9 of the second."""
    habits = ClientHabits(ManualClock())
    assert habits.expected_tokens("a", 100) == 0
    habits.answered("a", 100, 25)
    assert habits.expected_tokens("a", 120) == pytest.approx(30)
    assert habits.expected_tokens("a", 1000) == 0
    habits.answered("a", 100, 100)
    assert habits.expected_tokens("a", 100) == pytest.approx((25 * 0.9 + 100) / 1.9)


def test_output_lengths_are_estimated_per_client() -> None:
    habits = ClientHabits(ManualClock())
    for _ in range(12):
        habits.answered("a", 1000, 1000)
    assert habits.expected_tokens("b", 1000) == 0
    habits.answered("b", 1000, 10)
    assert habits.expected_tokens("b", 1000) == pytest.approx(10)


def test_the_overall_average_counts_for_clients_with_few_requests() -> None:
    """Half of the limit is between the averages of the others; it counts as two responses."""
    clock = ManualClock()
    habits = ClientHabits(clock)
    for client, share in (("a", 10), ("b", 50)):
        habits.answered(client, 100, share)
    assert habits.expected_tokens("new", 100) == 0, "two are not usual"
    for _ in range(12):
        habits.answered("c", 100, 100)
    clock.advance(1.0)
    assert habits.expected_tokens("new", 100) == pytest.approx(50)
    habits.answered("d", 100, 20)
    assert habits.expected_tokens("d", 100) == pytest.approx((20 + 2 * 50) / 3)
    assert habits.expected_tokens("c", 100) == pytest.approx(100, rel=0.2)


def test_habits_weigh_less_with_time_and_are_forgotten() -> None:
    clock = ManualClock()
    habits = ClientHabits(clock)
    habits.answered("a", 100, 100)
    clock.advance(HALF_LIFE_S)
    habits.answered("a", 100, 0)
    assert habits.expected_tokens("a", 100) == pytest.approx(100 * 0.45 / 1.45), (
        "half of what it weighed, less a tenth"
    )
    clock.advance(FORGET_S)
    assert habits.expected_tokens("a", 100) == 0


def test_errors_of_estimates_make_the_next_ones_cautious_and_are_forgotten() -> None:
    """Nine of ten took at most three times as long; of other lengths and other clients nothing is
    known."""
    clock = ManualClock()
    habits = ClientHabits(clock)
    for factor in range(1, 11):
        habits.served("a", 1.0, factor / 3)
    assert habits.safety_factor("a", 1.0) == pytest.approx(10 / 3)
    assert habits.safety_factor("a", 5.0) == habits.safety_factor("b", 1.0) == START_CAUTION
    clock.advance(61.0)
    assert habits.safety_factor("a", 1.0) == START_CAUTION


def test_trials_have_pauses() -> None:
    clock = ManualClock()
    habits = ClientHabits(clock)
    assert [habits.may_try(client) for client in ("a", "a", "b")] == [True, False, True]
    clock.advance(TRIAL_S)
    assert habits.may_try("a")


def test_only_the_most_recent_clients_are_kept() -> None:
    habits = ClientHabits(ManualClock())
    habits.answered("first", 100, 100)
    habits.answered("second", 100, 100)
    for number in range(MAX_CLIENTS - 1):
        habits.answered("first", 100, 100)
        habits.served(str(number), 1.0, 1.0)
    assert habits.expected_tokens("first", 100) == pytest.approx(100)
    assert habits.expected_tokens("second", 100) == 0

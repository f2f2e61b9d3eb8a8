"""The length of prompt chunks between decode steps."""

import pytest

from worker.chunk_budget import ChunkBudget


def test_the_first_chunk_is_whole_and_the_next_as_short_as_steps_bear() -> None:
    budget = ChunkBudget(512, 16)
    budget.stepped(0.01)
    assert budget.tokens == 512
    budget.computed(512, 0.32)  # 16 times what two steps take
    assert budget.tokens == 32


def test_it_grows_again_at_most_twofold() -> None:
    budget = ChunkBudget(512, 16, max_step_s=0.1)
    budget.computed(512, 1.6)
    assert budget.tokens == 32
    budget.computed(32, 0.01)
    assert budget.tokens == 64
    for _ in range(9):
        budget.computed(budget.tokens, 0.001)
    assert budget.tokens == 512


def test_a_short_chunk_does_not_lengthen_the_next() -> None:
    """The last chunk of a prompt says little about a whole one."""
    budget = ChunkBudget(512, 16, max_step_s=0.1)
    budget.computed(512, 0.4)
    assert budget.tokens == 128
    budget.computed(16, 0.001)
    assert budget.tokens == 128


@pytest.mark.parametrize("seconds", [0.5, 60.0])
def test_it_is_at_least_the_grid(seconds: float) -> None:
    budget = ChunkBudget(512, 64, max_step_s=0.001)
    for _ in range(20):
        budget.computed(64, seconds)
    assert budget.tokens == 64


def test_without_a_measured_step_nothing_is_bounded() -> None:
    budget = ChunkBudget(512, 16)
    budget.computed(512, 10.0)
    assert budget.tokens == 512


def test_a_chunk_converges_on_the_time_that_it_may_take() -> None:
    """A chunk takes 10 ms and 0.1 ms per token, a step 10 ms: 100 tokens take twice a step."""
    budget = ChunkBudget(512, 4)
    budget.stepped(0.01)
    for _ in range(30):
        budget.computed(budget.tokens, 0.01 + 0.0001 * budget.tokens)
    assert 88 <= budget.tokens <= 112

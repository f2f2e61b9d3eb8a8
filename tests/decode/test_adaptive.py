"""The draft length that yields most is found, kept while it is best, and left when it no longer
is."""

from collections import Counter
from collections.abc import Callable

import pytest

from decode.adaptive import AdaptiveDraft
from decode.speculation import VerifiedRow, VerifiedStep

Pool = Callable[[int], tuple[float, float]]  # draft length -> (tokens per step, seconds per step)


def run(
    policy: AdaptiveDraft, pool: Pool, steps: int, *, num_running: int = 1
) -> tuple[float, float]:
    """Return the tokens and seconds of this many steps; each step verifies the length that the
    previous one set."""
    tokens = seconds = 0.0
    asked = policy.length(num_running) or 0
    for _ in range(steps):
        length, asked = asked, policy.length(num_running) or 0
        per_step, duration = pool(length)
        tokens, seconds = tokens + per_step, seconds + duration
        # A hundred rows, so that fractions of a token count.
        policy.observe(
            VerifiedStep(
                (*[VerifiedRow(length, 0)] * 99, VerifiedRow(length, round(100 * per_step) - 100)),
                duration,
            ),
            num_running,
        )
    return tokens, seconds


def settled(policy: AdaptiveDraft, pool: Pool, *, num_running: int = 1) -> int:
    """Return the length of most steps; trials come in between."""
    lengths = Counter[int]()
    for _ in range(100):
        lengths[policy.length(num_running) or 0] += 1
        run(policy, pool, 1, num_running=num_running)
    return lengths.most_common(1)[0][0]


def good_draft(length: int) -> tuple[float, float]:
    return {0: 1.0, 1: 1.7, 3: 2.8}[length], 0.010 + 0.002 * length


def bad_draft(length: int) -> tuple[float, float]:
    return 1.0, 0.010 + 0.002 * length


def short_draft(length: int) -> tuple[float, float]:
    return {0: 1.0, 1: 1.8, 3: 1.9}[length], 0.010 + 0.002 * length


@pytest.mark.parametrize(("pool", "best"), [(good_draft, 3), (bad_draft, 0), (short_draft, 1)])
def test_the_best_length_is_found(pool: Pool, best: int) -> None:
    policy = AdaptiveDraft(3)
    assert policy.lengths == (0, 1, 3)
    run(policy, pool, 500)
    assert settled(policy, pool) == best


@pytest.mark.parametrize("pool", [good_draft, bad_draft, short_draft])
def test_it_costs_little_against_the_best_length(pool: Pool) -> None:
    policy = AdaptiveDraft(3)
    run(policy, pool, 300)
    tokens, seconds = run(policy, pool, 3000)
    best = max(pool(length)[0] / pool(length)[1] for length in policy.lengths)
    assert tokens / seconds > 0.95 * best


def test_a_draft_that_turns_bad_is_left_and_one_that_recovers_is_taken_up() -> None:
    policy = AdaptiveDraft(3)
    run(policy, good_draft, 300)
    assert settled(policy, good_draft) == 3
    run(policy, bad_draft, 1000)
    assert settled(policy, bad_draft) == 0
    run(policy, good_draft, 1500)
    assert settled(policy, good_draft) == 3


def test_a_small_advantage_does_not_make_it_waver() -> None:
    policy = AdaptiveDraft(3)
    run(policy, good_draft, 100)
    nearly_equal: Pool = lambda length: ({0: 1.02, 1: 1.01, 3: 1.0}[length], 0.010)  # noqa: E731
    changes, last = 0, policy.length(1)
    run(policy, nearly_equal, 600)
    for _ in range(2000):
        run(policy, nearly_equal, 1)
        changes, last = changes + (policy.length(1) != last), policy.length(1)
    assert changes <= 2 * (2000 // policy.trial_interval + 1), "trials, and nothing but trials"
    assert policy.length(1) in (3, last)


def test_drafts_follow_a_trial_of_none_and_are_left_out_once_none_is_best() -> None:
    policy, seen = AdaptiveDraft(3), set[int | None]()
    for _ in range(500):
        run(policy, good_draft, 1)
        seen.add(policy.length(1))
    assert seen == {0, 1, 3}
    run(policy, bad_draft, 1000)
    seen.clear()
    for _ in range(1000):
        run(policy, bad_draft, 1)
        seen.add(policy.length(1))
    assert seen == {None, 1, 3}


def test_batch_sizes_are_judged_apart() -> None:
    policy = AdaptiveDraft(3)
    for _ in range(40):
        run(policy, good_draft, 20, num_running=1)
        run(policy, bad_draft, 20, num_running=8)
    assert settled(policy, good_draft, num_running=1) == 3
    assert settled(policy, bad_draft, num_running=8) == 0

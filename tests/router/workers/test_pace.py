"""Rates of pools from what a router sees, by hand."""

import pytest

from router.workers.pace import (
    HALF_LIFE_S,
    MEMORY_S,
    MIN_GENERATED,
    MIN_PROMPTS,
    DecodePace,
    PrefillPace,
)
from runtime.clock import ManualClock


def test_prefill_is_as_fast_as_it_is_while_it_has_prompts() -> None:
    clock = ManualClock()
    pace = PrefillPace(clock)
    for _ in range(MIN_PROMPTS):
        assert pace.tokens_per_s is None, "a few prompts first"
        pace.began()
        clock.advance(0.5)
        pace.ended(100)
        clock.advance(1000)  # nothing to do
    assert pace.tokens_per_s == pytest.approx(200, rel=0.1)


def test_prompts_side_by_side_share_the_time() -> None:
    """Ten prompts of a hundred tokens within a second are 1,000 tokens per second, though each took
    longer."""
    clock = ManualClock()
    pace = PrefillPace(clock)
    for _ in range(20):
        for _ in range(10):
            pace.began()
        clock.advance(1.0)
        for _ in range(10):
            pace.ended(100)
    assert pace.tokens_per_s == pytest.approx(1000, rel=0.1)


def test_prompts_that_caches_have_most_of_do_not_make_others_endless() -> None:
    """Four tokens each, in 0.1 s that are not theirs: at 40 tokens per second 200 others would seem
    to take five."""
    clock = ManualClock()
    pace = PrefillPace(clock)
    for _ in range(20):
        pace.began()
        clock.advance(0.1)
        pace.ended(4)
    assert pace.tokens_per_s == pytest.approx(640, rel=0.1)


def test_slow_measurements_decay_by_half_every_half_life() -> None:
    """A hundred tokens per second, then, for one half-life, three hundred: (100 + 300) / 2, but for
    the tokens of the newest second, which weigh a little more."""
    clock = ManualClock()
    pace = PrefillPace(clock)
    for _ in range(100):
        pace.began()
        clock.advance(1.0)
        pace.ended(100)
    for _ in range(round(HALF_LIFE_S)):
        pace.began()
        clock.advance(1.0)
        pace.ended(300)
    assert pace.tokens_per_s == pytest.approx(200, rel=0.15)


def test_a_stalled_pool_gets_slower_without_reports() -> None:
    clock = ManualClock()
    pace = PrefillPace(clock)
    for _ in range(100):
        pace.began()
        clock.advance(1.0)
        pace.ended(100)
    pace.began()
    clock.advance(HALF_LIFE_S)
    slow = pace.tokens_per_s
    assert slow is not None
    assert slow < 60
    pace.restarted()
    clock.advance(1000)
    assert pace.tokens_per_s == pytest.approx(slow), "nothing was lost with a restarted pool"


class Pool:
    """Reports of a pool that only this router uses. Its first hundred prompts have a hundred tokens
    each, which take a tenth of a second."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.pace = PrefillPace(self.clock)
        self.num_computed = 0
        for _ in range(100):
            self.pace.began()
            self.clock.advance(0.1)
            self.pace.ended(100)
        self.reports(10_000)

    def reports(self, num_tokens: int) -> None:
        """Report this many more tokens, with a million left."""
        self.num_computed += num_tokens
        self.pace.reported(self.num_computed, 1_000_000, 1_000_000 + num_tokens)


def test_a_long_prompt_counts_by_its_chunks() -> None:
    """A minute without the end of any prompt: 1,000 tokens per second all the time, and not a
    thousandth of it."""
    pool = Pool()
    pool.pace.began()
    pool.reports(5_000)  # what was computed before
    for _ in range(240):
        pool.clock.advance(0.25)
        pool.reports(250)
        assert pool.pace.tokens_per_s == pytest.approx(1000, rel=0.1)
    assert pool.pace.tokens_under_way == 60_000
    pool.pace.ended(60_000)
    assert pool.pace.tokens_per_s == pytest.approx(1000, rel=0.1), "counted once"
    assert pool.pace.tokens_under_way == 0


def test_a_long_chunk_is_not_a_stalled_pool() -> None:
    """Reports say nothing new for five seconds, then 5,000 tokens."""
    pool = Pool()
    pool.pace.began()
    pool.reports(0)
    pool.clock.advance(5)
    pool.reports(5_000)
    for _ in range(10):
        for _ in range(19):
            pool.clock.advance(0.25)
            pool.reports(0)
            assert pool.pace.tokens_per_s == pytest.approx(1000, rel=0.4)
        pool.clock.advance(0.25)
        pool.reports(5_000)
    pool.clock.advance(20)
    slow = pool.pace.tokens_per_s
    assert slow is not None
    assert slow < 200, "four times as long as a chunk takes"


def test_reported_and_finished_tokens_count_once() -> None:
    pool = Pool()
    pool.pace.began()
    for number in range(1, 201):
        pool.pace.began()  # one always waits
        pool.clock.advance(0.1)
        pool.pace.ended(100)
        if number % 5 == 0:
            pool.reports(500)
    assert pool.pace.tokens_per_s == pytest.approx(1000, rel=0.1)


def test_abandoned_work_takes_time_and_yields_no_tokens() -> None:
    clock = ManualClock()
    pace = PrefillPace(clock)
    for num_tokens in (100, 0) * 50:
        pace.began()
        clock.advance(1.0)
        pace.ended(num_tokens)
    assert pace.tokens_per_s == pytest.approx(50, rel=0.15)


def test_tokens_come_as_fast_as_at_this_load_or_the_nearest_lower_one() -> None:
    clock = ManualClock()
    pace = DecodePace(clock)
    assert pace.token_s(1) is None
    pace.observe(8, 100, 10.0)
    assert [pace.token_s(load) for load in (1, 8, 15, 64)] == pytest.approx([0.1] * 4), (
        "the only one that is known"
    )
    pace.observe(1, 100, 1.0)
    assert [pace.token_s(load) for load in (0, 1, 7, 8, 100)] == pytest.approx(
        [0.01, 0.01, 0.01, 0.1, 0.1]
    )
    pace.observe(20, 0, 1.0)
    pace.observe(20, 50, 0.0)
    assert pace.token_s(20) == pytest.approx(0.1), "what says nothing counts for nothing"


def test_a_load_that_was_slow_long_ago_is_tried_again() -> None:
    clock = ManualClock()
    pace = DecodePace(clock)
    pace.observe(8, 100, 100.0)
    clock.advance(MEMORY_S - 1)
    pace.observe(1, 100, 1.0)
    assert pace.token_s(8) == pytest.approx(1.0)
    clock.advance(2)
    assert pace.token_s(8) == pytest.approx(0.01)
    clock.advance(MEMORY_S)
    assert pace.token_s(8) is None


def test_newer_measurements_weigh_more() -> None:
    """0.9 x 100 s + 10 s over 0.9 x 100 + 100 tokens."""
    pace = DecodePace(ManualClock())
    pace.observe(4, 100, 100.0)
    pace.observe(4, 100, 10.0)
    assert pace.token_s(4) == pytest.approx(100.0 / 190)


def test_one_token_of_a_new_pool_gives_no_estimate() -> None:
    """It took 0.7 s; an output of 175 tokens was estimated at two minutes and refused for its
    deadline."""
    pace = DecodePace(ManualClock())
    pace.observe(1, 1, 0.7)
    assert pace.token_s(1) is None
    pace.observe(1, MIN_GENERATED - 2, 0.3)
    assert pace.token_s(1) is None
    pace.observe(1, 70, 0.7)
    assert pace.token_s(1) == pytest.approx(0.015, rel=0.2)

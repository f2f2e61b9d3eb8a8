"""Spans of rounds against going through every round."""

import math
import random
from dataclasses import dataclass

import pytest

from runtime.clock import ManualClock
from runtime.errors import CapacityError
from sim.costs import DecodeCosts
from sim.decode_pool import DecodePool, Rounds, SimulatedRow
from sim.pages import CountedPages

CLOCK = ManualClock().now  # rows only remember it
COSTS = DecodeCosts(
    step_s=0.01, row_s=0.001, context_s=1e-6, num_pages=10_000, max_running=8, max_held=64
)


@dataclass
class Coming:
    at_s: float
    prompt: int
    output: int


def generated_in_spans(
    costs: DecodeCosts, coming: list[Coming], page_size: int = 16
) -> dict[int, float]:
    """Return the time of each request's last token."""
    pool, now_s, ended, left = (
        DecodePool(costs, page_size, CLOCK, CountedPages(costs.num_pages)),
        0.0,
        dict[int, float](),
        list(enumerate(coming)),
    )
    while left or pool.span is not None:
        due_s = left[0][1].at_s if left else math.inf
        if pool.span is not None and pool.span.ends_s <= due_s:
            now_s = pool.span.ends_s
            ended.update({row.key: now_s for row in pool.advance(now_s)})
        else:
            key, item = left.pop(0)
            row = SimulatedRow(key, item.prompt, item.output)
            pool.reserve(row)
            pool.join(row, due_s)
        pool.check()
    return ended


def generated_in_rounds(costs: DecodeCosts, coming: list[Coming]) -> dict[int, float]:
    """Compute the same by the simplest way: a request takes part in each round that begins after
    its arrival."""
    rows, now_s, ended, left = (
        dict[int, list[int]](),
        0.0,
        dict[int, float](),
        list(enumerate(coming)),
    )
    while rows or left:
        if not rows:
            now_s = max(now_s, left[0][1].at_s)
        while left and left[0][1].at_s <= now_s:
            key, item = left.pop(0)
            rows[key] = [item.prompt, item.output]
        turns = max(1.0, len(rows) / costs.max_running)
        now_s += (
            costs.step_s * turns
            + costs.row_s * len(rows)
            + costs.context_s * sum(row[0] for row in rows.values())
        )
        for key, row in list(rows.items()):
            row[0], row[1] = row[0] + 1, row[1] - 1
            if not row[1]:
                ended[key] = now_s
                del rows[key]
    return ended


@pytest.mark.parametrize("seed", range(8))
def test_spans_give_the_times_of_single_rounds(seed: int) -> None:
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, 4) for _ in range(30))
    coming = [Coming(at_s, rng.randint(1, 3000), rng.randint(1, 60)) for at_s in times]
    found, expected = generated_in_spans(COSTS, coming), generated_in_rounds(COSTS, coming)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-9)


def test_rounds_by_is_the_inverse_of_after() -> None:
    for growth_s in (0.0, 1e-6, 0.01):
        span = Rounds(5.0, 1000, 0.02, growth_s)
        for count in (0, 1, 7, 999, 1000):
            assert span.rounds_by(span.after_s(count) + 1e-7) == count
    assert Rounds(5.0, 10, 0.02, 0.0).rounds_by(1e9) == 10


def test_pages_that_run_out_set_the_youngest_back() -> None:
    """Eight pages of four tokens, rounds of a second. Two rows of 12 tokens hold three pages each;
    the second joins with the second round. After four seconds they have 16 and 15 tokens in eight
    pages, and the first needs a ninth: the second is preempted, resumes when the first has
    generated its last four tokens, and generates the five it lacks."""
    costs = DecodeCosts(step_s=1, row_s=0, context_s=0, replay_s=0, num_pages=8, growth_tokens=0)
    pool, now_s = DecodePool(costs, 4, CLOCK, CountedPages(costs.num_pages)), 0.0
    rows = [SimulatedRow(key, 12, 8) for key in (1, 2)]
    for row in rows:
        pool.reserve(row)
    for row in rows:
        pool.join(row, now_s)
    ended: dict[int, float] = {}
    while pool.span is not None:
        now_s = pool.span.ends_s
        ended.update({row.key: now_s for row in pool.advance(now_s)})
        pool.check()
        if now_s == 4.0:
            assert pool.num_waiting == 1
            with pytest.raises(CapacityError, match="preempted"):
                pool.reserve(SimulatedRow(3, 1, 1))
    assert [row.num_preemptions for row in rows] == [0, 1]
    assert ended == {1: 8.0, 2: 13.0}
    assert pool.pages_free(now_s) == 8


def test_memory_released_during_a_round_is_free_at_its_end() -> None:
    costs = DecodeCosts(step_s=1, row_s=0, context_s=0, num_pages=8, growth_tokens=0)
    pool, row = DecodePool(costs, 4, CLOCK, CountedPages(costs.num_pages)), SimulatedRow(1, 12, 100)
    pool.reserve(row)
    pool.join(row, 0.0)
    assert pool.generated(row, 2.5) == 2
    pool.release(row, 2.5)
    assert pool.span is not None
    assert pool.span.ends_s == 3.0
    assert pool.advance(3.0) == []
    assert pool.pages_free(3.0) == 8


def test_rows_wait_for_other_work() -> None:
    """Rounds of 0.01 s, one of which is under way at 0.025 s: it ends at 0.03, two other things
    take 0.004 s each, and the other seven of ten rounds follow. A pool that draws nothing loses
    nothing, unless it is to be done first."""
    costs = DecodeCosts(step_s=0.01, row_s=0, context_s=0)
    pool = DecodePool(costs, 16, CLOCK, CountedPages(costs.num_pages))
    assert not pool.interrupt(0.004, 0.0)
    row = SimulatedRow(0, 10, 10)
    pool.reserve(row)
    pool.join(row, 0.0)
    assert pool.span is not None
    assert pool.span.ends_s == pytest.approx(0.1)
    assert pool.interrupt(0.004, 0.025)
    assert pool.interrupt(0.004, 0.026)
    assert pool.span.ends_s == pytest.approx(0.03)
    assert not pool.advance(0.03)
    assert pool.span.ends_s == pytest.approx(0.108)
    assert pool.advance(0.108) == [row]
    assert pool.busy_s == pytest.approx(0.108)
    pool.delay(0.004)
    again = SimulatedRow(1, 10, 10)
    pool.reserve(again)
    pool.join(again, 1.0)
    assert pool.span.ends_s == pytest.approx(1.104)

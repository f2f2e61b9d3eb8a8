"""Bounds of a trace of a few prompts, counted by hand."""

import pytest

from baton.workload import Planned
from bench.cache_bound import Job, bounds, in_order, jobs_of, shortest_first, work_of


def test_cached_pages_of_an_earlier_prompt_are_reused() -> None:
    """Blocks of 512: the second prompt has two of the first's, the third is all there but for its
    last token."""
    trace = [
        Planned(0.0, 1100, 1, (1, 2, 3)),
        Planned(1.0, 1600, 1, (1, 2, 4, 5)),
        Planned(2.0, 1024, 1, (1, 2)),
    ]
    assert jobs_of(trace, 0) == [Job(0.0, 1100, 1100), Job(1.0, 1600, 576), Job(2.0, 1024, 1)]


def test_attention_grows_with_what_is_before() -> None:
    """At 100 tokens a token costs twice what the first one does."""
    assert work_of(100, 100) == 100 + 50
    assert work_of(100, 0) == 100


def test_one_line_before_two_servers() -> None:
    """The third waits until 4, when the second one's server is free."""
    assert in_order([0, 0, 1], [10, 4, 2], 2) == [10, 4, 5]


def test_the_shortest_interrupts() -> None:
    """The third takes the first one's place from 1 to 3."""
    assert shortest_first([0, 0, 1], [10, 4, 2], 2) == [12, 4, 2]
    assert shortest_first([0, 20], [1, 1], 1) == [1, 1]


def test_no_request_waits_at_a_small_load() -> None:
    """So what is there is all that counts: nine of ten tokens of every prompt."""
    jobs = [Job(float(at), 100, 10) for at in range(20)]
    found = bounds(jobs, 0.1, 2)
    assert found["warm_load"] == pytest.approx(0.01)
    assert [found[name] for name in ("fifo_ratio", "shortest_ratio", "own_ratio")] == pytest.approx(
        [0.1, 0.1, 0.1]
    )

"""Figures that `bench.cache` computes from measured times, by hand."""

import pytest

from bench.cache import Sides, TimeSpan, missed


def test_a_ratio_is_the_median_over_pairs_so_that_drift_cancels() -> None:
    """The machine becomes twice as slow in the second pair, and something disturbs one side of the
    third."""
    sides = Sides()
    for side, base in ((1.1, 1.0), (2.2, 2.0), (5.0, 1.0)):
        sides.add(side, base)
    assert sides.ratio == pytest.approx(1.1)
    assert sides.least_ratio == pytest.approx(1.1)


def test_gaps_of_a_time_window_are_within_it_and_of_one_stream() -> None:
    streams = [[0.0, 1.0, 3.0, 6.0], [2.0, 2.5]]
    assert TimeSpan(1.0, 5.0).gaps(streams) == [2.0, 0.5]


def test_a_miss_may_cost_a_fiftieth_and_may_cost_nothing() -> None:
    assert not missed({"miss_cpu_ratio": 1.02, "miss_ttft_ratio": 0.9, "miss_rate_ratio": 1.1})
    assert (
        len(missed({"miss_cpu_ratio": 1.03, "miss_ttft_ratio": 1.03, "miss_rate_ratio": 0.97})) == 3
    )

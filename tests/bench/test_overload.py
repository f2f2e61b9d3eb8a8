"""Figures that the overload benchmark computes from replies, by hand; and a short run on a real
cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.overload import LoadCell, LoadReply, bars, missed


def served(sent_s: float, placed_s: float, ended_s: float) -> LoadReply:
    return LoadReply(sent_s, sent_s, ended_s, placed_s)


def refused(sent_s: float, named_s: float) -> LoadReply:
    return LoadReply(
        sent_s, sent_s, sent_s + 0.01, error="OUT_OF_CAPACITY", was_refused=True, named_s=named_s
    )


def test_a_named_wait_is_compared_with_the_last_admitted_request() -> None:
    cell = LoadCell(2, 5.0, 10.0)
    cell.answers += [
        served(0.0, 0.0, 1.0),
        served(1.0, 4.0, 6.0),
        served(3.0, 9.0, 11.0),
        refused(2.0, 3.0),  # it was 4 - 2
        refused(3.95, 1.0),  # it was 9 - 3.95
        LoadReply(2.5, 2.5, 7.5, error="DEADLINE_EXCEEDED"),
    ]
    assert cell.waits() == [(3.0, 2.0), (1.0, 9.0 - 3.95)]
    assert cell.in_time_per_s == 0.2, "one ended after requests had stopped coming"


def test_bars_compare_with_the_load_that_can_just_be_served() -> None:
    once, twice = LoadCell(1, 5.0, 10.0), LoadCell(2, 5.0, 10.0)
    once.answers += [served(i, i, i + 0.5) for i in range(10)]
    twice.answers += [served(i, i, i + 0.5) for i in range(8)]
    figures = bars([once, twice])
    assert figures["goodput_kept"] == 0.8
    assert missed(figures) == ["goodput_kept 0.8 is below 0.9"]


@pytest.mark.long
def test_a_sixfold_load_is_served_and_refusals_name_a_retry_delay() -> None:
    """Checks only bounds that hold on a machine whose cores are taken for seconds at a time, so
    that admitted requests end late; first come first served would refuse nothing. Goodput is
    measured by hand."""
    flags = (
        "--loads",
        "1,6",
        "--deadlines",
        "5",
        "--seconds",
        "10",
        "--capacity-s",
        "8",
        "--seed",
        "3",
        "--json",
    )
    done = subprocess.run(
        [sys.executable, "-m", "bench.overload", *flags],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    turned_away = figures["x6_5s_refused"] + figures["x6_5s_dropped"]
    assert turned_away > figures["x6_5s_sent"] / 4
    assert figures["x6_5s_refused_unnamed"] == 0
    assert figures["x6_5s_in_time_per_s"] > 0
    assert figures["x6_5s_late"] <= turned_away / 2, (
        "what cannot end in time is refused rather than begun"
    )

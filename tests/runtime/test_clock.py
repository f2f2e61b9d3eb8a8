import asyncio
import dataclasses
import math
import subprocess
import sys
import time

import psutil
import pytest

from runtime.clock import (
    NO_DEADLINE,
    Clock,
    Deadline,
    LoopClock,
    ManualClock,
    SystemClock,
    process_age_s,
)
from sim.time import run_virtually


def test_deadline_counts_down_by_its_clock() -> None:
    clock = ManualClock(1000.0)
    deadline = Deadline.after(clock, 5.0)
    assert deadline.at_s == 1005.0
    assert deadline.remaining_s() == 5.0
    clock.advance(3.0)
    assert deadline.remaining_s() == 2.0
    assert not deadline.is_over
    assert deadline.overrun_s() == 0.0


def test_deadline_is_over_at_its_very_time() -> None:
    clock = ManualClock(1000.0)
    deadline = Deadline.after(clock, 5.0)
    clock.advance(4.75)
    assert not deadline.is_over
    clock.advance(0.25)
    assert deadline.is_over
    assert deadline.remaining_s() == deadline.overrun_s() == 0.0


def test_deadline_in_the_past_has_no_negative_rest() -> None:
    """Timeouts of gRPC and `time.sleep` must not be negative."""
    clock = ManualClock(1000.0)
    deadline = Deadline.after(clock, 5.0)
    clock.advance(7.0)
    assert deadline.is_over
    assert deadline.remaining_s() == 0.0
    assert deadline.overrun_s() == 2.0
    assert Deadline.after(clock, 0.0).is_over


def test_deadline_allows_work_that_ends_by_then() -> None:
    clock = ManualClock(1000.0)
    deadline = Deadline.after(clock, 5.0)
    assert deadline.allows(5.0)
    assert not deadline.allows(5.5)
    clock.advance(3.0)
    assert deadline.allows(2.0)
    assert not deadline.allows(2.5)
    clock.advance(3.0)
    assert not deadline.allows(0.0), "not even nothing, although no time remains to be exceeded"


@pytest.mark.parametrize("clock", [ManualClock(1e9), SystemClock()])
def test_infinite_deadline_never_ends(clock: Clock) -> None:
    for deadline in (NO_DEADLINE, Deadline.after(clock, math.inf)):
        assert not deadline.is_over
        assert deadline.remaining_s() == math.inf
        assert deadline.overrun_s() == 0.0
        assert deadline.allows(1e12)


def test_deadline_cannot_be_moved() -> None:
    deadline = Deadline.after(ManualClock(), 5.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        deadline.at_s = 6.0  # type: ignore[misc]  # that is what is tested


def test_deadlines_of_different_clocks_differ() -> None:
    """The same number of seconds means nothing on another clock."""
    assert Deadline(ManualClock(), 5.0) != Deadline(ManualClock(), 5.0)
    clock = ManualClock()
    assert Deadline(clock, 5.0) == Deadline(clock, 5.0)


def test_loop_clock_ends_waits_of_its_loop_in_virtual_time() -> None:
    async def wait() -> float:
        clock = LoopClock()
        deadline = Deadline.after(clock, 3600.0)
        await asyncio.sleep(600.0)
        assert deadline.remaining_s() == 3000.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(deadline.remaining_s()):
                await asyncio.Event().wait()
        assert deadline.is_over
        return clock.now()

    began_s = time.monotonic()
    assert run_virtually(wait()) == 3600.0
    assert time.monotonic() - began_s < 60.0


def test_the_age_of_a_process_counts_from_its_start() -> None:
    """As psutil works it out from the time of day."""
    created_s = psutil.Process().create_time()
    before_s = time.time() - created_s
    age_s = process_age_s()
    assert before_s - 2.0 < age_s < time.time() - created_s + 2.0


def test_a_new_process_is_young() -> None:
    code = "import time; time.sleep(0.3); from runtime.clock import process_age_s; print(process_age_s())"
    age_s = float(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, timeout=60
        ).stdout
    )
    assert 0.29 <= age_s < min(60.0, process_age_s())

"""Clocks that state machines take as an argument, so that tests can advance time by hand, and
deadlines by such a clock.
"""

import asyncio
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

# An event loop that wakes this late has not read its sockets meanwhile. It reads before it decides.
STALLED_S = 0.25


class Clock(Protocol):
    """Source of monotonic time in seconds."""

    def now(self) -> float: ...


class SystemClock:
    """Clock of the operating system."""

    def now(self) -> float:
        return time.monotonic()


class LoopClock:
    """Clock of an event loop, by default the running one. A simulation's loop has virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        # An attribute, because each request of a simulation calls it hundreds of times.
        self.now = (loop or asyncio.get_running_loop()).time


@dataclass(frozen=True, slots=True)
class Deadline:
    """Point in time, by one clock, at which a wait or a request ends.

    `at_s` is in seconds of `clock`, infinite without a limit. Compare it only with times of the
    same clock, and only where the methods do not fit: loops over many rows read the clock once.

    Code that runs for every message of a step keeps the time as a float, named `deadline_s`, in
    seconds of `time.monotonic()`: an object per message would be measurable there.
    """

    clock: Clock
    at_s: float

    @classmethod
    def after(cls, clock: Clock, timeout_s: float) -> Self:
        """Return the deadline `timeout_s` seconds from now."""
        return cls(clock, clock.now() + timeout_s)

    @property
    def is_over(self) -> bool:
        """Return whether the time has come."""
        return self.clock.now() >= self.at_s

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, 0 once it is over."""
        return max(0.0, self.at_s - self.clock.now())

    def overrun_s(self) -> float:
        """Return the seconds since the deadline, 0 until it is over."""
        return max(0.0, self.clock.now() - self.at_s)

    def allows(self, duration_s: float) -> bool:
        """Return whether something that begins now and takes `duration_s` ends in time."""
        return self.clock.now() + duration_s <= self.at_s


NO_DEADLINE: Final = Deadline(SystemClock(), math.inf)


def process_age_s() -> float:
    """Return the seconds since this process was started or forked, or 0 outside Linux.

    Reads field 22 of /proc/self/stat, see proc(5). The resolution is a clock tick, 10 ms.
    """
    if sys.platform != "linux":
        return 0.0
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


class ManualClock:
    """Clock that moves only when `advance` is called."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

"""Clocks that state machines take as an argument, so that tests can advance time by hand."""

import os
import sys
import time
from pathlib import Path
from typing import Protocol

# An event loop that wakes this late has not read its sockets meanwhile. It reads before it decides.
STALLED_S = 0.25


class Clock(Protocol):
    """Source of monotonic time in seconds."""

    def now(self) -> float: ...


class SystemClock:
    """Clock of the operating system."""

    def now(self) -> float:
        return time.monotonic()


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

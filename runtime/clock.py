"""Time as an input: state machines take a Clock, tests hand them one they turn by hand."""

import os
import sys
import time
from pathlib import Path
from typing import Protocol

HELD_UP_S = (
    0.25  # an event loop that wakes so late has not read meanwhile: it reads first, then decides
)


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float: ...


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()


def process_age_s() -> float:
    """Seconds since this process was started or forked: field 22 of /proc/self/stat, proc(5). 0
    where there is none.

    Resolution: a clock tick, 10 ms.
    """
    if sys.platform != "linux":
        return 0.0
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


class ManualClock:
    """Moves only by `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

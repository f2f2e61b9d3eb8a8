"""Time as an input: state machines take a Clock, tests hand them one they turn by hand."""

import time
from typing import Protocol

HELD_UP_S = 0.25  # an event loop that wakes so late has not read meanwhile: it reads first, then decides


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float: ...


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """Moves only by `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

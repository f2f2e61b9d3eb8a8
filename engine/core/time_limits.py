"""Time limits of steps and of frames between stages, for detecting a hang or a broken pool."""

from collections import deque

from runtime.clock import Clock

LIMIT_STEPS = 20
LIMIT_FLOOR_S = 60.0
LIMIT_UNKNOWN_S = 600.0
LIMIT_MEMORY = 0.999
MAX_LOOK_S = 1.0
FACTOR = 8
WINDOW = 64


class StepLimit:
    """The maximum duration of a step, in seconds, after which its loop counts as hung.

    It is the configured value, or else `LIMIT_STEPS` times the longest recent step, and at least
    `LIMIT_FLOOR_S`. A step of a thousand steps ago counts for a third. Until the first step, which
    may compile kernels, the limit is `LIMIT_UNKNOWN_S`. The loop's thread writes it; any thread may
    read it.
    """

    def __init__(self, fixed_s: float = 0.0) -> None:
        """Create a limit of `fixed_s` seconds; 0 derives it from the steps."""
        self._fixed_s = fixed_s
        self._longest_s: float | None = None

    @property
    def seconds(self) -> float:
        longest_s = self._longest_s
        if longest_s is None:
            return LIMIT_UNKNOWN_S
        return self._fixed_s or max(LIMIT_FLOOR_S, LIMIT_STEPS * longest_s)

    def observe(self, step_s: float) -> None:
        """Record the duration of a step."""
        self._longest_s = (
            step_s if self._longest_s is None else max(step_s, self._longest_s * LIMIT_MEMORY)
        )


class HangWatch:
    """Detection of a loop over its limit, for a caller that polls.

    A late poll was delayed itself, perhaps with the whole process. So each interval between polls
    counts for at most `MAX_LOOK_S`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_s = clock.now()
        self._since_s: float | None = None
        self._busy_s = 0.0

    def is_over(self, busy_since_s: float | None, limit_s: float) -> bool:
        now = self._clock.now()
        look_s = min(now - self._looked_s, MAX_LOOK_S)
        self._looked_s = now
        same = busy_since_s is not None and busy_since_s == self._since_s
        self._busy_s = self._busy_s + look_s if same else 0.0
        self._since_s = busy_since_s
        return self._busy_s > limit_s


class FrameLimit:
    """The time limit for a frame of the next stage.

    It is at least `least_s`, and `FACTOR` times the longest of the last `WINDOW` steps. A pool with
    long steps is therefore not taken for broken, and a failure of one with short steps is detected
    early. Used by one thread.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._steps_s: deque[float] = deque(maxlen=WINDOW)

    def measured(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._steps_s.append(seconds)

    @property
    def seconds(self) -> float:
        return max(self._least_s, FACTOR * max(self._steps_s, default=0.0))

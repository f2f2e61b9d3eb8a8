"""How long a step, and a frame between stages, may take before the engine counts as hung, or the
pool as broken."""

from collections import deque

from runtime.clock import Clock

LIMIT_STEPS, LIMIT_FLOOR_S, LIMIT_UNKNOWN_S, LIMIT_MEMORY = 20, 60.0, 600.0, 0.999
MAX_LOOK_S = 1.0
FACTOR, WINDOW = 8, 64


class StepLimit:
    """How long a step may take before whatever runs it counts as hung, in seconds.

    What was set, or else `LIMIT_STEPS` times the longest step of late (a step of a thousand steps
    ago counts for a third), and never less than `LIMIT_FLOOR_S`; until the first step, which may
    compile kernels, `LIMIT_UNKNOWN_S`. Written by the loop's thread, read by any.
    """

    def __init__(self, fixed_s: float = 0.0) -> None:
        """`fixed_s`: 0 to derive it."""
        self._fixed_s = fixed_s
        self._longest_s: float | None = None

    @property
    def seconds(self) -> float:
        longest_s = self._longest_s
        if longest_s is None:
            return LIMIT_UNKNOWN_S
        return self._fixed_s or max(LIMIT_FLOOR_S, LIMIT_STEPS * longest_s)

    def observe(self, step_s: float) -> None:
        """A step took this long."""
        self._longest_s = (
            step_s if self._longest_s is None else max(step_s, self._longest_s * LIMIT_MEMORY)
        )


class HangWatch:
    """Whether a loop is over its limit, for a caller that looks now and then. A look that comes
    late was held up itself, as the whole process may have been: it counts for no more than
    `MAX_LOOK_S`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_s = clock.now()
        self._since_s: float | None = None
        self._busy_s = 0.0

    def is_over(self, busy_since_s: float | None, limit_s: float) -> bool:
        now = self._clock.now()
        look_s, self._looked_s = min(now - self._looked_s, MAX_LOOK_S), now
        same = busy_since_s is not None and busy_since_s == self._since_s
        self._busy_s = self._busy_s + look_s if same else 0.0
        self._since_s = busy_since_s
        return self._busy_s > limit_s


class FrameLimit:
    """How long the next stage may take for a frame: at least `least_s`, and `FACTOR` times the
    longest of the last `WINDOW` steps: a pool whose steps are long by nature is not broken, and one
    whose steps are short is known to be soon enough. Belongs to one thread."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._steps_s: deque[float] = deque(maxlen=WINDOW)

    def measured(self, seconds: float) -> None:
        """A step took so long."""
        self._steps_s.append(seconds)

    @property
    def seconds(self) -> float:
        return max(self._least_s, FACTOR * max(self._steps_s, default=0.0))

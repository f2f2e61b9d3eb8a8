"""How long the next stage may take for a frame before the pool counts as broken."""

from collections import deque

FACTOR = 8
WINDOW = 64


class FrameLimit:
    """At least `least_s`, and `FACTOR` times the longest of the last `WINDOW` steps: a pool whose steps are long by
    nature is not broken, and one whose steps are short is known to be soon enough. Belongs to one thread."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._steps_s: deque[float] = deque(maxlen=WINDOW)

    def measured(self, seconds: float) -> None:
        """A step took so long."""
        self._steps_s.append(seconds)

    @property
    def seconds(self) -> float:
        return max(self._least_s, FACTOR * max(self._steps_s, default=0.0))

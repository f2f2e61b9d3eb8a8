"""The cost of a drafted token, measured, and the probability of acceptance that is worth it.

A step with drafts takes longer: by nearly nothing where it reads weights most of the time, by a
row's whole share where it computes. So for each class of batch sizes the time of a step is fitted
as a + b d, by least squares over its number d of drafted tokens. Without drafts a step of R requests
yields a token per a / R seconds. A drafted token costs b seconds, so it pays if it is accepted with
a probability above b R / a. Belongs to the engine thread.
"""

from dataclasses import dataclass, field

from decode.speculation import VerifiedStep

UNKNOWN_PROBABILITY = 0.35  # before there are enough measurements
LEAST, MOST = 0.05, 0.98
MEMORY = 0.99  # the weight of earlier steps
MIN_STEPS = 16.0
# A step of more than that many times the usual time was disturbed, or prepared a new shape.
OUTLIER = 4.0


@dataclass
class _StepTimes:
    """Weighted sums over steps: of their number, d, seconds, d squared, d seconds, and requests."""

    steps: float = 0.0
    drafted: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    requests: float = 0.0

    def add(self, drafted: int, seconds: float, requests: int) -> None:
        if self.steps >= MIN_STEPS and seconds * self.steps > OUTLIER * self.seconds:
            return
        self.steps = MEMORY * self.steps + 1
        self.drafted = MEMORY * self.drafted + drafted
        self.seconds = MEMORY * self.seconds + seconds
        self.squares = MEMORY * self.squares + drafted**2
        self.products = MEMORY * self.products + drafted * seconds
        self.requests = MEMORY * self.requests + requests

    def probability(self) -> float:
        """Return b R / a; `UNKNOWN_PROBABILITY` if the steps do not tell a and b."""
        spread = self.steps * self.squares - self.drafted**2
        if self.steps < MIN_STEPS or spread <= 1e-6 * self.steps * self.squares:
            return UNKNOWN_PROBABILITY
        slope = (self.steps * self.products - self.drafted * self.seconds) / spread
        start = (self.seconds - slope * self.drafted) / self.steps
        if start <= 0:
            return MOST
        return min(MOST, max(LEAST, slope * self.requests / self.steps / start))


@dataclass
class DraftCosts:
    """The measured costs, by class of the number of running requests."""

    _classes: dict[int, _StepTimes] = field(default_factory=dict)
    _last: int = 0

    def observe(self, step: VerifiedStep, num_running: int) -> None:
        """Record a step."""
        self._last = num_running.bit_length()
        self._classes.setdefault(self._last, _StepTimes()).add(
            step.num_drafted, step.seconds, len(step.rows) + step.num_declined
        )

    def least_probability(self) -> float:
        """Return the probability from which a drafted token pays, with as many requests as last."""
        times = self._classes.get(self._last)
        return UNKNOWN_PROBABILITY if times is None else times.probability()

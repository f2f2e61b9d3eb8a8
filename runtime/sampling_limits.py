"""Valid ranges and defaults of sampling parameters.

They apply to requests and to the defaults of a model.
"""

from dataclasses import dataclass

MAX_TOP_K = (1 << 32) - 1


@dataclass(frozen=True)
class Interval:
    """Range of values of a sampling field. NaN is in no interval."""

    low: float
    high: float
    low_is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.low_is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.low_is_open:
            return f"must be above {self.low:g} and at most {self.high:g}"
        return f"must be between {self.low:g} and {self.high:g}"


SAMPLING_INTERVALS = {
    "temperature": Interval(0, 100),
    "top_p": Interval(0, 1, low_is_open=True),
    "min_p": Interval(0, 1),
    "frequency_penalty": Interval(-2, 2),
    "presence_penalty": Interval(-2, 2),
    "repetition_penalty": Interval(0, 10, low_is_open=True),
}
LOGIT_BIAS_INTERVAL = Interval(-100, 100)
# Defaults if neither the request nor the model specifies a value: they leave the distribution
# unchanged.
SAMPLING_DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}

"""Outcomes and figures of a load, which `baton.load_run` sends.

    figures = summarize(outcomes, Slo(ttft_s=0.5, tpot_s=0.05))

TTFT is the time from sending to the first token. TPOT is (last - first) / (tokens - 1). ITL is the
gap between two messages of a stream. E2E is the time from sending to the last token.

A request that this process sent late, because it was busy, shows that in `lag_s`. If lags are not
small against the other figures, the load generator was measured.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from baton.values import Timings, Usage

SINGLE_TURNS = 8  # turns with figures of their own
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Outcome:
    """Result of one request as seen by its client; `error` is the reason, None on success."""

    ttft_s: float | None
    token_times_s: tuple[float, ...]  # arrival of each message, after sending
    num_tokens: int
    timings: Timings | None
    error: str | None
    arrived_s: float = 0.0  # planned time of sending, after the start
    lag_s: float = 0.0  # delay of sending
    usage: Usage = field(default_factory=lambda: Usage(0, 0))  # of a finished request
    turn: int = 0  # of its conversation, from 0

    @property
    def tpot_s(self) -> float | None:
        if self.num_tokens < 2 or self.ttft_s is None:
            return None
        return (self.token_times_s[-1] - self.ttft_s) / (self.num_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        return tuple(
            b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)
        )

    @property
    def e2e_s(self) -> float | None:
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def e2e_s_per_token(self) -> float | None:
        return self.e2e_s / self.num_tokens if self.e2e_s is not None and self.num_tokens else None

    @property
    def ended_s(self) -> float:
        """Return the end of the request, after the start."""
        return self.arrived_s + self.lag_s + (self.e2e_s or 0.0)


@dataclass(frozen=True)
class Slo:
    """Limits that a request must meet to count as good."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse limits such as "ttft=2s,tpot=50ms".

        Raises:
            ValueError: the text is malformed.
        """
        limits = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            unit = "ms" if value.endswith("ms") else "s"
            try:
                limits[name.strip()] = float(value.removesuffix(unit)) * _UNITS[unit]
            except ValueError:
                limits[""] = 0.0
        if limits.keys() != {"ttft", "tpot"} or not all(
            0 < limit < math.inf for limit in limits.values()
        ):
            raise ValueError(f"must be like ttft=2s,tpot=50ms, got {text!r}")
        return cls(limits["ttft"], limits["tpot"])

    def is_met(self, outcome: Outcome) -> bool:
        if outcome.error is not None or outcome.ttft_s is None:
            return False
        return outcome.ttft_s <= self.ttft_s and (outcome.tpot_s or 0.0) <= self.tpot_s


def goodput(outcomes: Sequence[Outcome], slo: Slo, duration_s: float) -> float:
    """Return the good requests per second."""
    return sum(slo.is_met(outcome) for outcome in outcomes) / duration_s


def percentiles(samples: Sequence[float], name: str) -> dict[str, float | None]:
    """Return {name}_p50, _p90, _p99 and _mean, linearly interpolated; None without samples."""
    if not samples:
        return {f"{name}_{part}": None for part in ("p50", "p90", "p99", "mean")}
    cuts = (
        statistics.quantiles(samples, n=100, method="inclusive")
        if len(samples) > 1
        else [samples[0]] * 99
    )
    return {
        f"{name}_p50": cuts[49],
        f"{name}_p90": cuts[89],
        f"{name}_p99": cuts[98],
        f"{name}_mean": statistics.fmean(samples),
    }


def errors_of(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return the number of failures by reason."""
    return dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None))


def summarize(outcomes: Sequence[Outcome], slo: Slo, duration_s: float) -> dict[str, float | None]:
    """Return the figures of one run."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    timings = [outcome.timings for outcome in done if outcome.timings is not None]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "duration_s": duration_s,
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": sum(outcome.num_tokens for outcome in done) / duration_s,
        **percentiles([o.ttft_s for o in done if o.ttft_s is not None], "ttft_s"),
        **percentiles([o.tpot_s for o in done if o.tpot_s is not None], "tpot_s"),
        **percentiles([gap for o in done for gap in o.itl_s], "itl_s"),
        **percentiles([o.e2e_s for o in done if o.e2e_s is not None], "e2e_s"),
        **percentiles(
            [o.e2e_s_per_token for o in done if o.e2e_s_per_token is not None], "e2e_s_per_token"
        ),
        **percentiles([t.prefill_s for t in timings if t.prefill_s is not None], "prefill_s"),
        **percentiles(
            [t.transfer_exposed_s for t in timings if t.transfer_exposed_s is not None],
            "handoff_exposed_s",
        ),
        "lag_s_p99": percentiles([o.lag_s for o in outcomes], "lag_s")["lag_s_p99"],
        "slo_ttft_s": slo.ttft_s,
        "slo_tpot_s": slo.tpot_s,
        "goodput_per_s": goodput(outcomes, slo, duration_s),
        "slo_attainment": sum(slo.is_met(outcome) for outcome in outcomes) / max(len(outcomes), 1),
    }


def prompt_counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return the prompts' tokens, the cached ones, and those that workers copied, by tier."""
    return {
        name: sum(getattr(outcome.usage, name) for outcome in outcomes)
        for name in (
            "prompt_tokens",
            "cached_tokens",
            "pulled_tokens",
            "host_tokens",
            "disk_tokens",
            "server_tokens",
        )
    }


def by_turn(outcomes: Sequence[Outcome]) -> list[dict[str, float | None]]:
    """Return the figures of the turns of conversations, in order.

    Each of the first turns has its own; later ones are in groups of 8, 16, 32 and so on.
    """
    figures = []
    num_turns = 1 + max((outcome.turn for outcome in outcomes), default=-1)
    first = 0
    while first < num_turns:
        end = min(first + (1 if first < SINGLE_TURNS else first), num_turns)
        done = [each for each in outcomes if first <= each.turn < end and each.error is None]
        figures.append(
            {
                "turn": first + 1,
                "last_turn": end,
                "requests": len(done),
                **prompt_counts(done),
                **percentiles([o.ttft_s for o in done if o.ttft_s is not None], "ttft_s"),
            }
        )
        first = end
    return figures

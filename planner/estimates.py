"""Estimates of what arrives at a fleet and of what its workers can do, from views of it. Pure.

Only differences of counters and levels are read, so routers and workers may come and go.
"""

import math
from dataclasses import dataclass, field

from planner.fleet_view import FleetView, WorkerView, new_tokens

FAST_S, SLOW_S = 2.0, 15.0  # half-lives of arrivals; the larger rate counts
MIX_REQUESTS = 20.0  # half-life of the lengths of prompts and responses, in requests
SPEED_S = 120.0  # half-life of speeds
# A worker that alternates chunks and steps, until it was measured: its share of the prompt tokens
# per second of one that only prefills, and the duration of its steps over those without chunks.
CHUNK_SHARE = 0.5
STEP_RATIO = 3.0
SETTLE_S = 5.0  # after a change of roles a worker's measured speeds are still those of before
DEVIATIONS = 4.0
MIN_ARRIVALS = 4  # fewer say nothing about a change of the load


@dataclass
class DecayedRatio:
    """A mean whose samples lose half of their weight in `half_life`, in seconds or requests."""

    half_life: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, total: float, weight: float, passed: float) -> None:
        """Add a sample, `passed` after the previous one."""
        kept = 0.5 ** (passed / self.half_life)
        self.total = self.total * kept + total
        self.weight = self.weight * kept + weight

    @property
    def mean(self) -> float:
        """Return the mean; 0 without samples."""
        return self.total / self.weight if self.weight > 0 else 0.0


@dataclass
class StepLine:
    """Duration of a decode step as a line over the requests in it, by damped least squares."""

    half_life_s: float = SPEED_S
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, num_requests: float, seconds: float, passed_s: float) -> None:
        """Add a measured step."""
        kept = 0.5 ** (passed_s / self.half_life_s)
        self._weight = self._weight * kept + 1
        self._x = self._x * kept + num_requests
        self._y = self._y * kept + seconds
        self._xx = self._xx * kept + num_requests * num_requests
        self._xy = self._xy * kept + num_requests * seconds

    def seconds(self, num_requests: float) -> float:
        """Return the estimated duration; 0 before the first measurement.

        The line neither falls nor rises faster than in proportion.
        """
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        # Damped, so that noise among nearly equal loads makes no slope.
        slope = (self._xy / self._weight - mean_x * mean_y) / (spread + mean_x * mean_x / 4 + 1)
        slope = min(max(slope, 0.0), mean_y / max(mean_x, 1.0))
        return mean_y + slope * (num_requests - mean_x)


@dataclass(frozen=True)
class ArrivalRates:
    """Load of a fleet: prompt tokens and generated tokens per second that arrive.

    `num_arrivals` is the number of requests that it was measured from.
    """

    prompt_rate: float
    output_rate: float
    num_arrivals: float

    def differs(self, other: "ArrivalRates") -> bool:
        """Return whether the loads differ by more than chance explains.

        The bound is `DEVIATIONS` standard deviations of a Poisson process with exponential lengths.
        """
        if max(self.num_arrivals, other.num_arrivals) < MIN_ARRIVALS:
            return False
        count = max(min(self.num_arrivals, other.num_arrivals), 1.0)
        factor = 1 + DEVIATIONS * math.sqrt(2 / count)
        return any(
            max(a, b) > factor * min(a, b)
            for a, b in (
                (self.prompt_rate, other.prompt_rate),
                (self.output_rate, other.output_rate),
            )
        )


@dataclass
class FleetEstimates:
    """What arrives, and speeds of one worker. Rates are per second; all are 0 until measured.

    steps            time between tokens on a worker without prompts, by its requests
    steps_beside     the same while it has prompts to compute
    pages_share      share of a worker's pages that one of its requests takes
    """

    steps: StepLine = field(default_factory=StepLine)
    steps_beside: StepLine = field(default_factory=StepLine)
    pages_share: DecayedRatio = field(default_factory=lambda: DecayedRatio(SPEED_S))
    _fast: DecayedRatio = field(default_factory=lambda: DecayedRatio(FAST_S))
    _slow: DecayedRatio = field(default_factory=lambda: DecayedRatio(SLOW_S))
    _fast_tokens: DecayedRatio = field(default_factory=lambda: DecayedRatio(FAST_S))
    _slow_tokens: DecayedRatio = field(default_factory=lambda: DecayedRatio(SLOW_S))
    _responses: DecayedRatio = field(default_factory=lambda: DecayedRatio(MIX_REQUESTS))
    _prompts: DecayedRatio = field(default_factory=lambda: DecayedRatio(MIX_REQUESTS))
    _alone: DecayedRatio = field(default_factory=lambda: DecayedRatio(SPEED_S))
    _beside: DecayedRatio = field(default_factory=lambda: DecayedRatio(SPEED_S))
    _since_s: dict[str, float] = field(default_factory=dict)  # of each worker's present roles
    _before: FleetView | None = None

    @property
    def demand(self) -> ArrivalRates:
        return ArrivalRates(
            max(self._fast_tokens.mean, self._slow_tokens.mean),
            max(self._fast.mean, self._slow.mean) * self._responses.mean,
            max(self._fast, self._slow, key=lambda each: each.mean).total,
        )

    @property
    def prompt_tokens(self) -> float:
        """Return the mean tokens of a prompt."""
        return self._prompts.mean

    @property
    def alone_rate(self) -> float:
        """Return the prompt tokens per second of a worker that only prefills."""
        return self._alone.mean or self._beside.mean / CHUNK_SHARE

    @property
    def beside_rate(self) -> float:
        """Return the prompt tokens per second of a worker that decodes all the time, too.

        While it decodes little, a higher rate is measured, which a larger load would not keep.
        """
        most = self.alone_rate * CHUNK_SHARE
        return min(self._beside.mean, most) or most

    def token_s(self, num_requests: float, beside: float) -> float:
        """Return the time between tokens of one of these requests; 0 until measured.

        `beside`: share of the time in which the worker has prompts to compute.
        """
        steps, slower = self.steps.seconds(num_requests), self.steps_beside.seconds(num_requests)
        steps = steps or slower / STEP_RATIO
        slower = max(slower or steps * STEP_RATIO, steps)
        return steps + beside * (slower - steps)

    def observe(self, view: FleetView) -> None:
        """Apply a view, which must be later than the previous one."""
        before = self._before
        self._before = view
        if before is None or view.at_s <= before.at_s:
            return
        passed_s = view.at_s - before.at_s
        computed, generated = new_tokens(before.workers, view.workers)
        arrived = max(computed + view.backlog_tokens - before.backlog_tokens, 0)
        num_requests = max(view.num_arrived - before.num_arrived, 0)
        num_ended = max(num_requests + before.num_present - view.num_present, 0)
        self._fast_tokens.add(arrived, passed_s, passed_s)
        self._slow_tokens.add(arrived, passed_s, passed_s)
        self._fast.add(num_requests, passed_s, passed_s)
        self._slow.add(num_requests, passed_s, passed_s)
        self._prompts.add(arrived, num_requests, num_requests)
        self._responses.add(generated, num_ended, num_ended)
        earlier = {worker.address: worker for worker in before.workers}
        for worker in view.workers:
            was = earlier.get(worker.address)
            if was is None or worker.active != was.active or not worker.is_serving:
                self._since_s[worker.address] = view.at_s
            elif view.at_s - self._since_s.setdefault(worker.address, -math.inf) >= SETTLE_S:
                self._measure(was, worker, passed_s)

    def _measure(self, was: WorkerView, now: WorkerView, passed_s: float) -> None:
        """Learn the speed of one worker, whose roles are the same in both views."""
        is_decoding = now.running > 0 and was.running > 0
        if now.queued_tokens and now.prompt_rate:
            rate = self._beside if is_decoding else self._alone
            # Of a short queue the rate is that of single prompts, which is lower.
            weight = passed_s * now.queued_tokens
            rate.add(now.prompt_rate * weight, weight, passed_s)
        if is_decoding and now.token_s:
            is_beside = now.queued_tokens > 0 and was.queued_tokens > 0
            if is_beside or not now.queued_tokens + was.queued_tokens:
                steps = self.steps_beside if is_beside else self.steps
                steps.add((now.running + was.running) / 2, now.token_s, passed_s)
            self.pages_share.add(now.pages_used, now.running + now.landing, passed_s)

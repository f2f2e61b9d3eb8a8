"""Open-loop load: requests arrive when they arrive, however slow the answers are.

    outcomes = await run_load(client, queries, plan)        # one Outcome per query, in order of arrival
    good = goodput(outcomes, Slo(ttft_s=0.5, tpot_s=0.05), duration_s)

TTFT is sent to first token; TPOT (last - first) / (tokens - 1); ITL the gap between two messages of a stream.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.client import AsyncBatonClient
from baton.values import Finish, ModelInfo, Query, Sampling, Stop, Timings
from runtime.errors import BatonError


@dataclass(frozen=True)
class LoadPlan:
    """Poisson arrivals at `rate` requests per second, repeatable by `seed`."""

    rate: float
    seed: int = 0
    timeout_s: float = 60.0

    def arrivals(self, count: int) -> list[float]:
        """Seconds after the start."""
        rng = random.Random(self.seed)
        at, times = 0.0, []
        for _ in range(count):
            at += rng.expovariate(self.rate)
            times.append(at)
        return times


@dataclass(frozen=True)
class Outcome:
    """One request as its client saw it. `error` is the error's reason, None when it finished."""

    ttft_s: float | None
    token_times_s: tuple[float, ...]  # of each message, after sending
    num_tokens: int
    timings: Timings | None
    error: str | None

    @property
    def tpot_s(self) -> float | None:
        if self.num_tokens < 2 or self.ttft_s is None:
            return None
        return (self.token_times_s[-1] - self.ttft_s) / (self.num_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False))


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as good."""

    ttft_s: float
    tpot_s: float

    def is_met(self, outcome: Outcome) -> bool:
        if outcome.error is not None or outcome.ttft_s is None:
            return False
        return outcome.ttft_s <= self.ttft_s and (outcome.tpot_s or 0.0) <= self.tpot_s


def goodput(outcomes: Sequence[Outcome], slo: Slo, duration_s: float) -> float:
    """Good requests per second."""
    return sum(slo.is_met(outcome) for outcome in outcomes) / duration_s


def percentiles(samples: Sequence[float], name: str) -> dict[str, float | None]:
    """{name}_p50, _p90, _p99 and _mean, linearly interpolated; None for no samples."""
    if not samples:
        return {f"{name}_{part}": None for part in ("p50", "p90", "p99", "mean")}
    cuts = statistics.quantiles(samples, n=100, method="inclusive") if len(samples) > 1 else [samples[0]] * 99
    return {f"{name}_p50": cuts[49], f"{name}_p90": cuts[89], f"{name}_p99": cuts[98],
            f"{name}_mean": statistics.fmean(samples)}


def summarise(outcomes: Sequence[Outcome], slo: Slo, duration_s: float) -> dict[str, float | None]:
    """The figures of one run."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    timings = [outcome.timings for outcome in done if outcome.timings is not None]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "duration_s": duration_s,
        "output_tokens_per_s": sum(outcome.num_tokens for outcome in done) / duration_s,
        **percentiles([o.ttft_s for o in done if o.ttft_s is not None], "ttft_s"),
        **percentiles([o.tpot_s for o in done if o.tpot_s is not None], "tpot_s"),
        **percentiles([gap for o in done for gap in o.itl_s], "itl_s"),
        **percentiles([t.prefill_s for t in timings if t.prefill_s is not None], "prefill_s"),
        **percentiles([t.transfer_exposed_s for t in timings if t.transfer_exposed_s is not None],
                      "handoff_exposed_s"),
        "slo_ttft_s": slo.ttft_s,
        "slo_tpot_s": slo.tpot_s,
        "goodput_per_s": goodput(outcomes, slo, duration_s),
        "slo_attainment": sum(slo.is_met(outcome) for outcome in outcomes) / len(outcomes),
    }


def random_queries(info: ModelInfo, *, count: int, prompt_tokens: int, output_tokens: int, seed: int) -> list[Query]:
    """Prompts of random ordinary tokens, half to one and a half times the asked length, for any model. Each generates
    exactly `output_tokens` tokens."""
    rng = random.Random(seed)
    ordinary = [token for token in range(info.vocab_size) if token not in info.eos_token_ids]
    low, high = max(prompt_tokens // 2, 1), prompt_tokens * 3 // 2
    return [Query(tuple(rng.choices(ordinary, k=rng.randint(low, high))), Sampling(seed=index),
                  Stop(max_tokens=output_tokens, ignore_eos=True), skip_text=True)
            for index in range(count)]


async def run_load(client: AsyncBatonClient, queries: Sequence[Query], plan: LoadPlan) -> list[Outcome]:
    """Send each query at its time and wait for all of them."""
    start = time.monotonic()

    async def at(arrival_s: float, query: Query) -> Outcome:
        await asyncio.sleep(max(start + arrival_s - time.monotonic(), 0.0))
        return await _measure(client, query, plan.timeout_s)

    return list(await asyncio.gather(*map(at, plan.arrivals(len(queries)), queries)))


async def _measure(client: AsyncBatonClient, query: Query, timeout_s: float) -> Outcome:
    sent = time.monotonic()
    times: list[float] = []
    num_tokens, timings, error = 0, None, None
    try:
        async for event in client.generate(query, timeout_s=timeout_s):
            if isinstance(event, Finish):
                timings = event.timings
            elif event.token_ids:
                times.append(time.monotonic() - sent)
                num_tokens += len(event.token_ids)
    except BatonError as failure:
        error = failure.reason
    return Outcome(times[0] if times else None, tuple(times), num_tokens, timings, error)

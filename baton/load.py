"""Open-loop load: arrivals do not depend on responses, except for later turns of conversations.

    planned = plan(100, Arrivals(rate=4), shape, seed=0)
    outcomes = await run_load(client, queries, [item.at_s for item in planned])     # in order of
    arrival
    figures = summarize(outcomes, Slo(ttft_s=0.5, tpot_s=0.05))

TTFT is the time from sending to the first token. TPOT is (last - first) / (tokens - 1). ITL is the
gap between two messages of a stream. E2E is the time from sending to the last token.

A request that this process sent late, because it was busy, shows that in `lag_s`. If lags are not
small against the other figures, the load generator was measured.
"""

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, cast

from baton.values import Event, Finish, ModelInfo, Query, Timings, Usage
from runtime.errors import BatonError

TIMEOUT_S = 60.0
_UNITS = {"ms": 1e-3, "s": 1.0}


class Endpoint(Protocol):
    """Target of a load: `AsyncBatonClient` or `AsyncVllmEngineClient`."""

    async def model_info(self) -> ModelInfo: ...

    def generate(
        self, query: Query, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]: ...


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
    prompt_tokens: int = 0  # of a finished request
    cached_tokens: int = 0  # prompt tokens reused from a cache
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
class LoadConversation:
    """Requests of one user, one after the other.

    The prompt of a later turn is the one before it, its response, and the next of `new_token_ids`.
    With later turns the prompt of `first` must be token ids.
    """

    first: Query
    new_token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def num_turns(self) -> int:
        return 1 + len(self.new_token_ids)

    def next_query(self, turn: int, before: Query, response: Sequence[int]) -> Query:
        """Return the query of a later turn, from the one before it and its response."""
        assert isinstance(before.prompt, tuple)
        prompt = (*before.prompt, *response, *self.new_token_ids[turn - 1])
        return replace(before, prompt=cast(tuple[int, ...], prompt))


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


@dataclass
class Progress:
    """Progress of a run."""

    num_total: int
    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    @property
    def num_open(self) -> int:
        return self.num_sent - self.num_done - self.num_failed


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


def by_turn(outcomes: Sequence[Outcome]) -> list[dict[str, float | None]]:
    """Return the figures of each turn of the conversations, in order."""
    figures = []
    for turn in range(1 + max((outcome.turn for outcome in outcomes), default=-1)):
        done = [each for each in outcomes if each.turn == turn and each.error is None]
        figures.append(
            {
                "turn": turn + 1,
                "requests": len(done),
                "prompt_tokens": sum(outcome.prompt_tokens for outcome in done),
                "cached_tokens": sum(outcome.cached_tokens for outcome in done),
                **percentiles([o.ttft_s for o in done if o.ttft_s is not None], "ttft_s"),
            }
        )
    return figures


async def run_load(
    client: Endpoint,
    queries: Sequence[Query],
    arrivals_s: Sequence[float],
    *,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> list[Outcome]:
    """Send each query at its time and wait for all of them."""
    return await run_conversations(
        client,
        [LoadConversation(query) for query in queries],
        arrivals_s,
        timeout_s=timeout_s,
        on_progress=on_progress,
    )


async def run_conversations(
    client: Endpoint,
    conversations: Sequence[LoadConversation],
    arrivals_s: Sequence[float],
    *,
    pause_s: float = 0.0,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> list[Outcome]:
    """Begin each conversation at its time, and wait for all of them.

    A later turn is sent `pause_s` after the response before it. A conversation ends with a failed
    turn. Return the outcomes of all turns that were sent, by conversation.
    """
    start = time.monotonic()
    progress = Progress(sum(conversation.num_turns for conversation in conversations))

    async def hold(arrival_s: float, conversation: LoadConversation) -> list[Outcome]:
        outcomes: list[Outcome] = []
        query = conversation.first
        for turn in range(conversation.num_turns):
            await asyncio.sleep(max(start + arrival_s - time.monotonic(), 0.0))
            progress.num_sent += 1
            response: list[int] = []
            outcome = replace(
                await _measure(client, query, timeout_s, arrival_s, start, response), turn=turn
            )
            outcomes.append(outcome)
            progress.num_done += outcome.error is None
            progress.num_failed += outcome.error is not None
            progress.num_tokens += outcome.num_tokens
            if outcome.error is not None:
                progress.num_total -= conversation.num_turns - turn - 1
                on_progress(progress)
                break
            on_progress(progress)
            if turn + 1 < conversation.num_turns:
                query = conversation.next_query(turn + 1, query, response)
                arrival_s = time.monotonic() - start + pause_s
        return outcomes

    every = await asyncio.gather(*map(hold, arrivals_s, conversations))
    return [outcome for outcomes in every for outcome in outcomes]


async def _measure(
    client: Endpoint,
    query: Query,
    timeout_s: float,
    arrival_s: float,
    start: float,
    response: list[int],
) -> Outcome:
    """Send a query; append the tokens of its response to `response`."""
    sent = time.monotonic()
    times: list[float] = []
    timings = None
    error = None
    usage = Usage(0, 0)
    try:
        async for event in client.generate(query, timeout_s=timeout_s):
            if isinstance(event, Finish):
                timings = event.timings
                usage = event.usage
            elif event.token_ids:
                times.append(time.monotonic() - sent)
                response += event.token_ids
    except BatonError as failure:
        error = failure.reason
    return Outcome(
        times[0] if times else None,
        tuple(times),
        len(response),
        timings,
        error,
        arrival_s,
        max(0.0, sent - start - arrival_s),
        usage.prompt_tokens,
        usage.cached_tokens,
    )

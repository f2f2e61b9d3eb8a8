"""`baton load`: requests, target and report."""

import json
import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton import load_plot
from baton.client import AsyncBatonClient
from baton.load import Outcome, Slo, by_turn, errors_of, prompt_counts, summarize
from baton.load_run import (
    Endpoint,
    LoadConversation,
    LoadRequest,
    named_sessions,
    run_load,
    run_requests,
)
from baton.load_run import Progress as RunProgress
from baton.replays import begun, impatient, shrunk
from baton.retry import DEFAULT_RETRY, NO_RETRY
from baton.traces import Trace, read_trace
from baton.transcripts import recorded_requests
from baton.values import ModelInfo
from baton.vllm_client import AsyncVllmEngineClient
from baton.workload import (
    Arrivals,
    Planned,
    Shape,
    TooLong,
    TurnShape,
    changes,
    fitted,
    make_queries,
    ordinary_tokens,
    plan,
)
from runtime.errors import ConfigError
from runtime.security.access import ChannelSecurity

DEFAULT_COUNT = 60  # of sampled requests
WARM_UP_RATE = 10.0
_ROWS = {
    "time to first token": "ttft_s",
    "time per output token": "tpot_s",
    "gap between messages": "itl_s",
    "whole request": "e2e_s",
    "whole request, per output token": "e2e_s_per_token",
    "prefill": "prefill_s",
    "KV transfer not overlapped": "handoff_exposed_s",
}


class Api(StrEnum):
    """API of the endpoint."""

    BATON = "baton"
    VLLM = "vllm"


@dataclass(frozen=True)
class LoadSpec:
    """Specification of one run.

    A trace replaces `arrivals` and `shape`; `count` then limits its requests, None for all.
    """

    api: Api
    count: int | None
    arrivals: Arrivals
    shape: Shape
    slo: Slo
    trace: Path | None = None
    sessions: bool = False
    speed: float = 1.0
    warm_up: int = 0
    seed: int = 0
    timeout_s: float = 60.0
    picture: Path | None = None
    too_long: TooLong = TooLong.REFUSE
    turns: TurnShape | None = None  # of each request, which begins a conversation; None: of none
    users: int | None = None  # conversations at a time; None for any number
    max_pause_s: float | None = None  # limit on the pauses of a trace
    shrink: int = 1  # divisor of a trace's lengths

    def load(self) -> Trace:
        """Return the requests to send.

        Raises:
            ConfigError: the trace is unusable, or is given with turns.
        """
        if self.trace is None:
            planned = plan(self.count or DEFAULT_COUNT, self.arrivals, self.shape, seed=self.seed)
            return Trace(tuple(planned))
        if self.turns is not None:
            raise ConfigError("turns is for sampled requests, not for a trace", field="turns")
        trace = read_trace(self.trace, speed=self.speed, limit=self.count)
        planned = shrunk(trace.planned, self.shrink)
        if self.max_pause_s is not None:
            planned = impatient(planned, self.max_pause_s)
        if not trace.is_timed and self.users is None:
            planned = begun(planned, self.arrivals, seed=self.seed)
        return replace(trace, planned=tuple(planned))


def connect(
    api: Api, targets: Sequence[str], security: ChannelSecurity
) -> AsyncBatonClient | AsyncVllmEngineClient:
    """Return a client for the targets.

    With one router, each rejection is counted. With several, rejected requests go to the next
    router, as for a user.

    Raises:
        ConfigError: the stubs of the other API are not installed, or several targets are given for
            it.
    """
    if api is Api.VLLM:
        if len(targets) > 1:
            raise ConfigError(f"--api vllm takes one --target, got {len(targets)}", field="target")
        return AsyncVllmEngineClient(targets[0], security=security)
    return AsyncBatonClient(
        *targets, security=security, retry=NO_RETRY if len(targets) == 1 else DEFAULT_RETRY
    )


async def measure(
    client: Endpoint, spec: LoadSpec, console: Console
) -> tuple[dict[str, object], list[Outcome]]:
    """Warm up, send everything, and return the figures of the requests after the warm-up."""
    trace = spec.load()
    info = await client.model_info()
    fitting = fitted(trace.planned, info.max_context_tokens, spec.too_long)
    planned = fitting.planned
    requests = _requests(info, planned, spec)
    if spec.sessions:
        requests = named_sessions(requests, secrets.token_hex(8))
    if spec.warm_up:
        console.print(f"warming up with {spec.warm_up} requests", style="dim")
        await _warm_up(client, info, spec, planned)
    with _bar(console, len(requests)) as show:
        started = time.monotonic()
        outcomes = await run_requests(
            client, requests, users=spec.users, timeout_s=spec.timeout_s, on_progress=show
        )
        duration_s = time.monotonic() - started
    if spec.picture is not None:
        load_plot.plot(outcomes, spec.slo, spec.picture)
    return {
        **summarize(outcomes, spec.slo, duration_s),
        "errors": errors_of(outcomes),
        "seed": spec.seed,
        **prompt_counts(outcomes),
        "requests_cut": fitting.num_cut,
        "requests_skipped": fitting.num_skipped,
        "requests_unanswered_in_trace": trace.num_unanswered,
        "max_context_tokens": info.max_context_tokens,
        "by_turn": by_turn(outcomes),
    }, outcomes


def _requests(info: ModelInfo, planned: Sequence[Planned], spec: LoadSpec) -> list[LoadRequest]:
    """Return the requests of a load.

    Raises:
        ConfigError: a sampled conversation is longer than the context.
    """
    if spec.turns is None:
        return recorded_requests(info, planned, seed=spec.seed)
    ordinary = ordinary_tokens(info)
    rng = random.Random(f"new tokens {spec.seed}")
    drawn = spec.turns.draw(planned, info.max_context_tokens, seed=spec.seed)
    queries = make_queries(info, planned, seed=spec.seed)
    requests = list[LoadRequest]()
    for item, query, counts in zip(planned, queries, drawn, strict=True):
        new = [rng.choices(ordinary, k=count) for count in counts]
        requests += LoadConversation(query, new).requests(
            len(requests), item.at_s, pause_s=spec.turns.pause_s
        )
    return requests


async def _warm_up(
    client: Endpoint, info: ModelInfo, spec: LoadSpec, planned: Sequence[Planned]
) -> None:
    """Send prompts with the lengths of the first ones, but other tokens.

    The measured prompts must not be in a cache because of the warm-up.
    """
    lengths = [replace(planned[index % len(planned)], blocks=()) for index in range(spec.warm_up)]
    queries = make_queries(
        info, lengths, seed=random.Random(f"warm-up {spec.seed}").getrandbits(64)
    )
    await run_load(
        client,
        queries,
        [index / WARM_UP_RATE for index in range(spec.warm_up)],
        timeout_s=spec.timeout_s,
    )


class _Bar:
    def __init__(self, progress: Progress, num_total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("sending", total=num_total, note="")

    def __call__(self, run: RunProgress) -> None:
        note = f"{run.num_open} open, {run.num_failed} failed, {run.num_tokens} tokens"
        self._progress.update(
            self._task,
            total=run.num_total,
            completed=run.num_done + run.num_failed,
            note=note,
        )


@contextmanager
def _bar(console: Console, num_total: int) -> Iterator[_Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, num_total)


def report(figures: dict[str, object]) -> Sequence[Table | str]:
    """Return the figures as tables and lines of text."""
    table = Table(title="milliseconds", title_justify="left", pad_edge=False)
    table.add_column("")
    for heading in ("p50", "p90", "p99", "mean"):
        table.add_column(heading, justify="right")
    for text, name in _ROWS.items():
        values = [figures[f"{name}_{part}"] for part in ("p50", "p90", "p99", "mean")]
        table.add_row(
            text,
            *("-" if not isinstance(value, float) else f"{value * 1e3:.1f}" for value in values),
        )
    lines = [
        f"{figures['requests']} requests in {figures['duration_s']:.1f} s, {figures['failed']} failed: "
        f"{figures['requests_per_s']:.2f} a second, {figures['output_tokens_per_s']:.1f} tokens a second",
        _goodput(figures),
        *_notes(figures),
    ]
    return (table, *_turns(figures), *lines)


def _turns(figures: dict[str, object]) -> Iterator[Table]:
    """Yield the table of the turns, if there are several."""
    turns = cast(Sequence[Mapping[str, float | None]], figures["by_turn"])
    if len(turns) < 2:
        return
    table = Table(title="by turn", title_justify="left", pad_edge=False)
    tiers = ("cached", "pulled", "host", "disk", "server")
    for heading in ("turn", "requests", "prompt tokens", *tiers, "TTFT p50, ms", "p90"):
        table.add_column(heading, justify="right")
    for turn in turns:
        prompts = turn["prompt_tokens"] or 0
        ttfts = (turn["ttft_s_p50"], turn["ttft_s_p90"])
        first, last = turn["turn"], turn["last_turn"]
        table.add_row(
            str(first) if first == last else f"{first}-{last}",
            *(str(turn[name]) for name in ("requests", "prompt_tokens")),
            *(f"{(turn[f'{tier}_tokens'] or 0) / max(prompts, 1):.1%}" for tier in tiers),
            *("-" if value is None else f"{value * 1e3:.1f}" for value in ttfts),
        )
    yield table


def _notes(figures: Mapping[str, object]) -> Iterator[str]:
    """Yield notes that explain the figures."""
    names = (
        "cached_tokens",
        "prompt_tokens",
        "pulled_tokens",
        "host_tokens",
        "disk_tokens",
        "server_tokens",
        "requests_cut",
        "requests_skipped",
        "requests_unanswered_in_trace",
        "max_context_tokens",
    )
    cached, prompts, pulled, host, disk, server, cut, skipped, unanswered, context = (
        int(str(figures[name])) for name in names
    )
    yield (
        f"prefix caches served {cached} of {prompts} prompt tokens ({cached / max(prompts, 1):.1%}), "
        f"{pulled} of them pulled from other workers, {host} copied from host memory, {disk} read from disk, "
        f"{server} read from a cache server"
    )
    yield from changes(cut=cut, skipped=skipped, unanswered=unanswered, max_context_tokens=context)
    if figures["errors"]:
        yield f"errors: {json.dumps(figures['errors'])}"
    yield (
        f"seed {figures['seed']}; a second run with it (--seed) may find its prompts in the caches"
    )


def _goodput(figures: dict[str, object]) -> str:
    share, ttft_s, tpot_s = (
        float(str(figures[name])) for name in ("slo_attainment", "slo_ttft_s", "slo_tpot_s")
    )
    return (
        f"goodput {figures['goodput_per_s']:.2f} a second: {100 * share:.3g} % met TTFT <= {ttft_s * 1e3:g} ms and "
        f"TPOT <= {tpot_s * 1e3:g} ms"
    )

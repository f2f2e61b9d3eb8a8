"""`python -m bench.cache`: gain and cost of the prefix cache, on a whole local cluster.

A prefill worker and a decode worker have a core each, with random bf16 weights of Qwen3-0.6B's
shape. Turns alternate. A ratio is the median over pairs of neighboring turns, so that a drift of
the machine's speed slows both sides. `_least` is the ratio of both sides' minimum, which other work
disturbs least. `cpu` is a ratio of CPU time, which excludes waits for a core.

    ttft_ratio        first token of a prompt cached to 90 % / of an uncached one, one by one
    miss_ttft_ratio   first token of uncached prompts / with the cache declined, one by one
    miss_rate_ratio   the same two: responses per second, four at a time
    miss_cpu_ratio    the same two: CPU time of all processes per response
    itl_p99_ratio     gap between messages of streams while warm turns arrive / while none do

Bars: at most 0.15, 1.02, at least 0.98, at most 1.02, 1.1. `--parts` selects from: reuse, misses,
others. `foreign_cores` is the number of cores that other processes used; above 0.2 the figures are
noise.

Only whole pages are reused. With the default of 30 pages of 64 tokens a warm prompt finds 27, nine
tenths. Streams have prompts as long as those of warm turns, and none ends while gaps are measured.
Each further row makes steps longer by the cost of its context. That cost is shown separately, as
`itl_p50_prefill_ratio` (while a warm prompt is prefilled) and `itl_p50_row_ratio` (while its
response is generated).

With `--local-rest-tokens`, and a `--reused-share` that leaves at most that number, the decode
worker prefills the rest of warm turns itself; `local_rests` counts them.
"""

import argparse
import asyncio
import contextlib
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig
from baton.values import Chunk, Query, Sampling, Stop
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.engine_sides import VOCAB_SIZE
from bench.peer_files import write_checkpoint
from bench.pool_metrics import decode_ports
from bench.report import OtherLoad, Value, process_cpu_s

MAX_CONTEXT = 4096
ANSWER_TOKENS = 8
AT_ONCE = 4
SETTLE_S = 0.5  # until workers have released what was cancelled
TIMEOUT_S = 600.0
BARS = {
    "ttft_ratio": (0.0, 0.15),
    "miss_ttft_ratio": (0.0, 1.02),
    "miss_cpu_ratio": (0.0, 1.02),
    "miss_rate_ratio": (0.98, math.inf),
    "itl_p99_ratio": (0.0, 1.1),
}


@dataclass(frozen=True)
class Bench:
    """Inputs that every part shares; CPU time is that of `cluster`'s processes."""

    cluster: LocalCluster
    client: AsyncBatonClient
    prompts: "RandomPrompts"
    flags: argparse.Namespace

    def cpu_s(self, role: str = "") -> float:
        """Return the CPU time so far of the processes of a role, or of all."""
        found = [
            process.pid for name, process in self.cluster.processes.items() if name.startswith(role)
        ]
        return sum(process_cpu_s(pid) for pid in found if pid is not None)


@dataclass(frozen=True)
class Told:
    """Response: arrival times of its messages after sending, and cached tokens of its prompt."""

    times_s: tuple[float, ...]
    cached_tokens: int


async def ask(client: AsyncBatonClient, query: Query) -> Told:
    sent_s = time.monotonic()
    times = []
    cached_tokens = 0
    async with contextlib.aclosing(client.generate(query, timeout_s=TIMEOUT_S)) as events:
        async for event in events:
            if isinstance(event, Chunk):
                times.append(time.monotonic() - sent_s)
            cached_tokens = event.usage.cached_tokens
    return Told(tuple(times), cached_tokens)


class RandomPrompts:
    """Source of random prompts; the same seed gives the same ones.

    Warm prompts share `reused_share` with an earlier one.
    """

    def __init__(self, num_tokens: int, reused_share: float) -> None:
        self._num_tokens, self._num_reused = num_tokens, round(reused_share * num_tokens)
        self._draw = random.Random(0)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(1000, VOCAB_SIZE) for _ in range(count))

    def cold(self) -> Query:
        return query_of(self.tokens(self._num_tokens))

    def warm(self, before: Query) -> Query:
        """Return a query whose prompt shares its beginning with that of `before`, which ran
        earlier."""
        assert isinstance(before.prompt, tuple)
        return query_of(
            (*before.prompt[: self._num_reused], *self.tokens(self._num_tokens - self._num_reused))
        )


def query_of(prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Query:
    return Query(
        tuple(prompt),
        Sampling(temperature=0),
        Stop(max_tokens=max_tokens, ignore_eos=True),
        skip_text=True,
    )


@dataclass
class Sides:
    """Figures of both sides of a ratio, turn by turn."""

    side: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)

    def add(self, side: float, base: float) -> None:
        self.side.append(side)
        self.base.append(base)

    @property
    def ratio(self) -> float:
        return median(side / base for side, base in zip(self.side, self.base, strict=True))

    @property
    def least_ratio(self) -> float:
        return min(self.side) / min(self.base)


async def reuse(bench: Bench) -> dict[str, Value]:
    ttfts = Sides()
    cpus = Sides()
    shares = []
    for _ in range(bench.flags.turns):
        query = bench.prompts.cold()
        cold_s, cold_cpu_s, _ = await _timed(bench, query)
        warm_s, warm_cpu_s, num_cached = await _timed(bench, bench.prompts.warm(query))
        ttfts.add(warm_s, cold_s)
        cpus.add(warm_cpu_s, cold_cpu_s)
        shares.append(num_cached / len(query.prompt))
    return {
        "ttft_cold_s": median(ttfts.base),
        "ttft_warm_s": median(ttfts.side),
        "reused_share": fmean(shares),
        "ttft_ratio": ttfts.ratio,
        "ttft_ratio_least": ttfts.least_ratio,
        "prefill_cpu_ratio": cpus.ratio,
    }


async def _timed(bench: Bench, query: Query) -> tuple[float, float, int]:
    """Return the time to the first token, prefill's CPU time, and cached prompt tokens."""
    began_s = bench.cpu_s("prefill")
    told = await ask(bench.client, query)
    return told.times_s[0], bench.cpu_s("prefill") - began_s, told.cached_tokens


async def misses(bench: Bench) -> dict[str, Value]:
    """Decline the cache in every other turn; the cache is full of earlier turns."""
    ttfts = Sides()
    gaps = Sides()
    cpus = Sides()
    for turn in range(bench.flags.miss_turns):
        order = (True, False) if turn % 2 else (False, True)
        taken = {
            uses_cache: await _missed_turn(bench, uses_cache=uses_cache) for uses_cache in order
        }
        for sides, used, declined in zip(
            (ttfts, gaps, cpus), taken[True], taken[False], strict=True
        ):
            sides.add(used, declined)
    return {
        "miss_ttft_s": median(ttfts.side),
        "declined_ttft_s": median(ttfts.base),
        "miss_ttft_ratio": ttfts.ratio,
        "miss_ttft_ratio_least": ttfts.least_ratio,
        "miss_rate_ratio": 1 / gaps.ratio,
        "miss_rate_ratio_least": 1 / gaps.least_ratio,
        "miss_cpu_s": median(cpus.side),
        "miss_cpu_ratio": cpus.ratio,
        "miss_cpu_ratio_least": cpus.least_ratio,
    }


async def _missed_turn(bench: Bench, *, uses_cache: bool) -> tuple[float, float, float]:
    """Return the time to the first token of one prompt, and seconds and CPU time per response of
    several."""
    began_cpu_s = bench.cpu_s()
    first, *rest = [
        replace(query_of(bench.prompts.tokens(bench.flags.miss_tokens)), prefix_cache=uses_cache)
        for _ in range(1 + AT_ONCE)
    ]
    ttft_s = (await ask(bench.client, first)).times_s[0]
    began_s = time.monotonic()
    await asyncio.gather(*(ask(bench.client, query) for query in rest))
    lasted_s = time.monotonic() - began_s
    return ttft_s, lasted_s / AT_ONCE, (bench.cpu_s() - began_cpu_s) / (1 + AT_ONCE)


@dataclass(frozen=True)
class TimeSpan:
    """Interval of time."""

    began_s: float
    ended_s: float

    def gaps(self, streams: Iterable[Sequence[float]]) -> list[float]:
        """Return the gaps inside the interval between messages of the same stream."""
        return [
            late - early
            for times in streams
            for early, late in pairwise(times)
            if self.began_s <= early and late <= self.ended_s
        ]


async def others(bench: Bench) -> dict[str, Value]:
    """Measure running streams while warm turns arrive in every other window."""
    flags = bench.flags
    before = bench.prompts.cold()
    await ask(bench.client, before)
    streams: list[list[float]] = [[] for _ in range(flags.streams)]
    reading = [asyncio.create_task(_read(bench, bench.prompts.cold(), times)) for times in streams]
    while not all(streams):  # noqa: ASYNC110 - once per run
        await asyncio.sleep(SETTLE_S)
    p99s = Sides()
    medians = Sides()
    computing = []
    drawing = []
    for turn in range(flags.turns):
        gaps: dict[bool, list[float]] = {}
        for is_warm in (True, False) if turn % 2 else (False, True):
            span, spans = await _window(bench, before, is_warm=is_warm)
            gaps[is_warm] = span.gaps(streams)
            computing += [gap for prefill, _ in spans for gap in prefill.gaps(streams)]
            drawing += [gap for _, row in spans for gap in row.gaps(streams)]
        p99s.add(_quantile(gaps[True], 99), _quantile(gaps[False], 99))
        medians.add(median(gaps[True]), median(gaps[False]))
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    alone_s = median(medians.base)
    return {
        "itl_p50_alone_s": alone_s,
        "itl_p99_alone_s": median(p99s.base),
        "itl_p99_warm_s": median(p99s.side),
        "itl_p99_ratio": p99s.ratio,
        "itl_p99_ratio_least": p99s.least_ratio,
        "itl_p50_ratio": medians.ratio,
        "itl_p50_prefill_ratio": median(computing) / alone_s,
        "itl_p50_row_ratio": median(drawing) / alone_s,
    }


async def _window(
    bench: Bench, before: Query, *, is_warm: bool
) -> tuple[TimeSpan, list[tuple[TimeSpan, TimeSpan]]]:
    """Return the window, and the intervals of prefill and decode of each warm turn in it."""
    spans: list[tuple[TimeSpan, TimeSpan]] = []
    asking = asyncio.create_task(_keep_asking(bench, before, spans)) if is_warm else None
    began_s = time.monotonic()
    await asyncio.sleep(bench.flags.window)
    span = TimeSpan(began_s, time.monotonic())
    if asking is not None:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(SETTLE_S)
    return span, spans


async def _read(bench: Bench, query: Query, times: list[float]) -> None:
    """Read a response as long as the context allows; record when its messages arrive."""
    most = MAX_CONTEXT - len(query.prompt)
    endless = replace(query, stop=Stop(max_tokens=most, ignore_eos=True))
    async with contextlib.aclosing(bench.client.generate(endless, timeout_s=TIMEOUT_S)) as events:
        async for _ in events:
            times.append(time.monotonic())


async def _keep_asking(bench: Bench, before: Query, spans: list[tuple[TimeSpan, TimeSpan]]) -> None:
    while True:
        await asyncio.sleep(bench.flags.interval)
        sent_s = time.monotonic()
        told = await ask(bench.client, bench.prompts.warm(before))
        first_s = sent_s + told.times_s[0]
        last_s = sent_s + told.times_s[-1]
        spans.append((TimeSpan(sent_s, first_s), TimeSpan(first_s, last_s)))


def _quantile(samples: Sequence[float], percent: int) -> float:
    return quantiles(samples, n=100, method="inclusive")[percent - 1]


PARTS = {"reuse": reuse, "misses": misses, "others": others}


def missed(
    values: Mapping[str, Value], bars: Mapping[str, tuple[float, float]] = BARS
) -> list[str]:
    return [
        f"{name} is {ratio:.3g}, the bar is from {least:g} to {most:g}"
        for name, (least, most) in bars.items()
        if isinstance(ratio := values.get(name), float) and not least <= ratio <= most
    ]


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    prompts = RandomPrompts(flags.prompt_tokens, flags.reused_share)
    config = ClusterConfig(
        model=write_checkpoint(flags.folder / "checkpoint"),
        memory_mb=flags.memory_mb,
        max_context=MAX_CONTEXT,
        listen="127.0.0.1:0",
        log_level="warning",
        worker_flags=(
            "--local-rest-tokens",
            str(flags.local_rest_tokens),
            "--page-size",
            str(flags.page_size),
        ),
    )
    async with running_cluster(config) as (cluster, client):
        for _ in range(2):
            await ask(client, prompts.cold())  # warm-up
        others_load = OtherLoad()
        values: dict[str, Value] = {"prompt_tokens": flags.prompt_tokens, "turns": flags.turns}
        for part in flags.parts.split(","):
            values.update(await PARTS[part](Bench(cluster, client, prompts, flags)))
        figures = await (await decode_ports(cluster)).leader()
        values["local_rests"] = int(figures.value("baton_local_prefill_total", reason="short_rest"))
        return {**values, **others_load.figures()}


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "baton-bench-peers",
        help="directory for the weights, 1.2 GB; default %(default)s",
    )
    for name, default in (
        ("prompt-tokens", 1920),
        ("turns", 6),
        ("miss-tokens", 256),
        ("miss-turns", 10),
        ("streams", 8),
        ("memory-mb", 3072),
        ("page-size", 64),
        ("local-rest-tokens", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    for name, seconds, text in (
        ("interval", 0.5, "between two warm turns"),
        ("window", 8.0, "of each window, with or without warm turns"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=seconds, help=f"seconds {text}; default {seconds:g}"
        )
    parser.add_argument(
        "--reused-share",
        type=float,
        default=0.9,
        help="cached share of the prompts of warm turns; default 0.9",
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="parts to run; default %(default)s"
    )
    return run_benchmark("cache", parser, measure, missed)


if __name__ == "__main__":
    sys.exit(main())

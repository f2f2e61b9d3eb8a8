"""`python -m bench.cache`: what the prefix cache gives and what it costs, on a whole local cluster.

A prefill worker and a decode worker on a core each, with random bf16 weights of Qwen3-0.6B's shape. Turns alternate, so
that a machine that drifts slows both sides of a ratio.

    ttft_ratio        first token of a prompt of which 90 % is there / of one of which nothing is, one at a time
    miss_ttft_ratio   first token of prompts of which nothing is there / of such that decline the cache, one at a time
    miss_rate_ratio   the same two: prompts answered per second, four at a time
    itl_p99_ratio     gap between the messages of streams while warm turns arrive / while none do

Bars: at most 0.15, from 0.98 to 1.02 (rates and first tokens), at most 1.1. `--parts` takes some of: reuse, misses,
others. `foreign_cores` says how many cores other processes took: above 0.2 the figures are noise.

With `--local-rest-tokens`, and a `--reused-share` that leaves no more than these, the decode worker reads the rest of
warm turns itself; `local_rests` says how many.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig
from baton.load import percentiles
from baton.values import Chunk, Query, Sampling, Stop
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.engine_sides import VOCAB_SIZE
from bench.peer_files import write_checkpoint
from bench.pool_metrics import decode_ports
from bench.report import OtherLoad, Value

MAX_CONTEXT = 4096
ANSWER_TOKENS = 8
STREAM_PROMPT, STREAM_TOKENS = 64, 160
AT_ONCE = 4
TIMEOUT_S = 600.0
BARS = {"ttft_ratio": (0.0, 0.15), "miss_ttft_ratio": (0.98, 1.02), "miss_rate_ratio": (0.98, 1.02),
        "itl_p99_ratio": (0.0, 1.1)}


@dataclass(frozen=True)
class Told:
    """One answer: when its messages came, after it was asked for, and how much of its prompt was there."""

    times_s: tuple[float, ...]
    cached_tokens: int


async def ask(client: AsyncBatonClient, query: Query) -> Told:
    sent_s, times, cached_tokens = time.monotonic(), [], 0
    async with contextlib.aclosing(client.generate(query, timeout_s=TIMEOUT_S)) as events:
        async for event in events:
            if isinstance(event, Chunk):
                times.append(time.monotonic() - sent_s)
            cached_tokens = event.usage.cached_tokens
    return Told(tuple(times), cached_tokens)


class RandomPrompts:
    """Of random tokens; the same seed gives the same ones. Warm ones share `reused_share` with one before."""

    def __init__(self, num_tokens: int, reused_share: float) -> None:
        self._num_tokens, self._num_reused = num_tokens, round(reused_share * num_tokens)
        self._draw = random.Random(0)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(1000, VOCAB_SIZE) for _ in range(count))

    def cold(self) -> Query:
        return query_of(self.tokens(self._num_tokens))

    def warm(self, before: Query) -> Query:
        """Of whose prompt the shared part is there, once `before` was answered."""
        assert isinstance(before.prompt, tuple)
        return query_of((*before.prompt[:self._num_reused], *self.tokens(self._num_tokens - self._num_reused)))


def query_of(prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Query:
    return Query(tuple(prompt), Sampling(temperature=0), Stop(max_tokens=max_tokens, ignore_eos=True), skip_text=True)


async def reuse(client: AsyncBatonClient, prompts: RandomPrompts, flags: argparse.Namespace) -> dict[str, Value]:
    cold, warm, shares = [], [], []
    for _ in range(flags.turns):
        query = prompts.cold()
        cold.append((await ask(client, query)).times_s[0])
        told = await ask(client, prompts.warm(query))
        warm.append(told.times_s[0])
        shares.append(told.cached_tokens / len(query.prompt))
    return {"ttft_cold_s": median(cold), "ttft_warm_s": median(warm), "reused_share": fmean(shares),
            "ttft_ratio": median(after / before for after, before in zip(warm, cold, strict=True))}


async def misses(client: AsyncBatonClient, prompts: RandomPrompts, flags: argparse.Namespace) -> dict[str, Value]:
    """Every other turn declines the cache. The cache is full of what earlier turns left."""
    ttfts: dict[bool, list[float]] = {True: [], False: []}
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(flags.turns):
        for uses_cache in (True, False) if turn % 2 else (False, True):
            first, *rest = [replace(prompts.cold(), prefix_cache=uses_cache) for _ in range(1 + AT_ONCE)]
            ttfts[uses_cache].append((await ask(client, first)).times_s[0])
            began_s = time.monotonic()
            await asyncio.gather(*(ask(client, query) for query in rest))
            rates[uses_cache].append(AT_ONCE / (time.monotonic() - began_s))
    return {"miss_ttft_s": median(ttfts[True]), "declined_ttft_s": median(ttfts[False]),
            "miss_ttft_ratio": median(ttfts[True]) / median(ttfts[False]),
            "miss_rate_ratio": median(rates[True]) / median(rates[False])}


async def others(client: AsyncBatonClient, prompts: RandomPrompts, flags: argparse.Namespace) -> dict[str, Value]:
    """Streams alone and beside warm turns, in turns."""
    before = prompts.cold()
    await ask(client, before)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * flags.turns):
        streams = [asyncio.create_task(ask(client, query_of(prompts.tokens(STREAM_PROMPT), STREAM_TOKENS)))
                   for _ in range(flags.streams)]
        beside = asyncio.create_task(_keep_asking(client, prompts, before, flags.interval)) if turn % 2 else None
        gaps[beside is not None] += [late - early for told in await asyncio.gather(*streams)
                                     for early, late in pairwise(told.times_s)]
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
    alone, warm = (percentiles(gaps[is_beside], "itl") for is_beside in (False, True))
    assert alone["itl_p99"] is not None
    assert warm["itl_p99"] is not None
    return {"itl_p50_alone_s": alone["itl_p50"], "itl_p50_warm_s": warm["itl_p50"], "itl_p99_alone_s": alone["itl_p99"],
            "itl_p99_warm_s": warm["itl_p99"], "itl_p99_ratio": warm["itl_p99"] / alone["itl_p99"]}


async def _keep_asking(client: AsyncBatonClient, prompts: RandomPrompts, before: Query, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await ask(client, prompts.warm(before))


PARTS = {"reuse": reuse, "misses": misses, "others": others}


def missed(values: Mapping[str, Value]) -> list[str]:
    return [f"{name} is {ratio:.3g}, the bar is from {least:g} to {most:g}" for name, (least, most) in BARS.items()
            if isinstance(ratio := values.get(name), float) and not least <= ratio <= most]


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    prompts = RandomPrompts(flags.prompt_tokens, flags.reused_share)
    config = ClusterConfig(model=write_checkpoint(flags.folder / "checkpoint"), memory_mb=flags.memory_mb,
                           max_context=MAX_CONTEXT, listen="127.0.0.1:0", log_level="warning",
                           worker_flags=("--local-rest-tokens", str(flags.local_rest_tokens)))
    async with running_cluster(config) as (cluster, client):
        for _ in range(2):
            await ask(client, prompts.cold())  # warms up
        others_load = OtherLoad()
        values: dict[str, Value] = {"prompt_tokens": flags.prompt_tokens, "turns": flags.turns}
        for part in flags.parts.split(","):
            values.update(await PARTS[part](client, prompts, flags))
        figures = await (await decode_ports(cluster)).leader()
        values["local_rests"] = int(figures.value("baton_local_prefill_total", reason="short_rest"))
        return {**values, **others_load.figures()}


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "baton-bench-peers",
                        help="where the weights are written, 1.2 GB (default %(default)s)")
    for name, default in (("prompt-tokens", 2048), ("turns", 6), ("streams", 4), ("memory-mb", 2048),
                          ("local-rest-tokens", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two warm turns, default 0.5")
    parser.add_argument("--reused-share", type=float, default=0.9, help="of the prompts of warm turns, default 0.9")
    parser.add_argument("--parts", default=",".join(PARTS), help="default %(default)s")
    return run_benchmark("cache", parser, measure, missed)


if __name__ == "__main__":
    sys.exit(main())

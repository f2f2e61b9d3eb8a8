"""`python -m bench.agents TRACE`: recorded agents on a cluster with a disk cache, with a cache server,
with sessions, and with none of them.

TRACE is a folder of agents' conversations (`baton.agent_traces`), whose lengths are divided by
--shrink. The first turns of --conversations of at least --turns turns, which begin at --rate a
second, are replayed on a prefill and a decode worker. A worker's memory holds 1 / --working-set of
all that the conversations leave. Fresh clusters with a tier and without alternate, or loads
that name the conversations' sessions and loads that do not; a ratio is the median over --pairs of
them.

    ttft_p90_ratio    time to first token, with the disk cache / without
    token_p90_ratio   time of a whole request by its tokens, likewise
    miss_rate_ratio   requests a second when prompts of these lengths that no cache has come at once

    server_ttft_p90_ratio, server_token_p90_ratio        the same with and without a cache server
    sessions_ttft_p90_ratio, sessions_token_p90_ratio    the same with and without sessions

For the miss rate, both clusters take turns with --batch requests each, --rounds times.

Bars: `ttft_p90_ratio` at most 0.35, `miss_rate_ratio` at least 0.98, `sessions_ttft_p90_ratio` at
most 1. `--parts` selects from: agents, server, sessions, misses. The server is that of `--server`.
"""

import argparse
import asyncio
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig, demo_model
from baton.load import Slo, prompt_counts, summarize
from baton.load_run import named_sessions, run_load, run_requests
from baton.replays import begun, impatient, shrunk
from baton.transcripts import recorded_requests
from baton.workload import Arrivals, Planned, Process, make_queries
from bench.arguments import trace_file
from bench.cache import Sides, missed
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.report import OtherLoad, Value
from engine.memory.layout import bytes_per_page, bytes_per_slot
from models.loader import read_model
from transfer.transport.authenticator import new_key

BARS = {
    "ttft_p90_ratio": (0.0, 0.35),
    "miss_rate_ratio": (0.98, math.inf),
    "sessions_ttft_p90_ratio": (0.0, 1.0),
}
MAX_CONTEXT = 2048
TIMEOUT_S = 600.0
WRITES_S = 0.5  # for the blocks of a round to be written
_MIB = 1 << 20


def chosen(trace: Sequence[Planned], flags: argparse.Namespace) -> list[Planned]:
    """Return the first turns of the first conversations that have enough and fit the context."""
    first = [item for item in trace if item.turn and item.turn.number < flags.turns]
    load = impatient(shrunk(first, flags.shrink), flags.max_pause)
    fitting = Counter(
        item.turn.session
        for item in load
        if item.turn and item.prompt_tokens + item.output_tokens <= MAX_CONTEXT
    )
    whole = [session for session, count in fitting.items() if count == flags.turns]
    sessions = set(whole[: flags.conversations])
    load = [item for item in load if item.turn and item.turn.session in sessions]
    return begun(load, Arrivals(Process.CONSTANT, flags.rate), seed=0)


def left_tokens(load: Sequence[Planned]) -> int:
    """Return how many tokens the conversations leave: of prompts, each once, and of responses.

    They leave a recurrent state for each turn in addition.
    """
    blocks: dict[int, int] = {}
    rest = 0
    for item in load:
        named = item.blocks[: item.prompt_tokens // item.block_tokens]
        blocks |= dict.fromkeys(named, item.block_tokens)
        rest += item.output_tokens
    return rest + sum(blocks.values())


@contextmanager
def empty_tier(flags: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Yield the cluster's settings of an empty tier: the disk, the server, or none of this name."""
    if name == "disk":
        folder = flags.folder / "disk"
        shutil.rmtree(folder, ignore_errors=True)
        yield {"disk_cache": folder}
        shutil.rmtree(folder)
    elif name == "server":
        with tempfile.NamedTemporaryFile() as key:  # with a key of its own nothing is there
            key.write(new_key())
            key.flush()
            yield {"cache_server": flags.server, "cache_server_key": Path(key.name)}
    else:
        yield {}


@asynccontextmanager
async def fresh_cluster(
    flags: argparse.Namespace, memory_mb: int, tiers: Mapping[str, Any]
) -> AsyncIterator[AsyncBatonClient]:
    """Run a warm cluster with nothing in its caches."""
    config = ClusterConfig(
        model=flags.model,
        memory_mb=memory_mb,
        max_context=MAX_CONTEXT,
        listen="127.0.0.1:0",
        log_level="warning",
        **tiers,
        worker_flags=("--page-size", str(flags.page_size)),
    )
    async with running_cluster(config) as (_, client):
        warm_up = [Planned(0.0, flags.page_size, 4)] * 2
        info = await client.model_info()
        await run_load(client, make_queries(info, warm_up, seed=1), [0.0, 1.0])
        yield client


async def replayed(
    load: Sequence[Planned],
    flags: argparse.Namespace,
    memory_mb: int,
    what: str,
) -> tuple[Mapping[str, float | None], float]:
    """Return the figures of the load on a fresh cluster, and the share of cached tokens.

    `what` is the name of a tier, or sessions, or none.
    """
    with empty_tier(flags, what) as tiers:
        return await _replayed(load, flags, memory_mb, tiers, names_sessions=what == "sessions")


async def _replayed(
    load: Sequence[Planned],
    flags: argparse.Namespace,
    memory_mb: int,
    tiers: Mapping[str, Any],
    *,
    names_sessions: bool,
) -> tuple[Mapping[str, float | None], float]:
    async with fresh_cluster(flags, memory_mb, tiers) as client:
        info = await client.model_info()
        requests = recorded_requests(info, load, seed=0)
        if names_sessions:
            requests = named_sessions(requests, "agents")
        began_s = time.monotonic()
        outcomes = await run_requests(client, requests, timeout_s=TIMEOUT_S)
        figures = summarize(outcomes, Slo(1, 1), time.monotonic() - began_s)
    counts = prompt_counts(outcomes)
    return figures, counts["cached_tokens"] / max(counts["prompt_tokens"], 1)


async def compared(
    load: Sequence[Planned], flags: argparse.Namespace, memory_mb: int, what: str
) -> dict[str, Value]:
    """Return the figures with a tier or with sessions, and without, and their ratios."""
    first, token = Sides(), Sides()
    shares: dict[bool, float] = {}
    failed = 0.0
    for pair in range(flags.pairs):
        sides: dict[bool, Mapping[str, float | None]] = {}
        for has in (True, False) if pair % 2 == 0 else (False, True):
            sides[has], shares[has] = await replayed(
                load, flags, memory_mb, what if has else "none"
            )
            failed += sides[has]["failed"] or 0.0
        for ratio, name in ((first, "ttft_s_p90"), (token, "e2e_s_per_token_p90")):
            ratio.add(*(cast(float, sides[has][name]) for has in (True, False)))
    prefix = "" if what == "disk" else f"{what}_"
    return {
        f"{prefix}failed": failed,
        f"{prefix}ttft_p90_s_{what}": median(first.side),
        f"{prefix}ttft_p90_s_none": median(first.base),
        f"{prefix}ttft_p90_ratio": first.ratio,
        f"{prefix}token_p90_ratio": token.ratio,
        f"{prefix}cached_share_{what}": shares[True],
        f"{prefix}cached_share_none": shares[False],
    }


async def missed_by_all(
    load: Sequence[Planned], flags: argparse.Namespace, memory_mb: int
) -> dict[str, Value]:
    """Return the requests a second of both sides for prompts that no cache has."""
    with empty_tier(flags, "disk") as tiers:
        async with (
            fresh_cluster(flags, memory_mb, tiers) as with_disk,
            fresh_cluster(flags, memory_mb, {}) as without,
        ):
            return await _missed_by_all(load, flags, with_disk, without)


async def _missed_by_all(
    load: Sequence[Planned],
    flags: argparse.Namespace,
    with_disk: AsyncBatonClient,
    without: AsyncBatonClient,
) -> dict[str, Value]:
    rates = Sides()
    info = await without.model_info()
    for turn in range(flags.rounds):
        first = turn * flags.batch % max(len(load) - flags.batch, 1)
        batch = [replace(item, blocks=()) for item in load[first : first + flags.batch]]
        queries = make_queries(info, batch, seed=2 + turn)
        side = dict[AsyncBatonClient, float]()
        for client in (with_disk, without) if turn % 2 == 0 else (without, with_disk):
            began_s = time.monotonic()
            await run_load(client, queries, [0.0] * len(queries), timeout_s=TIMEOUT_S)
            side[client] = len(queries) / (time.monotonic() - began_s)
            await asyncio.sleep(WRITES_S)
        rates.add(side[with_disk], side[without])
    return {
        "miss_rate_disk": median(rates.side),
        "miss_rate_none": median(rates.base),
        "miss_rate_ratio": rates.ratio,
    }


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    load = chosen(flags.trace, flags)
    specs = read_model(flags.model).cache_specs(flags.page_size)
    left_bytes = left_tokens(load) / flags.page_size * bytes_per_page(specs)
    left_bytes += len(load) * bytes_per_slot(specs)
    memory_mb = max(1, round(left_bytes / flags.working_set / _MIB))
    others = OtherLoad()
    values: dict[str, Value] = {
        "requests": len(load),
        "prompt_tokens": sum(item.prompt_tokens for item in load),
        "memory_mb": memory_mb,
        "working_set": left_bytes / memory_mb / _MIB,
    }
    parts = flags.parts.split(",")
    if "agents" in parts:
        values |= await compared(load, flags, memory_mb, "disk")
    for what in ("server", "sessions"):
        if what in parts:
            values |= await compared(load, flags, memory_mb, what)
    if "misses" in parts:
        values |= await missed_by_all(load, flags, memory_mb)
    return {**values, **others.figures()}


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument("trace", type=trace_file)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "baton-bench-agents",
        help="directory for the disk cache; default %(default)s",
    )
    parser.add_argument("--server", default="redis://127.0.0.1:6379", help="default %(default)s")
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument("--max-pause", type=float, default=5.0, help="seconds; default 5")
    parser.add_argument("--rate", type=float, default=0.5, help="default 0.5")
    for name, default in (
        ("conversations", 32),
        ("turns", 16),
        ("shrink", 32),
        ("working-set", 10),
        ("pairs", 3),
        ("page-size", 64),
        ("batch", 16),
        ("rounds", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--parts", default="agents,sessions,misses", help="parts to run; default %(default)s"
    )
    return run_benchmark("agents", parser, measure, partial(missed, bars=BARS))


if __name__ == "__main__":
    sys.exit(main())

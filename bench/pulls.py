"""`python -m bench.pulls`: speed at which a prefill worker takes a prompt from a decode worker.

Random bf16 weights of Qwen3-0.6B's shape; a prefill and a decode worker on this machine. In each
turn a prompt is computed, then asked again with the prefill worker's cache emptied, and once more
with it. A ratio is the median over the turns.

    pulled_ttft_ratio  first token of a prompt that only the decode worker has / of an uncached one
    memory_ttft_ratio  the same, of one that the prefill worker has
    pull_gb_s          bytes of the pages / time from the lease of their memory until all have landed
    handoff_ratio      pull_gb_s / what `python -m bench.handoff` measures afterwards

Bars: `pulled_ttft_ratio` at most 0.35, `handoff_ratio` at least 0.95.
"""

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig
from bench.cache import MAX_CONTEXT, RandomPrompts, Sides, ask, missed
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.peer_files import write_checkpoint
from bench.pool_metrics import Figures, port_of, scrape
from bench.report import OtherLoad, Value
from engine.memory.layout import bytes_per_page
from models.loader import read_model
from tests.support.cluster.leaders import flush_at

BARS = {"pulled_ttft_ratio": (0.0, 0.35), "handoff_ratio": (0.95, math.inf)}
REPORTED_S = 1.0  # until the router has heard what the workers have cached


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    model = write_checkpoint(flags.folder / "checkpoint")
    config = ClusterConfig(
        model=model,
        memory_mb=flags.memory_mb,
        max_context=MAX_CONTEXT,
        listen="127.0.0.1:0",
        log_level="warning",
        worker_flags=("--page-size", str(flags.page_size), "--transport", flags.transport),
    )
    source = RandomPrompts(flags.prompt_tokens, 1.0)
    pulled, from_memory = Sides(), Sides()
    rates = []
    page_bytes = bytes_per_page(read_model(model).cache_specs(flags.page_size))
    async with running_cluster(config) as (cluster, client):
        port = await port_of(cluster, "prefill-0")
        for _ in range(2):
            await ask(client, source.cold())  # warm-up
        others = OtherLoad()
        for turn in range(1 + flags.turns):
            query = source.cold()
            cold_s = (await ask(client, query)).times_s[0]
            await _flush(cluster, "prefill-0")
            await asyncio.sleep(REPORTED_S)
            before = scrape(port)
            told = await ask(client, query)
            gained = scrape(port).since(before)
            assert told.cached_tokens >= flags.prompt_tokens - flags.page_size - 1
            warm_s = (await ask(client, query)).times_s[0]
            if turn:  # the first pull opens connections
                pulled.add(told.times_s[0], cold_s)
                from_memory.add(warm_s, cold_s)
                rates.append(
                    _num_pulled(gained) * page_bytes / gained.value("baton_pull_seconds_sum")
                )
        figures = others.figures()
    handoff = await asyncio.to_thread(_handoff_gbps, flags.transport)
    return {
        "transport": flags.transport,
        "prompt_tokens": flags.prompt_tokens,
        "turns": flags.turns,
        "ttft_cold_s": median(pulled.base),
        "ttft_pulled_s": median(pulled.side),
        "ttft_memory_s": median(from_memory.side),
        "pulled_ttft_ratio": pulled.ratio,
        "memory_ttft_ratio": from_memory.ratio,
        "pull_gb_s": median(rates) / 1e9,
        "handoff_gb_s": handoff,
        "handoff_ratio": median(rates) / 1e9 / handoff,
        **figures,
    }


def _num_pulled(figures: Figures) -> float:
    return figures.value("baton_pull_blocks_total", event="read")


def _handoff_gbps(transport: str) -> float:
    command = (sys.executable, "-m", "bench.handoff", "--transport", transport, "--json")
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(ran.stdout)["gbps"])


async def _flush(cluster: LocalCluster, name: str) -> None:
    """Empty the prefix cache of one worker."""
    await flush_at((await cluster.processes[name].announced(timeout_s=10)).address)


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "baton-bench-peers",
        help="directory for the weights, 1.2 GB; default %(default)s",
    )
    parser.add_argument(
        "--transport", default="shm", choices=("shm", "tcp"), help="of UCX; default %(default)s"
    )
    for name, default in (
        ("prompt-tokens", 2048),
        ("turns", 5),
        ("memory-mb", 3072),
        ("page-size", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    return run_benchmark("pulls", parser, measure, partial(missed, bars=BARS))


if __name__ == "__main__":
    sys.exit(main())

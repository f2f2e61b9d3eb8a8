"""`python -m bench.rolling`: rolling restarts of every worker of a local cluster under a steady
load.

One process restarts at a time: each prefill worker, each decode pool's leader and stages; with
`--kill` by SIGKILL. Reports failed requests (there should be none), latencies of clients, and the
time until every worker serves again, as the router sees it. The exit code is 1 if a request failed,
or if the median time of killed workers is above three seconds.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, demo_model
from baton.load import Outcome, Slo, summarize
from baton.load_run import run_load
from baton.values import ClusterStatus
from baton.workload import Arrivals, Lengths, Shape, make_queries, plan
from bench.command import benchmark_flags, failed_requests, run_benchmark, running_cluster, until
from bench.report import OtherLoad, Value

BATCH = 20  # requests planned at a time; the next batch follows after all have arrived and ended
RESTART_S = 120.0
# for a killed worker of the demo model: supervisor, start, rejoining, warm-up, and the router's
# next look
AWAY_BAR_S = 3.0


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    config = ClusterConfig(
        model=flags.model,
        prefill=flags.prefill,
        decode=flags.decode,
        decode_pp=flags.decode_pp,
        listen="127.0.0.1:0",
        log_level="warning",
        worker_flags=("--drain-s", str(flags.drain_s)),
    )
    async with running_cluster(config) as (cluster, client):
        over = asyncio.Event()
        load = asyncio.create_task(steady_load(client, flags, over))
        others = OtherLoad()
        started = time.monotonic()
        away_s = []
        try:
            for _ in range(flags.rounds):
                for name in [name for name in cluster.processes if name != "router"]:
                    began_s = time.monotonic()
                    if flags.kill:
                        await come_back(cluster, client, name)
                    else:
                        await cluster.restart(name, timeout_s=RESTART_S)
                    away_s.append(time.monotonic() - began_s)
        finally:
            over.set()
        outcomes = await load
    values = summarize(
        outcomes, Slo(flags.slo_ttft_s, flags.slo_tpot_s), time.monotonic() - started
    )
    topology = f"{flags.prefill} prefill, {flags.decode}x{flags.decode_pp} decode"
    return {
        "topology": topology,
        "is_killed": flags.kill,
        "rate_per_s": flags.rate,
        "drain_s": flags.drain_s,
        "restarts": len(away_s),
        "away_s_p50": statistics.median(away_s),
        "away_s_max": max(away_s),
        **values,
        **others.figures(),
    }


async def come_back(cluster: LocalCluster, client: AsyncBatonClient, name: str) -> None:
    """Kill a process of a worker; return when every worker serves again, as the router sees it."""
    process = cluster.processes[name]
    num_starts = process.num_starts
    process.kill()
    async with asyncio.timeout(RESTART_S):
        await until(client, lambda status: not all_serve(status))
        await until(client, lambda status: all_serve(status) and process.num_starts > num_starts)


def all_serve(status: ClusterStatus) -> bool:
    return all(worker.serving for worker in status.workers)


def missed(values: Mapping[str, Value]) -> list[str]:
    """Return the missed bars."""
    found = failed_requests(values)
    away_s = values["away_s_p50"]
    if values["is_killed"] and isinstance(away_s, float) and away_s > AWAY_BAR_S:
        found.append(f"away_s_p50 {away_s:.3g} is above {AWAY_BAR_S:g}")
    return found


async def steady_load(
    client: AsyncBatonClient, flags: argparse.Namespace, over: asyncio.Event
) -> list[Outcome]:
    """Send requests at the given rate until `over` is set; then let those that have begun end."""
    info = await client.model_info()
    shape = Shape(
        Lengths("constant", flags.prompt_tokens), Lengths("constant", flags.output_tokens)
    )
    outcomes: list[Outcome] = []
    while not over.is_set():
        planned = plan(BATCH, Arrivals(rate=flags.rate), shape, seed=len(outcomes))
        queries = make_queries(info, planned, seed=len(outcomes))
        outcomes += await run_load(client, queries, [item.at_s for item in planned])
    return outcomes


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    for name, default in (
        ("rounds", 3),
        ("prefill", 2),
        ("decode", 2),
        ("decode-pp", 2),
        ("prompt-tokens", 192),
        ("output-tokens", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    for name, rate in (("rate", 4.0), ("drain-s", 1.0), ("slo-ttft-s", 0.5), ("slo-tpot-s", 0.05)):
        parser.add_argument(f"--{name}", type=float, default=rate, help=f"default {rate}")
    parser.add_argument(
        "--kill", action="store_true", help="kill workers instead of restarting them"
    )
    return run_benchmark("rolling", parser, measure, missed)


if __name__ == "__main__":
    sys.exit(main())

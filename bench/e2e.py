"""`python -m bench.e2e`: a whole local cluster under an open-loop load.

Reports TTFT, TPOT, ITL, the part of the handoff that prefill did not hide, and goodput under an
SLO. Definitions: `baton.load`.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig, demo_model
from baton.load import Slo, summarize
from baton.load_run import run_load
from baton.workload import Arrivals, Lengths, Shape, make_queries, plan
from bench.command import benchmark_flags, failed_requests, run_benchmark, running_cluster
from bench.report import Value


async def run_shape(
    client: AsyncBatonClient, shape: Shape, slo: Slo, *, requests: int, rate: float, seed: int
) -> Mapping[str, Value]:
    """Send warm-up requests and then those of a shape at a rate; return their figures."""
    planned = plan(requests, Arrivals(rate=rate), shape, seed=seed)
    queries = make_queries(await client.model_info(), planned, seed=seed)
    await run_load(
        client, queries[:2], [0.0, 0.1]
    )  # connections and code paths are warm from here on
    started = time.monotonic()
    outcomes = await run_load(client, queries, [item.at_s for item in planned])
    return summarize(outcomes, slo, time.monotonic() - started)


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    config = ClusterConfig(
        model=flags.model,
        prefill=flags.prefill,
        decode=flags.decode,
        prefill_pp=flags.prefill_pp,
        decode_pp=flags.decode_pp,
        listen="127.0.0.1:0",
        log_level="warning",
    )
    slo = Slo(flags.slo_ttft_s, flags.slo_tpot_s)
    async with running_cluster(config) as (_, client):
        mean = flags.prompt_tokens
        shape = Shape(
            Lengths("uniform", max(mean // 2, 1), mean * 3 // 2),
            Lengths("constant", flags.output_tokens),
        )
        figures = await run_shape(
            client, shape, slo, requests=flags.requests, rate=flags.rate, seed=flags.seed
        )
    topology = (
        f"{flags.prefill}x{flags.prefill_pp} prefill, {flags.decode}x{flags.decode_pp} decode"
    )
    return {"topology": topology, "rate_per_s": flags.rate, **figures}


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    for name, default in (
        ("prefill", 1),
        ("decode", 1),
        ("prefill-pp", 1),
        ("decode-pp", 2),
        ("requests", 60),
        ("prompt-tokens", 192),
        ("output-tokens", 32),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    for name, rate in (("rate", 4.0), ("slo-ttft-s", 0.5), ("slo-tpot-s", 0.05)):
        parser.add_argument(f"--{name}", type=float, default=rate, help=f"default {rate}")
    return run_benchmark("e2e", parser, measure, failed_requests)


if __name__ == "__main__":
    sys.exit(main())

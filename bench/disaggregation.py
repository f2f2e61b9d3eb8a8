"""`python -m bench.disaggregation`: the same two cores as three layouts, under the same load.

    split   a prefill worker and a decode worker, a core each
    both    two workers of both roles, a core each; the router decides for each request
    one     one worker of both roles, of two ranks

The layouts take turns; at each rate, requests and their times are the same for all. Figures are
those of `baton.load`, medians over turns. `memory` is the unshared memory of all workers in MiB.
`foreign_cores` is the number of cores that other processes used; above 0.2 the figures are noise.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import psutil

from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, demo_model
from baton.load import Slo
from baton.workload import Lengths, Shape
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.e2e import run_shape
from bench.report import OtherLoad, Value

MIB = 1 << 20
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "split": {"prefill": 1, "decode": 1},
    "both": {"prefill": 0, "decode": 0, "worker": 2},
    "one": {"prefill": 0, "decode": 0, "worker": 1, "worker_tp": 2},
}
FIGURES = ("ttft_s_p50", "ttft_s_p90", "tpot_s_p50", "tpot_s_p90", "itl_s_p99", "goodput_per_s")


def memory_of(cluster: LocalCluster) -> float:
    """Return the unshared memory of the workers in MiB."""
    pids = [
        process.pid
        for name, process in cluster.processes.items()
        if not name.startswith("router") and process.pid is not None
    ]
    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids) / MIB


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    rates = [float(rate) for rate in flags.rates.split(",")]
    slo = Slo(flags.slo_ttft_s, flags.slo_tpot_s)
    shape = Shape(
        *(
            Lengths("uniform", max(mean // 2, 1), mean * 3 // 2)
            for mean in (flags.prompt_tokens, flags.output_tokens)
        )
    )
    seen: dict[tuple[str, float], list[Mapping[str, Value]]] = {}
    memory: dict[str, float] = {}
    failed = 0
    other = OtherLoad()
    for _ in range(flags.turns):
        for name in flags.layouts.split(","):
            config = ClusterConfig(
                model=flags.model,
                memory_mb=flags.memory_mb,
                listen="127.0.0.1:0",
                log_level="warning",
                **LAYOUTS[name],  # type: ignore[arg-type]  # numbers of pools
            )
            async with running_cluster(config) as (cluster, client):
                for seed, rate in enumerate(rates, flags.seed):  # of other seeds nothing is cached
                    figures = await run_shape(
                        client, shape, slo, requests=flags.requests, rate=rate, seed=seed
                    )
                    print(f"{name} at {rate:g}/s: {dict(figures)}", file=sys.stderr)
                    seen.setdefault((name, rate), []).append(figures)
                    failed += int(figures["failed"] or 0)
                memory[name] = memory_of(cluster)
    values: dict[str, Value] = {"failed": failed}
    for (name, rate), turns in seen.items():
        for figure in FIGURES:
            found = [turn[figure] for turn in turns]
            numbers = [float(value) for value in found if isinstance(value, int | float)]
            if numbers:
                values[f"{name}_{rate:g}_{figure}"] = round(median(numbers), 4)
    for name in memory:
        values[f"{name}_memory"] = round(memory[name])
    return {**values, **other.figures()}


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument("--rates", default="2,6,12", help="arrivals a second; default 2,6,12")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="default: all three")
    for name, default in (
        ("turns", 2),
        ("requests", 60),
        ("prompt-tokens", 192),
        ("output-tokens", 32),
        ("memory-mb", 256),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    for name, limit in (("slo-ttft-s", 0.5), ("slo-tpot-s", 0.05)):
        parser.add_argument(f"--{name}", type=float, default=limit, help=f"default {limit}")
    return run_benchmark("disaggregation", parser, measure)


if __name__ == "__main__":
    sys.exit(main())

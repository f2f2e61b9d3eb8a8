"""`python -m bench.acceptance`: tokens per request and pass of the demo model with its draft.

Held-out prompts run greedily through a whole cluster. The figures are the decode pool's own
metrics.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig, demo_model
from baton.values import Completion, Query, Sampling, Stop
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.pool_metrics import Figures, decode_ports
from bench.report import Value
from demo.corpus import speculation_prompts

SHAPES = {"chain_3": (1, 3, 3), "tree_4x4_15": (4, 4, 15)}
BARS = {"chain_3": 2.7, "tree_4x4_15": 3.5}
OUTPUT_TOKENS = 96
IN_FLIGHT = 8
REQUEST_TIMEOUT_S = 120.0


def held_out_queries(count: int) -> list[Query]:
    return [
        Query(item.prompt, Sampling(temperature=0), Stop(max_tokens=OUTPUT_TOKENS))
        for item in speculation_prompts(count, seed=0)
    ]


async def ask_all(client: AsyncBatonClient, queries: Sequence[Query]) -> list[Completion]:
    """Send the queries, a few at a time, and return their completions."""
    completions = list[Completion]()
    for start in range(0, len(queries), IN_FLIGHT):
        completions += await asyncio.gather(
            *(
                client.complete(query, timeout_s=REQUEST_TIMEOUT_S)
                for query in queries[start : start + IN_FLIGHT]
            )
        )
    return completions


async def accepted(flags: argparse.Namespace, shape: tuple[int, int, int]) -> Figures:
    """Return what the metrics of the decode pool gained."""
    topk, steps, tokens = map(str, shape)
    config = ClusterConfig(
        model=demo_model(),
        decode_pp=flags.decode_pp,
        listen="127.0.0.1:0",
        log_level="warning",
        worker_flags=(
            "--draft",
            str(flags.draft),
            "--spec-topk",
            topk,
            "--spec-steps",
            steps,
            "--spec-draft-tokens",
            tokens,
            "--no-spec-adaptive",
            "--no-spec-suffix",
        ),
    )
    async with running_cluster(config) as (cluster, client):
        ports = await decode_ports(cluster)
        before = await ports.leader()
        await ask_all(client, held_out_queries(flags.prompts))
        return (await ports.leader()).since(before)


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    values: dict[str, Value] = {"prompts": flags.prompts, "decode_pp": flags.decode_pp}
    for name, shape in SHAPES.items():
        figures = await accepted(flags, shape)
        values[f"{name}_tokens_per_pass"] = figures.mean("baton_spec_accept_length")
        values[f"{name}_passes"] = figures.value("baton_spec_accept_length_count")
        values[f"{name}_bar"] = BARS[name]
    return values


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--draft",
        type=Path,
        default=demo_model().parent / "draft",
        help="draft model directory; default: the demo draft",
    )
    parser.add_argument(
        "--decode-pp", type=int, default=2, help="pipeline stages of the decode pool; default 2"
    )
    parser.add_argument("--prompts", type=int, default=50, help="number of prompts; default 50")
    return run_benchmark("acceptance", parser, measure)


if __name__ == "__main__":
    sys.exit(main())

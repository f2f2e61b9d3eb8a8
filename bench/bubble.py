"""`python -m bench.bubble`: share of time in which a decode stage has work but does not compute.

A local cluster has a decode pool of two stages, each process on its own core, and streams that all
decode at the same time. Between two reads of the pool's metrics, `bubble_N` is the share of time in
which stage N ran no forward, and `step_ms_N` the duration of one. `bubble` is that of the stage
that computes longer, as the other has to wait for it.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from baton.cluster_config import ClusterConfig, demo_model
from baton.values import Chunk, Query
from baton.workload import Planned, make_queries
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.pool_metrics import PoolPorts, decode_ports
from bench.report import OtherLoad, Value

STEP = "baton_pp_stage_step_seconds"
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 1900
LOOK_S = 0.05
TIMEOUT_S = 300.0


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    config = ClusterConfig(
        model=flags.model,
        decode_pp=2,
        decode_partition=flags.partition,
        listen="127.0.0.1:0",
        log_level="warning",
    )
    async with running_cluster(config) as (cluster, client):
        planned = [Planned(0.0, PROMPT_TOKENS, OUTPUT_TOKENS)] * flags.streams
        tokens = [0] * flags.streams

        async def stream(number: int, query: Query) -> None:
            async for event in client.generate(query, timeout_s=TIMEOUT_S):
                if isinstance(event, Chunk):
                    tokens[number] += len(event.token_ids)

        queries = make_queries(await client.model_info(), planned, seed=0)
        streams = [
            asyncio.create_task(stream(number, query)) for number, query in enumerate(queries)
        ]
        try:
            while min(tokens) < flags.warm_up_tokens:
                await asyncio.sleep(LOOK_S)
                for task in streams:
                    if task.done():
                        task.result()
            figures = await look(await decode_ports(cluster), tokens, flags.seconds)
            if any(task.done() for task in streams):
                raise SystemExit(
                    f"a stream ended within {flags.seconds:g} s: measure for a shorter time"
                )
            return figures
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


async def look(ports: PoolPorts, tokens: list[int], seconds: float) -> dict[str, Value]:
    """Return the figures of both stages while all streams run."""
    first = (await ports.leader(), await ports.last_stage())
    others = OtherLoad()
    began_s = time.monotonic()
    began_tokens = sum(tokens)
    await asyncio.sleep(seconds)
    passed_s = time.monotonic() - began_s
    num_sampled = sum(tokens) - began_tokens
    stages = [
        now.since(before)
        for before, now in zip(first, (await ports.leader(), await ports.last_stage()), strict=True)
    ]
    bubbles = [1 - figures.value(f"{STEP}_sum") / passed_s for figures in stages]
    return {
        "streams": len(tokens),
        "tokens_per_s": num_sampled / passed_s,
        "bubble": min(bubbles),
        **{f"bubble_{rank}": bubble for rank, bubble in enumerate(bubbles)},
        **{
            f"step_ms_{rank}": 1e3 * (figures.mean(STEP) or 0.0)
            for rank, figures in enumerate(stages)
        },
        **others.figures(),
    }


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--partition", default="", help="layers per stage, such as 5,3, or balanced; default: even"
    )
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams; default 8")
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="seconds of measurement, during which no stream may end; default 2",
    )
    parser.add_argument(
        "--warm-up-tokens",
        type=int,
        default=32,
        help="tokens of each stream before the measurement; default 32",
    )
    return run_benchmark("bubble", parser, measure)


if __name__ == "__main__":
    sys.exit(main())

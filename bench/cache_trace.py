"""`python -m bench.cache_trace TRACE`: time to first token on a trace, with cache-aware routing and
without.

Two workers of each role with the demo model, a router and the client run on one machine, in a fresh
cluster for each turn. `--policy prefix_cache` and `--policy least_load` alternate; figures are
medians over `--turns` of each. TRACE is in Mooncake's format. Lengths are divided by --scale, and
prompts that begin with the same blocks in the trace begin with the same tokens here. The capacity
in requests per second is measured first, with all requests at once and by load, unless `--capacity`
gives it. Requests then arrive at --load times that rate, distributed as in the trace.

Bar: `ttft_p90_ratio`, prefix_cache / least_load, the median over pairs of turns, at most 0.2.
`bench.cache_bound` computes the bound.
"""

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig, demo_model
from baton.load import Slo, summarize
from baton.load_run import run_load
from baton.retry import NO_RETRY
from baton.values import ModelInfo, Query, Sampling, Stop
from baton.workload import BLOCK_TOKENS, Planned
from bench.arguments import trace_file
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.report import OtherLoad, Value
from router.workers.policy import Policy

MOST_RATIO = 0.2
COMPARED = (Policy.PREFIX_CACHE, Policy.LEAST_LOAD)
SHOWN = ("ttft_s_p50", "ttft_s_p90", "tpot_s_p90", "failed")


def query_of(info: ModelInfo, index: int, planned: Planned, scale: int) -> Query:
    """Return a request of the trace, shorter by `scale`; equal blocks have equal tokens."""
    ordinary = [token for token in range(info.vocab_size) if token not in info.eos_token_ids]
    num_output = max(1, min(planned.output_tokens // scale, info.max_context_tokens // 2))
    num_prompt = max(1, min(planned.prompt_tokens // scale, info.max_context_tokens - num_output))
    prompt = [
        token
        for block in planned.blocks
        for token in random.Random(block).choices(ordinary, k=BLOCK_TOKENS // scale)
    ][:num_prompt]
    prompt += random.Random(~index).choices(ordinary, k=num_prompt - len(prompt))
    return Query(
        tuple(prompt),
        Sampling(seed=index),
        Stop(max_tokens=num_output, ignore_eos=True),
        skip_text=True,
    )


async def asked(
    policy: Policy, flags: argparse.Namespace, trace: Sequence[Planned], arrivals_s: Sequence[float]
) -> Mapping[str, float | None]:
    """Return the figures of a trace on a fresh cluster."""
    config = ClusterConfig(
        model=flags.model,
        prefill=2,
        decode=2,
        listen="127.0.0.1:0",
        log_level="warning",
        router_flags=("--policy", policy.value, "--max-waiting", str(len(trace))),
    )
    async with running_cluster(config, retry=NO_RETRY) as (_, client):
        queries = await _queries(client, trace, flags.scale)
        began_s = time.monotonic()
        outcomes = await run_load(client, queries, arrivals_s)
        return summarize(outcomes, Slo(1, 1), time.monotonic() - began_s)


async def _queries(client: AsyncBatonClient, trace: Sequence[Planned], scale: int) -> list[Query]:
    info = await client.model_info()
    return [query_of(info, index, planned, scale) for index, planned in enumerate(trace)]


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    trace = flags.trace[: flags.requests]
    others = OtherLoad()
    capacity = flags.capacity or _number(
        await asked(Policy.LEAST_LOAD, flags, trace, [0.0] * len(trace)), "requests_per_s"
    )
    lasts_s = len(trace) / (flags.load * capacity)
    arrivals_s = [item.at_s * lasts_s / max(trace[-1].at_s, 1e-3) for item in trace]
    turns: dict[Policy, list[Mapping[str, float | None]]] = {policy: [] for policy in COMPARED}
    for turn in range(flags.turns):
        for policy in COMPARED if turn % 2 == 0 else reversed(COMPARED):
            turns[policy].append(await asked(policy, flags, trace, arrivals_s))
    values: dict[str, Value] = {
        "requests": len(trace),
        "capacity_per_s": capacity,
        "load": flags.load,
    }
    for policy, figures in turns.items():
        values |= {
            f"{policy}_{name}": median(_number(each, name) for each in figures) for name in SHOWN
        }
    ratios = [
        _number(aware, "ttft_s_p90") / _number(blind, "ttft_s_p90")
        for aware, blind in zip(*(turns[policy] for policy in COMPARED), strict=True)
    ]
    return {
        **values,
        "ttft_p90_ratio": median(ratios),
        "ttft_p90_ratios": " ".join(f"{ratio:.3g}" for ratio in ratios),
        **others.figures(),
    }


def _number(figures: Mapping[str, float | None], name: str) -> float:
    value = figures[name]
    assert value is not None
    return value


def missed(values: Mapping[str, Value]) -> list[str]:
    ratio = values["ttft_p90_ratio"]
    assert isinstance(ratio, float)
    return (
        [f"ttft_p90_ratio is {ratio:.3g}, the bar is {MOST_RATIO:g}"] if ratio > MOST_RATIO else []
    )


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument("trace", type=trace_file)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=400,
        help="number of requests from the start of the trace; default 400",
    )
    parser.add_argument("--scale", type=int, default=32, help="divisor of all lengths; default 32")
    parser.add_argument(
        "--load", type=float, default=0.73, help="share of the capacity in use; default 0.73"
    )
    parser.add_argument("--turns", type=int, default=3, help="turns of each policy; default 3")
    parser.add_argument(
        "--capacity", type=float, help="capacity in requests per second; default: measured first"
    )
    return run_benchmark("cache_trace", parser, measure, missed)


if __name__ == "__main__":
    sys.exit(main())

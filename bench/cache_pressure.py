"""`python -m bench.cache_pressure`: requests with shared prompts, on pools too small to cache all.

A prefill worker and a decode worker have few pages; prompts extend a few common beginnings. A share
of `--dropped` requests is cancelled at a random moment. The others must match the responses to the
same prompts with the cache declined, in tokens and logprobs. After every `--round` requests the
cluster idles. Nothing may be held then, and the workers' own checks must pass: free, cached and
leased pages add up to the total.

    right, wrong, lost    uncancelled requests: as expected, different, or with an error
    leaked                idle moments at which a page or slot was held, or a check failed
    cached_tokens, unsent_tokens           prompt tokens that were not computed, and not sent
    evicted_pages, decode_evicted_pages    pages that the workers' caches evicted
    preemptions           requests that the decode worker preempted for lack of pages
"""

import argparse
import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, demo_model
from baton.values import ClusterStatus, Completion, Query, Sampling, Stop
from bench.command import benchmark_flags, run_benchmark, running_cluster, until
from bench.pool_metrics import Figures, scrape
from bench.report import Value
from runtime.errors import BatonError

NUM_DISTINCT = 60
NUM_ROOTS = 5
PAGES = ("--page-size", "16", "--num-pages", "90", "--max-running", "6", "--max-context", "512")
CONCURRENCY = 16
IDLE_CHECK_S = 1.5  # a pool that is idle for longer has run its checks
TIMEOUT_S = 120.0


def make_queries(vocab_size: int) -> list[Query]:
    rng = random.Random(0)
    roots = [rng.choices(range(3, vocab_size), k=360) for _ in range(NUM_ROOTS)]
    prompts = [
        (
            *roots[i % NUM_ROOTS][: rng.randrange(20, 360)],
            *rng.choices(range(3, vocab_size), k=rng.randrange(1, 80)),
        )
        for i in range(NUM_DISTINCT)
    ]
    return [
        Query(
            prompt,
            Sampling(temperature=0.8, seed=i) if i % 2 else Sampling(temperature=0),
            Stop(max_tokens=rng.randrange(1, 12), ignore_eos=True),
            num_top_logprobs=0,
            skip_text=True,
        )
        for i, prompt in enumerate(prompts)
    ]


def shown(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.logprobs


class Pressure:
    """Requests, each one of `queries`, and their outcomes."""

    def __init__(
        self,
        client: AsyncBatonClient,
        queries: Sequence[Query],
        expected: Sequence[tuple[object, ...]],
        dropped_share: float,
    ) -> None:
        self._client = client
        self._queries = queries
        self._expected = expected
        self._dropped_share = dropped_share
        self._rng, self._gate = random.Random(1), asyncio.Semaphore(CONCURRENCY)
        self.outcomes: Counter[str] = Counter(
            dict.fromkeys(("right", "wrong", "lost", "dropped", "cached_tokens"), 0)
        )

    async def one(self) -> None:
        pick = self._rng.randrange(len(self._queries))
        patience_s = TIMEOUT_S
        async with self._gate:
            if self._rng.random() < self._dropped_share:
                patience_s = self._rng.random() * 0.2
            try:
                async with asyncio.timeout(patience_s):
                    completion = await self._client.complete(
                        self._queries[pick], timeout_s=TIMEOUT_S
                    )
            except TimeoutError:
                self.outcomes["dropped" if patience_s < TIMEOUT_S else "lost"] += 1
            except BatonError as error:
                print(f"bench.cache_pressure: {error}", file=sys.stderr)
                self.outcomes["lost"] += 1
            else:
                self.outcomes[
                    "right" if shown(completion) == self._expected[pick] else "wrong"
                ] += 1
                self.outcomes["cached_tokens"] += completion.finish.usage.cached_tokens


def holds_nothing(status: ClusterStatus) -> bool:
    return all(
        worker.serving
        and worker.pages_free == worker.pages_total
        and worker.slots_free == worker.slots_total
        and not worker.open_sessions
        for worker in status.workers
    )


async def leaks(cluster: LocalCluster, client: AsyncBatonClient) -> bool:
    """Return whether an idle cluster holds anything, or one of its own checks has failed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            await until(client, holds_nothing)
    await asyncio.sleep(IDLE_CHECK_S)
    figures = (await workers_figures(cluster)).values()
    is_broken = any(
        each.value("baton_kv_imbalances_total") or each.value("baton_kv_pages_used")
        for each in figures
    )
    return is_broken or not holds_nothing(await client.cluster_status())


async def workers_figures(cluster: LocalCluster) -> dict[str, Figures]:
    """Return the figures by process name."""
    return {
        name: await asyncio.to_thread(scrape, process.announcement.metrics_port)
        for name, process in cluster.processes.items()
        if name != "router"
        and process.announcement is not None
        and process.announcement.metrics_port
    }


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    config = ClusterConfig(
        model=flags.model, listen="127.0.0.1:0", log_level="warning", worker_flags=PAGES
    )
    async with running_cluster(config) as (cluster, client):
        queries = make_queries((await client.model_info()).vocab_size)
        cold = [
            await client.complete(replace(query, prefix_cache=False), timeout_s=TIMEOUT_S)
            for query in queries
        ]
        pressure = Pressure(
            client, queries, [shown(completion) for completion in cold], flags.dropped
        )
        leaked = 0
        asked = 0
        while asked < flags.requests:
            count = min(flags.round, flags.requests - asked)
            await asyncio.gather(*(pressure.one() for _ in range(count)))
            asked += count
            leaked += await leaks(cluster, client)
            print(f"{asked} requests: {dict(pressure.outcomes)}, leaked {leaked}", file=sys.stderr)
        prefill, decode = (await workers_figures(cluster)).values()
        return {
            "requests": asked,
            **pressure.outcomes,
            "leaked": leaked,
            "evicted_pages": evicted_pages(prefill),
            "decode_evicted_pages": evicted_pages(decode),
            "unsent_tokens": int(decode.value("baton_cache_reused_tokens_total")),
            "preemptions": int(decode.value("baton_preemptions_total")),
        }


def evicted_pages(figures: Figures) -> int:
    return int(figures.value("baton_cache_evicted_pages_total", cause="pressure"))


def problems(values: Mapping[str, Value]) -> list[str]:
    return [f"{values[name]} {name}" for name in ("wrong", "lost", "leaked") if values[name]]


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--requests", type=int, default=10_000, help="number of requests; default 10,000"
    )
    parser.add_argument(
        "--round", type=int, default=500, help="requests between two idle phases; default 500"
    )
    parser.add_argument(
        "--dropped", type=float, default=0.3, help="share of cancelled requests; default 0.3"
    )
    return run_benchmark("cache_pressure", parser, measure, problems)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.overload`: responses within their deadline under more load than a cluster can
serve.

Measures the capacity of a local cluster in a closed loop. Then sends requests in an open loop at
0.8, 1, 2 and 4 times that, with deadlines of 5, 10 and 60 s and with none. Each cell has three
figures: responses within their deadline per second, of those that ended during arrivals; the delay
of rejections; and the retry delay they gave (RetryInfo) next to the true wait, until workers got
the last of the requests queued before. Clients do not retry. The exit code is 1 if a bar is missed.
"""

import argparse
import asyncio
import bisect
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, demo_model
from baton.load import percentiles
from baton.retry import NO_RETRY
from baton.values import Finish, Query
from baton.workload import Arrivals, Lengths, Shape, make_queries, plan
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.pool_metrics import Figures, scrape
from bench.report import OtherLoad, Value, render
from runtime.errors import BatonError, CapacityError

CLIENTS = 48  # of the closed loop
WARM_SHARE = 0.25  # share of the closed loop's time that does not count
MOST_S = 600.0  # for requests without a deadline
ROUTER = "router"
# Bars of the figures.
GOODPUT_BAR = 0.9  # at 2 and 4 times the capacity, relative to 1
REFUSAL_BAR_S = 0.05
RETRY_FACTOR = 2.0
COUNTED_WAIT_S = 0.1  # a shorter wait may be over when the client receives it


@dataclass(frozen=True)
class LoadReply:
    """Outcome of a request, in seconds after the start of its cell."""

    due_s: float
    sent_s: float
    ended_s: float
    placed_s: float | None = None  # time at which workers got it, if it was served
    error: str | None = None
    was_refused: bool = False  # rejected on arrival
    was_dropped: bool = False  # rejected after queueing
    named_s: float | None = None  # retry delay of a rejection


@dataclass
class LoadCell:
    """One load with one deadline."""

    load: float
    deadline_s: float | None
    seconds: float
    answers: list[LoadReply] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"x{self.load:g}_{'none' if self.deadline_s is None else f'{self.deadline_s:g}s'}"

    @property
    def in_time_per_s(self) -> float:
        """Return responses in time per second; late ones end with an error."""
        return (
            sum(a.error is None and a.ended_s <= self.seconds for a in self.answers) / self.seconds
        )

    @property
    def refusals(self) -> list[LoadReply]:
        return [answer for answer in self.answers if answer.was_refused]

    def waits(self) -> list[tuple[float, float]]:
        """Return (given, true) waits of rejections whose true wait is known and long enough."""
        placed = sorted((a.sent_s, a.placed_s) for a in self.answers if a.placed_s is not None)
        found = []
        for refusal in self.refusals:
            before = placed[: bisect.bisect(placed, (refusal.sent_s, math.inf))][-len(placed) :]
            true_s = max((at_s for _, at_s in before), default=-math.inf) - refusal.sent_s
            if true_s >= COUNTED_WAIT_S and refusal.named_s is not None:
                found.append((refusal.named_s, true_s))
        return found

    def figures(self) -> dict[str, Value]:
        delays = [answer.ended_s - answer.sent_s for answer in self.refusals]
        ratios = [named / true for named, true in self.waits()]
        near = [1 / RETRY_FACTOR <= ratio <= RETRY_FACTOR for ratio in ratios]
        cut = percentiles(delays, "refusal_s")
        return {
            f"{self.name}_{key}": value
            for key, value in {
                "sent": len(self.answers),
                "in_time_per_s": self.in_time_per_s,
                "refused": len(delays),
                "refused_unnamed": sum(refusal.named_s is None for refusal in self.refusals),
                "dropped": sum(answer.was_dropped for answer in self.answers),
                "late": sum(answer.error == "DEADLINE_EXCEEDED" for answer in self.answers),
                "lag_s_p99": percentiles(
                    [answer.sent_s - answer.due_s for answer in self.answers], "lag"
                )["lag_p99"],
                "refusal_s_p50": cut["refusal_s_p50"],
                "refusal_s_p99": cut["refusal_s_p99"],
                "retry_ratio_p50": statistics.median(ratios) if ratios else None,
                "retry_within_factor": sum(near) / len(near) if near else None,
            }.items()
        }


@dataclass
class Lab:
    """Running cluster and the requests for it."""

    client: AsyncBatonClient
    queries: Sequence[Query]
    rng: random.Random

    async def capacity(self, seconds: float) -> float:
        """Return the responses per second of a closed loop."""
        queries = cycle(self.queries)
        ended = []
        start = time.monotonic()

        async def ask() -> None:
            while time.monotonic() < start + seconds:
                await self._ask(next(queries), None, start, 0.0)
                ended.append(time.monotonic() - start)

        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
        counted = [at_s for at_s in ended if WARM_SHARE * seconds <= at_s <= seconds]
        return len(counted) / (seconds * (1 - WARM_SHARE))

    async def run(self, cell: LoadCell, rate: float) -> None:
        """Fill a cell, and wait until no request runs."""
        times = [
            at_s
            for at_s in Arrivals(rate=rate).times(math.ceil(2 * rate * cell.seconds) + 10, self.rng)
            if at_s < cell.seconds
        ]
        start = time.monotonic()

        async def at(at_s: float, query: Query) -> LoadReply:
            await asyncio.sleep(max(0.0, start + at_s - time.monotonic()))
            return await self._ask(query, cell.deadline_s, start, at_s)

        cell.answers += await asyncio.gather(
            *map(at, times, islice(cycle(self.queries), len(times)))
        )

    async def _ask(
        self, query: Query, deadline_s: float | None, start: float, due_s: float
    ) -> LoadReply:
        sent_s = time.monotonic() - start
        placed_s = None
        try:
            async for event in self.client.generate(query, timeout_s=deadline_s or MOST_S):
                if isinstance(event, Finish) and event.timings is not None:
                    placed_s = sent_s + (event.timings.router_queue_s or 0.0)
        except CapacityError as error:
            refused = error.resource == "router queue"
            return LoadReply(
                due_s,
                sent_s,
                time.monotonic() - start,
                error=error.reason,
                was_refused=refused,
                was_dropped=not refused,
                named_s=error.retry_after_s,
            )
        except BatonError as error:
            return LoadReply(due_s, sent_s, time.monotonic() - start, error=error.reason)
        return LoadReply(due_s, sent_s, time.monotonic() - start, placed_s)


def bars(cells: Sequence[LoadCell]) -> dict[str, Value]:
    """Return the worst value of each figure with a bar, over all cells above capacity."""
    at_once = {cell.deadline_s: cell.in_time_per_s for cell in cells if cell.load == 1}
    over = [cell for cell in cells if cell.load >= 2]
    kept = [
        cell.in_time_per_s / at_once[cell.deadline_s]
        for cell in over
        if at_once.get(cell.deadline_s)
    ]
    delays = [a.ended_s - a.sent_s for cell in over for a in cell.refusals]
    ratios = [named / true for cell in over for named, true in cell.waits()]
    near = [1 / RETRY_FACTOR <= ratio <= RETRY_FACTOR for ratio in ratios]
    return {
        "goodput_kept": min(kept, default=None),
        "refusal_s_p99": percentiles(delays, "r")["r_p99"],
        "retry_ratio_p50": statistics.median(ratios) if ratios else None,
        "retry_within_factor": sum(near) / len(near) if near else None,
    }


def missed(figures: Mapping[str, Value]) -> list[str]:
    """Return the missed bars; a figure that was not seen misses none."""
    kept, refusal, ratio = (
        figures[name] for name in ("goodput_kept", "refusal_s_p99", "retry_ratio_p50")
    )
    found = []
    if isinstance(kept, float) and kept < GOODPUT_BAR:
        found.append(f"goodput_kept {kept:.3g} is below {GOODPUT_BAR}")
    if isinstance(refusal, float) and refusal > REFUSAL_BAR_S:
        found.append(f"refusal_s_p99 {refusal:.3g} is above {REFUSAL_BAR_S}")
    if isinstance(ratio, float) and not 1 / RETRY_FACTOR <= ratio <= RETRY_FACTOR:
        found.append(f"retry_ratio_p50 {ratio:.3g} is not within a factor of {RETRY_FACTOR:g}")
    return found


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    config = ClusterConfig(
        model=flags.model,
        prefill=flags.prefill,
        decode=flags.decode,
        decode_pp=flags.decode_pp,
        listen="127.0.0.1:0",
        log_level="warning",
        worker_flags=("--max-running", str(flags.max_running)),
        router_flags=("--max-waiting", str(flags.max_waiting)),
    )
    async with running_cluster(config, retry=NO_RETRY) as (cluster, client):
        mean = flags.prompt_tokens
        shape = Shape(
            Lengths("uniform", max(mean // 2, 1), mean * 3 // 2),
            Lengths("uniform", max(flags.output_tokens // 2, 1), flags.output_tokens * 3 // 2),
        )
        planned = plan(256, Arrivals(), shape, seed=flags.seed)
        lab = Lab(
            client,
            make_queries(await client.model_info(), planned, seed=flags.seed),
            random.Random(flags.seed),
        )
        others = OtherLoad()
        before = await _router_figures(cluster)
        capacity = await lab.capacity(flags.capacity_s)
        closed = (await _router_figures(cluster)).since(before)
        cells = []
        for deadline_s in _numbers(flags.deadlines):
            for load in _numbers(flags.loads):
                assert load is not None
                cells.append(LoadCell(load, deadline_s, flags.seconds))
                await lab.run(cells[-1], capacity * load)
                if not flags.json:
                    print(
                        render(cells[-1].name, cells[-1].figures(), as_json=False), file=sys.stderr
                    )
    refused = closed.value("baton_router_retries_total", role="decode", reason="OUT_OF_CAPACITY")
    answered = closed.value("baton_e2e_seconds_count")
    return {
        "topology": f"{flags.prefill} prefill, {flags.decode}x{flags.decode_pp} decode",
        "capacity_per_s": capacity,
        "reservations_refused_per_request": refused / answered if answered else None,
        **{key: value for cell in cells for key, value in cell.figures().items()},
        **bars(cells),
        **others.figures(),
    }


async def _router_figures(cluster: LocalCluster) -> Figures:
    name = next(name for name in cluster.processes if name.startswith(ROUTER))
    port = (await cluster.processes[name].announced(timeout_s=10)).metrics_port
    assert port is not None, "routers of a cluster serve metrics"
    return await asyncio.to_thread(scrape, port)


def _numbers(text: str) -> list[float | None]:
    return [None if part == "none" else float(part) for part in text.split(",")]


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    for name, default in (
        ("prefill", 1),
        ("decode", 1),
        ("decode-pp", 1),
        ("prompt-tokens", 96),
        ("output-tokens", 32),
        ("max-running", 8),
        ("max-waiting", 1024),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds of each cell; default 60"
    )
    parser.add_argument(
        "--capacity-s", type=float, default=20.0, help="seconds of the closed loop; default 20"
    )
    parser.add_argument(
        "--loads", default="0.8,1,2,4", help="loads as multiples of the capacity; default 0.8,1,2,4"
    )
    parser.add_argument(
        "--deadlines", default="5,10,60,none", help="deadlines in seconds; default 5,10,60,none"
    )
    return run_benchmark("overload", parser, measure, missed)


if __name__ == "__main__":
    sys.exit(main())

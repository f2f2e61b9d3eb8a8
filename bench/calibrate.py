"""`python -m bench.calibrate`: what workers take for what they do, measured on a local cluster for `baton simulate`.

--workers of each role are up, and nothing else runs. All do the same at a time, as they take cores, caches and memory
from each other when they serve. Prompts of many lengths, one at a time for each, give what a chunk takes, and what a
message takes beside it; answers drawn beside more and more others, short ones and long ones, give what a round takes.
The costs are least squares of the medians, none below 0, as `sim.costs` describes them; they go to --output. What a
cluster of one machine cannot show, bandwidth between hosts and how long a start takes elsewhere, stays as in --like.
Then each role is measured alone and, in turn with that, while the other is busy, which also gives what a request takes
of a core that draws for others. Prefill workers get a core each, decode workers as many as are left but for the last,
which the router and this program have, and a simulation knows how many those are. With fewer than two cores more than
there are prefill workers, processes lie as in any cluster.

With --compare, as with `--compare 0.6 1.3`, the cluster then gets the same load as its simulation, and every figure is
shown beside the simulated one.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig, demo_model
from baton.load import Outcome, Slo, run_load, summarise
from baton.retry import NO_RETRY
from baton.workload import Arrivals, Lengths, Planned, Shape, make_queries, plan
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.report import Value
from pool.stage.config import WorkerConfig
from router.workers.policy import Policy
from sim.costs import BesideCosts, Costs
from sim.fleet import FleetConfig, simulate
from sim.router import RouterOptions

PROMPTS = (16, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536)  # tokens
ROWS = (1, 2, 4, 8, 12, 16)
CONTEXTS = (32, 256, 768)
ROUND_TOKENS = 48  # of each answer
BESIDE_PROMPT = 1024  # tokens; a worker that is to be busy has
BESIDE_PROMPTS = 2  # such prompts at a time,
BESIDE_ROWS = 4  # or draws as many answers
BESIDE_TOKENS = 512  # of these
POLICY = Policy.LEAST_LOAD  # all workers of a role get as much
BUSY_S = 0.5  # until those that are to be busy are
SHAPE = Shape(Lengths.parse("uniform:512-1536"), Lengths.parse("uniform:8-24"))


@dataclass(frozen=True)
class UnloadedTimes:
    """Of one request; nothing runs beside those that are sent with it."""

    prefill_s: float
    message_s: float  # both ways, and all that is not computing
    token_s: float | None


@dataclass(frozen=True)
class RoleCores:
    """Of a machine on which roles do not meet."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    others: tuple[int, ...]  # the router's, and this program's

    @classmethod
    def of(cls, cores: Sequence[int], num_workers: int) -> "RoleCores | None":
        """For so many workers of each role; None where `cores` are too few."""
        num_decode = min(len(cores) - num_workers - 1, num_workers)
        if num_decode < 1:
            return None
        bounds = num_workers, num_workers + num_decode
        return cls(tuple(cores[:bounds[0]]), tuple(cores[bounds[0]:bounds[1]]), tuple(cores[bounds[1]:]))

    @property
    def by_role(self) -> dict[str, tuple[int, ...]]:
        return {"prefill": self.prefill, "decode": self.decode, "router": self.others}


@contextmanager
def _kept_to(cores: Sequence[int]) -> Iterator[None]:
    """This program."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def measured(client: AsyncBatonClient, like: Costs, num_workers: int, repeats: int,
                   decode_cores: int = 0) -> Costs:
    """Of the workers behind `client`, so many of each role, those of decode on so many cores for all; 0 is enough."""
    info, load = await client.model_info(), await client.load()
    longest = info.max_context_tokens - ROUND_TOKENS
    lengths = [length for length in PROMPTS if length <= longest]
    alone: list[list[UnloadedTimes]] = []
    for length in lengths:
        await _asked(client, num_workers, length, 1)  # may load what it needs
        alone.append([seen for _ in range(repeats) for seen in await _asked(client, num_workers, length, 1)])
    chunk_tokens = int(WorkerConfig.model_fields["chunk_tokens"].default)
    step_s, token_s, pair_s = fitted(
        [(-(-length // chunk_tokens), length, length * (length + 1) / 2) for length in lengths],
        [median(seen.prefill_s for seen in several) for several in alone])
    cases = [(rows, context) for context in CONTEXTS if context <= longest for rows in ROWS]
    rounds = [[seen.token_s for _ in range(-(-repeats // 2))
               for seen in await _asked(client, num_workers * rows, context, ROUND_TOKENS)] for rows, context in cases]
    round_s, row_s, context_s = fitted(
        [(1, rows, rows * (context + ROUND_TOKENS / 2)) for rows, context in cases],
        [median(each for each in several if each is not None) for several in rounds])
    round_s, row_s, context_s = (cost / _crowd(num_workers, decode_cores) for cost in (round_s, row_s, context_s))
    beside, request_s = await measured_beside(client, num_workers, repeats, decode_cores)
    latency_s = median(seen.message_s for several in alone for seen in several) / 2
    num_pages = load.kv_tokens_total // load.page_size // num_workers
    return Costs(
        model=like.model.model_copy(update={
            "page_size": load.page_size, "max_context_tokens": info.max_context_tokens,
            "num_layers": info.num_layers}),
        prefill=like.prefill.model_copy(update={
            "step_s": step_s, "token_s": token_s, "pair_s": pair_s, "chunk_tokens": chunk_tokens,
            "num_pages": num_pages, "max_running": int(WorkerConfig.model_fields["max_running"].default),
            "max_queued": int(WorkerConfig.model_fields["max_queued"].default)}),
        decode=like.decode.model_copy(update={
            "step_s": round_s, "row_s": row_s, "context_s": context_s, "replay_s": token_s, "request_s": request_s,
            "num_pages": num_pages, "max_running": int(WorkerConfig.model_fields["max_running"].default),
            "max_held": load.max_running_requests // num_workers}),
        network=like.network.model_copy(update={"latency_s": latency_s}), beside=beside)


def _crowd(num_workers: int, num_cores: int) -> float:
    """Workers to a core while all compute."""
    return num_workers / (num_cores or num_workers)


@dataclass
class _DrawnBeside:
    """Times of tokens that were drawn while requests of one kind came, and those requests."""

    token_s: list[float] = field(default_factory=list)
    num_requests: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.num_requests / self.seconds

    async def observe(self, client: AsyncBatonClient, num_workers: int, prompt_tokens: int) -> None:
        """Draw once; 0 tokens: no requests come. The others are handed over."""
        num_others = num_workers * BESIDE_PROMPTS if prompt_tokens else 0
        async with _kept_busy(client, num_others, prompt_tokens, 2) as ended:
            num_before, began_s = len(ended), time.monotonic()
            seen = await _asked(client, num_workers * BESIDE_ROWS, PROMPTS[0], ROUND_TOKENS)
            self.token_s += [each.token_s for each in seen if each.token_s is not None]
            self.num_requests += len(ended) - num_before
            self.seconds += time.monotonic() - began_s


async def measured_beside(client: AsyncBatonClient, num_workers: int, repeats: int, decode_cores: int
                          ) -> tuple[BesideCosts, float]:
    """How many times as long either role takes while the other is busy; and what a request takes of a core that draws,
    0 where roles share their cores: short prompts have hardly more than that, long ones the rest, too."""
    prefill: list[list[float]] = [[], []]  # alone, and beside the other role
    alone, short, long = _DrawnBeside(), _DrawnBeside(), _DrawnBeside()
    for _ in range(repeats):
        for place, others in enumerate((0, num_workers * BESIDE_ROWS)):
            async with _kept_busy(client, others, PROMPTS[0], BESIDE_TOKENS):
                prefill[place] += [seen.prefill_s for seen in await _asked(client, num_workers, BESIDE_PROMPT, 1)]
        for drawn, prompt_tokens in ((alone, 0), (short, PROMPTS[0]), (long, BESIDE_PROMPT)):
            await drawn.observe(client, num_workers, prompt_tokens)
    prefill_beside = max(1.0, median(prefill[1]) / median(prefill[0]))
    longer = median(long.token_s) / median(alone.token_s)
    if not decode_cores:
        return BesideCosts(prefill=prefill_beside, decode=max(1.0, longer)), 0.0
    request_s = max(0.0, 1 - median(alone.token_s) / median(short.token_s)) / (short.rate / decode_cores)
    left = max(0.1, 1 - request_s * long.rate / decode_cores)  # of a core, for drawing
    return BesideCosts(prefill=prefill_beside, decode=max(1.0, longer * left), decode_cores=decode_cores), request_s


@asynccontextmanager
async def _kept_busy(client: AsyncBatonClient, count: int, prompt_tokens: int, output_tokens: int
                     ) -> AsyncIterator[list[UnloadedTimes]]:
    """So many requests are under way at any time of the block. Yields those that have ended."""
    ended: list[UnloadedTimes] = []

    async def one_after_the_other() -> None:
        while True:
            ended.extend(await _asked(client, 1, prompt_tokens, output_tokens))

    tasks = [asyncio.create_task(one_after_the_other()) for _ in range(count)]
    try:
        await asyncio.sleep(BUSY_S if count else 0.0)
        yield ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def fitted(causes: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """What each cause takes: least squares of relative errors; a cause that would take less than nothing takes none,
    and the others are fitted without it."""
    weights = 1 / np.asarray(seconds)
    matrix, left = np.asarray(causes, dtype=float) * weights[:, None], list(range(len(causes[0])))
    while True:
        found = np.linalg.lstsq(matrix[:, left], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            break
        del left[int(found.argmin())]
    return tuple(float(found[left.index(cause)]) if cause in left else 0.0 for cause in range(len(causes[0])))


async def _asked(client: AsyncBatonClient, count: int, prompt_tokens: int, output_tokens: int) -> list[UnloadedTimes]:
    """So many requests at once; none was asked before."""
    planned = [Planned(0.0, prompt_tokens, output_tokens)] * count
    queries = make_queries(await client.model_info(), planned, seed=time.monotonic_ns())
    return [_seen(outcome) for outcome in await run_load(client, queries, [0.0] * count)]


def _seen(outcome: Outcome) -> UnloadedTimes:
    assert outcome.timings is not None, outcome.error
    assert outcome.timings.prefill_s is not None
    assert outcome.ttft_s is not None
    waited_s = (outcome.timings.router_queue_s or 0.0) + (outcome.timings.prefill_queue_s or 0.0)
    return UnloadedTimes(outcome.timings.prefill_s, max(0.0, outcome.ttft_s - outcome.timings.prefill_s - waited_s),
                outcome.tpot_s)


def capacity(costs: Costs, shape: Shape, num_prefill: int, num_decode: int) -> float:
    """Requests per second that such workers can serve while both roles are busy, by their costs alone."""
    mean_prompt, mean_output = ((lengths.first + lengths.second) / 2 for lengths in (shape.prompt, shape.output))
    num_chunks = -(-mean_prompt // costs.prefill.chunk_tokens)
    prompt_s = costs.prefill.chunk_s(round(mean_prompt), mean_prompt ** 2 / 2) + (num_chunks - 1) * costs.prefill.step_s
    prompt_s *= costs.beside.prefill * _crowd(num_prefill, costs.beside.prefill_cores)
    rows = costs.decode.max_running
    answer_s = mean_output * costs.decode.round_s(rows, rows * (mean_prompt + mean_output / 2)) / rows
    answer_s = (answer_s * costs.beside.decode + costs.decode.request_s) * _crowd(num_decode, costs.beside.decode_cores)
    return min(num_prefill / prompt_s, num_decode / answer_s)


async def compared(client: AsyncBatonClient, config: FleetConfig, load: float, seconds: float) -> dict[str, Value]:
    """Figures of the workers behind `client`, and of their simulation by `config`."""
    rate, seed = load * capacity(config.costs, SHAPE, config.num_prefill, config.num_decode), config.seed
    planned = plan(round(rate * seconds), Arrivals(rate=rate), SHAPE, seed=seed)
    began_s = time.monotonic()
    outcomes = await run_load(client, make_queries(await client.model_info(), planned, seed=seed),
                              [item.at_s for item in planned])
    real = summarise(outcomes, Slo(1, 1), time.monotonic() - began_s)
    run = await asyncio.to_thread(simulate, config, planned)
    ours = summarise(run.outcomes, Slo(1, 1), run.duration_s)
    figures: dict[str, Value] = {}
    for name in ("requests_per_s", "failed", "ttft_s_p50", "ttft_s_p90", "tpot_s_p50", "tpot_s_p90"):
        figures[f"x{load:g}_{name}"], figures[f"x{load:g}_{name}_simulated"] = real[name], ours[name]
    return figures


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    cores = RoleCores.of(usable, flags.workers)
    cluster = ClusterConfig(model=flags.model, prefill=flags.workers, decode=flags.workers, listen="127.0.0.1:0",
                            log_level="warning", cores={} if cores is None else cores.by_role,
                            router_flags=("--policy", POLICY))
    with nullcontext() if cores is None else _kept_to(cores.others):
        return await _measured_and_compared(flags, cluster, 0 if cores is None else len(cores.decode))


async def _measured_and_compared(flags: argparse.Namespace, cluster: ClusterConfig, decode_cores: int
                                 ) -> dict[str, Value]:
    began_s = time.monotonic()
    like = Costs() if flags.like is None else Costs.read(flags.like)
    async with running_cluster(cluster, retry=NO_RETRY) as (_, client):
        costs = await measured(client, like, flags.workers, flags.repeats, decode_cores)
        flags.output.write_text(costs.model_dump_json(indent=2) + "\n")
        figures = _figures(costs, flags.workers, time.monotonic() - began_s)
        config = FleetConfig(flags.workers, flags.workers, costs=costs, router=RouterOptions(policy=POLICY),
                             seed=flags.seed)
        for load in flags.compare:
            figures |= await compared(client, config, load, flags.seconds)
    return figures


def _figures(costs: Costs, num_workers: int, took_s: float) -> dict[str, Value]:
    return {
        "calibrated_in_s": took_s, "prefill_step_s": costs.prefill.step_s,
        "prefill_token_s": costs.prefill.token_s, "prefill_pair_s": costs.prefill.pair_s,
        "decode_step_s": costs.decode.step_s, "decode_row_s": costs.decode.row_s,
        "decode_context_s": costs.decode.context_s, "decode_request_s": costs.decode.request_s,
        "latency_s": costs.network.latency_s, "prefill_beside": costs.beside.prefill,
        "decode_beside": costs.beside.decode, "capacity_per_s": capacity(costs, SHAPE, num_workers, num_workers)}


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument("--model", type=Path, default=demo_model(), help="model directory; default: the demo model")
    parser.add_argument("--output", type=Path, default=Path("costs.json"), help="default costs.json")
    parser.add_argument("--like", type=Path, help="costs of which those are kept that are not measured")
    parser.add_argument("--workers", type=int, default=2, help="of each role; default 2")
    parser.add_argument("--repeats", type=int, default=5, help="of each prompt, and half as many of rows; default 5")
    parser.add_argument("--compare", type=float, nargs="*", default=[], metavar="LOAD",
                        help="compare with a simulation at these loads, 1 being what the workers can serve")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load that is compared; default 20")
    parser.add_argument("--seed", type=int, default=0, help="of those loads")
    return run_benchmark("calibrate", parser, measure)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.calibrate`: costs of workers, measured on a local cluster for `baton simulate`.

--workers of each role run on the cores of this machine and get several short loads: long and short
prompts, long and short responses, few and many requests at a time. Each load gives the core seconds
of prefill workers, of decode workers, and of router and client together. The costs of requests,
tokens and steps are the nonnegative least squares solution, as `sim.costs` describes them. A last
load exceeds the capacity of the cluster. The ratio of its duration to that of its simulation gives
the last cost: the speed of cores with all processes busy. The costs are written to --output. Costs
that one machine cannot show, such as bandwidth between hosts and startup times, are copied from
--like.

With --compare, as in `--compare 0.6 2`, the cluster then gets other loads of that shape, and the
short ones again after each. Every figure is shown next to that of a simulation with the costs from
right before and right after.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig, demo_model
from baton.load import Slo, summarize
from baton.retry import NO_RETRY
from baton.values import ModelInfo
from baton.workload import Lengths, Shape
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.report import Value
from bench.spent import DECODE, OTHERS, PREFILL, Asked, ClosedLoad, Meter, OpenLoad, Spent
from pool.stage.config import WorkerConfig
from router.workers.policy import Policy
from sim.costs import Costs, MachineCosts
from sim.fleet import FleetConfig, simulate
from sim.router import RouterOptions

POLICY = Policy.LEAST_LOAD  # all workers of a role get equal shares
SHAPE = Shape(Lengths.parse("uniform:512-1536"), Lengths.parse("uniform:8-24"))
SHAPES = (  # with the number of concurrent requests, for each worker of a role
    (SHAPE, 6),
    (SHAPE, 1),
    (Shape(Lengths.parse("uniform:16-128"), SHAPE.output), 4),
    (Shape(SHAPE.prompt, Lengths.parse("uniform:1-4")), 4),
    (Shape(Lengths.parse("uniform:128-512"), SHAPE.output), 4),
    (Shape(Lengths.parse("uniform:16-128"), Lengths.parse("uniform:32-64")), 6),
)
WARM_S = 2.0  # of the first of these, before anything is measured
# multiples of the capacity by the costs, and of --seconds-each
OVERLOAD = 1.6
OVERLOADS = 2
LATENCY_S = 3e-4  # of a message on one machine, besides the computation at its ends
ONE_BYTE = 1  # of a token handed over there: it costs measured cores, and no bandwidth
SLO = Slo(1, 1)


@dataclass(frozen=True)
class Calibration:
    """Results of several loads and an overload."""

    spent: tuple[Spent, ...]
    overloads: tuple[Asked, ...]

    def __add__(self, other: "Calibration") -> "Calibration":
        return Calibration(self.spent + other.spent, self.overloads + other.overloads)


@dataclass(frozen=True)
class Calibrator:
    """Calibrator of a cluster with `num_workers` of each role; `like`: other costs."""

    client: AsyncBatonClient
    info: ModelInfo
    meter: Meter
    like: Costs
    num_workers: int
    seconds_each: float

    async def run(self, seed: int) -> Calibration:
        """Run all loads once."""
        spent = []
        for number, (shape, at_once) in enumerate(SHAPES):
            load = ClosedLoad(
                _within(shape, self.info), at_once * self.num_workers, self.seconds_each
            )
            spent.append((await self.meter.spent(self.client, self.info, load, seed + number))[0])
        rate = OVERLOAD * capacity(self.fitted(spent), SHAPE, self.num_workers)
        overload = OpenLoad(_within(SHAPE, self.info), rate, OVERLOADS * self.seconds_each)
        more, asked = await self.meter.spent(self.client, self.info, overload, seed + len(SHAPES))
        return Calibration((*spent, more), (asked,))

    def fitted(self, spent: Sequence[Spent]) -> Costs:
        """Return the costs fitted to the loads."""
        prefill = fitted(
            [(each.requests, each.chunks, each.prompt_tokens) for each in spent],
            [each.core_s[PREFILL] for each in spent],
        )
        causes = [(each.requests, each.prompt_tokens, each.rounds, each.sampled) for each in spent]
        decode = fitted(causes, [each.core_s[DECODE] for each in spent])
        others = fitted(causes, [each.core_s[OTHERS] for each in spent])
        num_cores = len(os.sched_getaffinity(0))
        like = self.like
        return like.model_copy(
            update={
                "prefill": like.prefill.model_copy(
                    update={
                        "request_s": prefill[0],
                        "step_s": prefill[1],
                        "token_s": prefill[2],
                        "pair_s": 0.0,
                    }
                ),
                "decode": like.decode.model_copy(
                    update={
                        "request_s": decode[0],
                        "landed_s": decode[1],
                        "step_s": decode[2],
                        "row_s": decode[3],
                        "context_s": 0.0,
                    }
                ),
                "machine": MachineCosts(
                    cores=num_cores,
                    request_s=others[0],
                    prompt_token_s=others[1],
                    round_s=others[2],
                    token_s=others[3],
                ),
            }
        )

    def costs(self, found: Calibration) -> Costs:
        """Return all costs; takes some seconds."""
        costs = self.fitted(found.spent)
        speed = 1.0
        for _ in range(2):
            took_s = self.overload_s(_at(costs, speed), found)
            speed *= took_s / sum(asked.seconds for asked in found.overloads)
        return _at(costs, speed)

    def overload_s(self, costs: Costs, found: Calibration) -> float:
        """Return the simulated duration of all overloads, in seconds."""
        return sum(
            simulate(self.fleet(costs, 0), asked.planned).duration_s for asked in found.overloads
        )

    def fleet(self, costs: Costs, seed: int) -> FleetConfig:
        """Return the cluster as a simulated fleet."""
        return FleetConfig(
            self.num_workers,
            self.num_workers,
            costs=costs,
            router=RouterOptions(policy=POLICY),
            seed=seed,
        )

    async def compared(
        self, load: float, seconds: float, before: Calibration, seed: int
    ) -> tuple[dict[str, Value], Calibration]:
        """Return the figures of cluster and simulation, and the calibration after them."""
        rate = load * capacity(await asyncio.to_thread(self.costs, before), SHAPE, self.num_workers)
        asked = await OpenLoad(_within(SHAPE, self.info), rate, seconds).ask(
            self.client, self.info, seed
        )
        after = await self.run(seed + 100)
        costs = await asyncio.to_thread(self.costs, before + after)
        run = await asyncio.to_thread(simulate, self.fleet(costs, seed), asked.planned)
        real = summarize(asked.outcomes, SLO, asked.seconds)
        ours = summarize(run.outcomes, SLO, run.duration_s)
        figures: dict[str, Value] = {}
        for name in (
            "requests",
            "requests_per_s",
            "failed",
            "ttft_s_p50",
            "ttft_s_p90",
            "tpot_s_p50",
            "tpot_s_p90",
        ):
            figures[f"x{load:g}_{name}"] = real[name]
            figures[f"x{load:g}_{name}_simulated"] = ours[name]
        return figures, after


def fitted(causes: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the cost of each cause, by least squares of relative errors.

    A cause with a negative cost gets 0, and the others are fitted without it.
    """
    weights = 1 / np.asarray(seconds)
    matrix = np.asarray(causes, dtype=float) * weights[:, None]
    left = list(range(len(causes[0])))
    while True:
        found = np.linalg.lstsq(matrix[:, left], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            break
        del left[int(found.argmin())]
    return tuple(
        float(found[left.index(cause)]) if cause in left else 0.0 for cause in range(len(causes[0]))
    )


def capacity(costs: Costs, shape: Shape, num_workers: int) -> float:
    """Return the capacity of `num_workers` of each role by their costs, in requests per second.

    All cores are busy, and every response is decoded in rounds of its own.
    """
    prompt, output = (
        (lengths.first + lengths.second) / 2 for lengths in (shape.prompt, shape.output)
    )
    prefill = costs.prefill
    decode = costs.decode
    machine = costs.machine
    prompt_s = (
        prefill.request_s
        + -(-prompt // prefill.chunk_tokens) * prefill.step_s
        + prompt * prefill.token_s
    )
    answer_s = (
        decode.request_s + prompt * decode.landed_s + (output - 1) * decode.round_s(1, prompt)
    )
    others_s = (
        machine.request_s
        + prompt * machine.prompt_token_s
        + (output - 1) * (machine.round_s + machine.token_s)
    )
    on_cores = (
        machine.cores * machine.speed / (prompt_s + answer_s + others_s)
        if machine.cores
        else float("inf")
    )
    return min(on_cores, num_workers / prompt_s, num_workers / answer_s)


def _at(costs: Costs, speed: float) -> Costs:
    """Return the costs for cores of this speed."""
    return costs.model_copy(update={"machine": costs.machine.model_copy(update={"speed": speed})})


def _within(shape: Shape, info: ModelInfo) -> Shape:
    """Return the shape with prompts cut to the model's context."""
    most = info.max_context_tokens - shape.output.second
    return replace(
        shape,
        prompt=replace(
            shape.prompt, first=min(shape.prompt.first, most), second=min(shape.prompt.second, most)
        ),
    )


async def like_cluster(
    client: AsyncBatonClient, info: ModelInfo, like: Costs, num_workers: int
) -> Costs:
    """Return the costs with the sizes of the workers of `client`."""
    load = await client.load()
    chunk_tokens, max_running, max_queued = (
        int(WorkerConfig.model_fields[name].default)
        for name in ("chunk_tokens", "max_running", "max_queued")
    )
    num_pages = load.kv_tokens_total // load.page_size // num_workers
    return like.model_copy(
        update={
            "model": like.model.model_copy(
                update={
                    "page_size": load.page_size,
                    "max_context_tokens": info.max_context_tokens,
                    "num_layers": info.num_layers,
                    "token_bytes": ONE_BYTE,
                }
            ),
            "prefill": like.prefill.model_copy(
                update={
                    "chunk_tokens": chunk_tokens,
                    "grid": load.page_size,
                    "num_pages": num_pages,
                    "max_running": max_running,
                    "max_queued": max_queued,
                }
            ),
            "decode": like.decode.model_copy(
                update={
                    "num_pages": num_pages,
                    "max_running": max_running,
                    "max_held": load.max_running_requests // num_workers,
                }
            ),
            "network": like.network.model_copy(update={"latency_s": LATENCY_S}),
        }
    )


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    cluster = ClusterConfig(
        model=flags.model,
        prefill=flags.workers,
        decode=flags.workers,
        listen="127.0.0.1:0",
        log_level="warning",
        router_flags=("--policy", POLICY),
    )
    like = Costs() if flags.like is None else Costs.read(flags.like)
    began_s = time.monotonic()
    async with running_cluster(cluster, retry=NO_RETRY) as (running, client):
        info = await client.model_info()
        calibrator = Calibrator(
            client,
            info,
            await Meter.of(running),
            await like_cluster(client, info, like, flags.workers),
            flags.workers,
            flags.seconds_each,
        )
        await ClosedLoad(_within(SHAPE, info), 2 * flags.workers, WARM_S).ask(
            client, info, flags.seed + 10_000
        )
        found = await calibrator.run(flags.seed + 1000)
        costs = await asyncio.to_thread(calibrator.costs, found)
        flags.output.write_text(costs.model_dump_json(indent=2) + "\n")
        figures = _figures(costs, flags.workers, time.monotonic() - began_s)
        figures["overload_s"] = sum(asked.seconds for asked in found.overloads)
        figures["overload_s_simulated"] = await asyncio.to_thread(
            calibrator.overload_s, costs, found
        )
        for number, load in enumerate(flags.compare):
            compared, found = await calibrator.compared(
                load, flags.seconds, found, flags.seed + number
            )
            figures |= compared
    return figures


def _figures(costs: Costs, num_workers: int, took_s: float) -> dict[str, Value]:
    parts = {
        "prefill": ("request_s", "step_s", "token_s"),
        "decode": ("request_s", "landed_s", "step_s", "row_s"),
        "machine": ("request_s", "prompt_token_s", "round_s", "token_s", "speed"),
    }
    return {
        "calibrated_in_s": took_s,
        "capacity_per_s": capacity(costs, SHAPE, num_workers),
        **{
            f"{part}_{name}": getattr(getattr(costs, part), name)
            for part, names in parts.items()
            for name in names
        },
    }


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("costs.json"), help="output file; default costs.json"
    )
    parser.add_argument(
        "--like", type=Path, help="file of costs to keep for operations that are not measured"
    )
    parser.add_argument("--workers", type=int, default=2, help="workers of each role; default 2")
    parser.add_argument(
        "--seconds-each",
        type=float,
        default=5.0,
        help="seconds of each load that costs are measured under; default 5",
    )
    parser.add_argument(
        "--compare",
        type=float,
        nargs="*",
        default=[],
        metavar="LOAD",
        help="compare with a simulation at these loads, 1 being what the workers can serve",
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds of each load of --compare; default 20"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the loads of --compare; costs are measured with other seeds",
    )
    return run_benchmark("calibrate", parser, measure)


if __name__ == "__main__":
    sys.exit(main())

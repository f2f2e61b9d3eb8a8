"""`python -m bench.planner`: the planner against the best static split, over random load histories.

Each history is a fleet of three to six workers and a load of phases: the rate jumps by factors of 1
to 24, and the lengths of prompts and responses change. In half of the histories a worker dies and
is away for 0 to 130 s. The planner knows nothing before the first request. Its goodput is compared
with that of the static split that turns out best for the history; all are simulated
(`sim.fleet`).

`ratio_*` are quantiles of the planner's goodput over the best split's; `share_better` and
`share_near` are the shares of histories in which it is at least 1 and at least 0.99.
"""

import argparse
import multiprocessing
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from baton.load import Slo
from baton.workload import Planned
from bench.command import benchmark_flags, run_benchmark
from bench.report import Value
from sim.costs import Costs, DecodeCosts, PrefillCosts
from sim.faults import Mishap, MishapKind
from sim.fleet import FleetConfig, FleetRun, simulate

SLO = Slo(2.0, 0.05)
COSTS = Costs(
    prefill=PrefillCosts(start_s=0), decode=DecodeCosts(max_running=64, max_held=96, start_s=0)
)
FACTORS = (1, 2, 4, 8, 16, 24)
PROMPT_TOKENS = (500, 2000, 4000, 8000)
OUTPUT_TOKENS = (50, 200, 600, 1500)
MOST_PROMPT, MOST_OUTPUT = 30_000, 4_000
# Of `COSTS`, roughly: prompt tokens per second, and seconds per token of a response with its share
# of a worker.
PROMPT_RATE, OUTPUT_S = 12_500, 0.0165 / 64


@dataclass(frozen=True)
class History:
    """A load, its fleet, and the death of one worker: index, time and time away, or None."""

    load: tuple[Planned, ...]
    num_workers: int
    death: tuple[int, float, float] | None

    def faults(self, names: list[str]) -> tuple[Mishap, ...]:
        """Return the faults of a fleet of workers with these names."""
        if self.death is None:
            return ()
        index, at_s, for_s = self.death
        return (Mishap(MishapKind.KILL, names[index], at_s, for_s),)


@dataclass(frozen=True)
class Compared:
    """Good requests of one history: by the planner, and by each number of decode workers."""

    seed: int
    num_requests: int
    planner: int
    static: dict[int, int]
    num_switches: int

    @property
    def ratio(self) -> float:
        return self.planner / max(*self.static.values(), 1)


def history_of(seed: int, most: int) -> History:
    """Return a history of at most `most` requests.

    At a factor of 24 the load takes 40 to 85 % of what the best split could serve. The first phase
    has the factor 1.
    """
    rng = random.Random(f"history/{seed}")
    num_workers = rng.randint(3, 6)
    peak = rng.uniform(0.4, 0.85)
    prompt, output = rng.choice(PROMPT_TOKENS), rng.choice(OUTPUT_TOKENS)
    load: list[Planned] = []
    began_s = 0.0
    while len(load) < most:
        lasts_s, factor = rng.uniform(15, 120), rng.choice(FACTORS)
        if not load:
            lasts_s, factor = max(lasts_s, 40.0), 1
        if rng.random() < 0.5:
            prompt = rng.choice(PROMPT_TOKENS)
        if rng.random() < 0.5:
            output = rng.choice(OUTPUT_TOKENS)
        rate = _most_rate(num_workers, prompt, output) * peak * factor / FACTORS[-1]
        load += list(_phase(rng, began_s, lasts_s, rate, prompt, output))[: most - len(load)]
        began_s += lasts_s
    death = (rng.randrange(num_workers), rng.uniform(0.2, 0.8) * load[-1].at_s, rng.uniform(0, 130))
    return History(tuple(load), num_workers, death if rng.random() < 0.5 else None)


def _most_rate(num_workers: int, prompt: int, output: int) -> float:
    """Return roughly the most requests per second that a static split serves."""
    return max(
        min(
            (num_workers - num_decode) * PROMPT_RATE / prompt,
            num_decode / (output * OUTPUT_S),
        )
        for num_decode in range(1, num_workers)
    )


def _phase(
    rng: random.Random, began_s: float, lasts_s: float, rate: float, prompt: int, output: int
) -> Iterator[Planned]:
    at_s = began_s + rng.expovariate(rate)
    while at_s < began_s + lasts_s:
        yield Planned(
            at_s,
            min(MOST_PROMPT, 1 + round(rng.expovariate(1 / prompt))),
            min(MOST_OUTPUT, 1 + round(rng.expovariate(1 / output))),
        )
        at_s += rng.expovariate(rate)


def _good(run: FleetRun) -> int:
    return sum(map(SLO.is_met, run.outcomes))


def compare(seed: int, most: int) -> Compared:
    """Simulate a history with the planner and with every static split."""
    history = history_of(seed, most)
    count = history.num_workers
    static = {}
    for num_decode in range(1, count):
        num_prefill = count - num_decode
        names = [f"prefill-{index}" for index in range(num_prefill)]
        names += [f"decode-{index}" for index in range(num_decode)]
        config = FleetConfig(num_prefill, num_decode, costs=COSTS, faults=history.faults(names))
        static[num_decode] = _good(simulate(config, history.load))
    planned = simulate(
        FleetConfig(
            0,
            0,
            num_both=count,
            costs=COSTS,
            promise=SLO,
            faults=history.faults([f"worker-{index}" for index in range(count)]),
        ),
        history.load,
    )
    num_switches = len({change.at_s for change in planned.switches})
    return Compared(seed, len(history.load), _good(planned), static, num_switches)


def _compare(arguments: tuple[int, int]) -> Compared:
    return compare(*arguments)


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    seeds = range(flags.seed, flags.seed + flags.histories)
    ratios = []
    with multiprocessing.get_context("spawn").Pool(flags.processes) as pool:
        work = [(seed, flags.requests) for seed in seeds]
        for found in pool.imap(_compare, work):
            print(f"{found} {found.ratio:.3f}", file=sys.stderr, flush=True)
            ratios.append(found.ratio)
    ratios.sort()
    return {
        "histories": len(ratios),
        "ratio_min": round(ratios[0], 4),
        "ratio_p01": round(ratios[len(ratios) // 100], 4),
        "ratio_p10": round(ratios[len(ratios) // 10], 4),
        "ratio_p50": round(median(ratios), 4),
        "ratio_max": round(ratios[-1], 4),
        "share_better": round(sum(ratio >= 1 for ratio in ratios) / len(ratios), 4),
        "share_near": round(sum(ratio >= 0.99 for ratio in ratios) / len(ratios), 4),
    }


def main() -> int:
    parser = benchmark_flags(__doc__)
    for name, default in (("histories", 100), ("requests", 500), ("seed", 0), ("processes", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    return run_benchmark("planner", parser, measure)


if __name__ == "__main__":
    sys.exit(main())

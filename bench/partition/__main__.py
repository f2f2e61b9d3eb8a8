"""`python -m bench.partition`: behavior of a cluster whose network edges are cut and restored.

Every process has its own network namespace and address. Each edge between two roles, and between
the stages of a pool, is cut for some seconds under load, both ways and one way, and restored. Every
response is compared with that of a single process. With `--random-layout` a seed draws the pools,
their settings, the requests and the cuts, between any two processes, and clients retry. Needs
`ip` (iproute2) and user namespaces, not root. The exit code is 77 if these are not permitted. It is
1 if a response was wrong, lost or hung, a process ended, or resources were not released.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from baton.cluster_config import demo_model
from baton.retry import NO_RETRY
from bench.partition.grid import (
    Cell,
    CellResult,
    Edge,
    ProcessPair,
    Way,
    grid,
    plain_layout,
    process_names,
)
from bench.report import Value, render
from bench.storm.layouts import draft_of, random_layout
from bench.storm.lines import LineFile
from bench.storm.schedule import leads
from bench.storm.storm import PATIENT
from runtime.errors import BatonError, ConfigError
from tests.support.network.hosts import become_private, is_private

REFUSED = 77
CUTS_S = (1.0, 5.0, 12.0)
MODULE = "bench.partition"


def spelled(result: CellResult) -> str:
    cell = result.cell
    line = (
        f"{cell.edge} {cell.way} {cell.seconds:g} s: {sum(result.counts.fates.values())} requests, "
        f"{result.num_failed} failed, longest wait {result.longest_wait_s:.2f} s, "
        f"settled after {result.settled_s:.2f} s, held {result.held.total}, {result.num_restarts} restarts"
    )
    return "\n    ".join([line, *sorted(set(result.failures))])


def figures(results: list[CellResult]) -> dict[str, Value]:
    """Return the sums, and the longest wait by edge, way and duration of the cut."""
    return {
        "cells": len(results),
        "requests": sum(result.counts.num_requests for result in results),
        "failed": sum(result.num_failed for result in results),
        "wrong": sum(result.counts.num_wrong for result in results),
        "hung": sum(result.counts.num_hung for result in results),
        "leaked": sum(result.held.total for result in results),
        "restarts": sum(result.num_restarts for result in results),
        "longest_wait_s": max((result.longest_wait_s for result in results), default=0.0),
        "settled_s": max((result.settled_s for result in results), default=0.0),
        **{
            f"wait_s {result.cell.edge} {result.cell.way} {result.cell.seconds:g}": result.longest_wait_s
            for result in results
        },
    }


def random_cells(names: Sequence[str], count: int, *, seed: int) -> list[Cell]:
    """Draw cuts between any two processes; a router speaks to leaders only."""
    dice = random.Random(seed)
    pairs = [
        ProcessPair(first, second)
        for first, second in combinations(names, 2)
        if first != "router" or leads(second)
    ]
    return [
        Cell(dice.choice(pairs), dice.choice(list(Way)), dice.choice(CUTS_S)) for _ in range(count)
    ]


async def measure(flags: argparse.Namespace) -> list[CellResult]:
    if flags.random_layout:
        layout = random_layout(flags.seed, draft_of(flags.model), may_limit_clients=False)
        names = process_names(flags.model, layout)
        cells = random_cells(names, flags.cells, seed=flags.seed)
        print(f"layout: {layout}", file=sys.stderr)
    else:
        layout = plain_layout(flags.pools)
        cells = [
            Cell(Edge(edge), Way(way), float(seconds))
            for way, seconds in (cut.split(":") for cut in flags.cuts.split(","))
            for edge in flags.edges.split(",")
        ]
    results = []
    async with grid(
        flags.model,
        layout,
        retry=PATIENT if flags.random_layout else NO_RETRY,
        rate=flags.rate,
        timeout_s=flags.timeout,
        seed=flags.seed,
        sink=LineFile(flags.log),
    ) as cut:
        for number, cell in enumerate(cells):
            results.append(await cut.run(cell, seed=flags.seed + number))
            print(spelled(results[-1]), file=sys.stderr, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuts = ",".join(f"{way}:{seconds}" for seconds in (1, 5, 30) for way in Way)
    for name, default, what in (
        ("edges", ",".join(Edge), "edges to cut"),
        ("cuts", cuts, "cuts of each edge as WAY:SECONDS"),
    ):
        parser.add_argument(f"--{name}", default=default, help=f"{what}; default {default}")
    for name, number in (("rate", 4.0), ("timeout", 90.0)):
        parser.add_argument(f"--{name}", type=float, default=number, help=f"default {number}")
    parser.add_argument(
        "--pools",
        type=int,
        default=2,
        help="pools of each role; with 1, requests may fail; default 2",
    )
    parser.add_argument(
        "--random-layout", action="store_true", help="draw pools, settings, requests and cuts"
    )
    parser.add_argument("--cells", type=int, default=6, help="number of random cuts; default 6")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument("--log", type=Path, help="file for the output of all processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    try:
        if not is_private():
            become_private(MODULE)
        results = asyncio.run(measure(flags))
    except ConfigError as error:
        print(f"bench.partition: {error}", file=sys.stderr)
        return REFUSED
    except BatonError as error:
        print(f"bench.partition: {error}", file=sys.stderr)
        return 1
    values = figures(results)
    print(render("partition", values, as_json=flags.json))
    bars = ("wrong", "hung", "leaked", "restarts", *(("failed",) if flags.pools > 1 else ()))
    return 1 if any(values[name] for name in bars) else 0


if __name__ == "__main__":
    sys.exit(main())

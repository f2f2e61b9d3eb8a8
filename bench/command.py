"""Common parts of benchmarks with a cluster: cluster, command line, report and exit code."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig
from baton.retry import DEFAULT_RETRY, Retry
from baton.values import ClusterStatus
from bench.report import Value, render
from runtime.errors import BatonError

LOOK_S = 0.02  # between two looks at a router's workers


@asynccontextmanager
async def running_cluster(
    config: ClusterConfig, *, retry: Retry = DEFAULT_RETRY
) -> AsyncIterator[tuple[LocalCluster, AsyncBatonClient]]:
    """Run a cluster whose lines go to stderr; yield it with a client of its router."""
    async with (
        LocalCluster(
            config, sink=lambda name, line: print(f"{name}: {line}", file=sys.stderr)
        ) as cluster,
        AsyncBatonClient(cluster.address, retry=retry) as client,
    ):
        yield cluster, client


async def until(client: AsyncBatonClient, holds: Callable[[ClusterStatus], bool]) -> None:
    """Return when `holds` is true of the status; the caller limits the wait."""
    while not holds(await client.cluster_status()):  # noqa: ASYNC110 - a router has no event for it
        await asyncio.sleep(LOOK_S)


def benchmark_flags(text: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows `text`, the docstring of the benchmark, unchanged."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run_benchmark(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Coroutine[Any, Any, Mapping[str, Value]]],
    problems: Callable[[Mapping[str, Value]], Sequence[str]] = lambda values: (),
) -> int:
    """Measure as the command line says, print the report and return the exit code.

    The code is 1 for an error, or if `problems` finds any in the figures.
    """
    flags = parser.parse_args()
    try:
        values = asyncio.run(measure(flags))
    except BatonError as error:
        print(f"bench.{name}: {error}", file=sys.stderr)
        return 1
    print(render(name, values, as_json=flags.json))
    found = problems(values)
    for problem in found:
        print(f"bench.{name}: {problem}", file=sys.stderr)
    return 1 if found else 0


def failed_requests(values: Mapping[str, Value]) -> list[str]:
    """Return the problem of a report with `failed` requests."""
    return [f"{values['failed']} requests failed"] if values["failed"] else []

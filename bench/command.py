"""What benchmarks that start a cluster have in common: the cluster, their command line, how they
report and end."""

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
    """The cluster, whose lines go to stderr, and a client of its router."""
    async with (
        LocalCluster(
            config, sink=lambda name, line: print(f"{name}: {line}", file=sys.stderr)
        ) as cluster,
        AsyncBatonClient(cluster.address, retry=retry) as client,
    ):
        yield cluster, client


async def until(client: AsyncBatonClient, holds: Callable[[ClusterStatus], bool]) -> None:
    """Returns with the first status of which it holds. The caller limits the wait."""
    while not holds(await client.cluster_status()):  # noqa: ASYNC110 - a router has no event for it
        await asyncio.sleep(LOOK_S)


def benchmark_flags(text: str | None) -> argparse.ArgumentParser:
    """A parser that shows `text`, the benchmark's docstring, as it is."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def run_benchmark(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Coroutine[Any, Any, Mapping[str, Value]]],
    problems: Callable[[Mapping[str, Value]], Sequence[str]] = lambda values: (),
) -> int:
    """Measures as the command line says and prints the report. Returns the exit code: 1 for an
    error, and where `problems` finds any in the figures."""
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
    """Of a report with `failed`."""
    return [f"{values['failed']} requests failed"] if values["failed"] else []

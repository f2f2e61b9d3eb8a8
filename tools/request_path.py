"""List of the files that one plain request runs through: `python -m tools.request_path`.

The whole cluster runs in this process (a prefill pool and a decode pool of two stages, real gRPC
and UCX). A file of the product counts if the request, between its first message and its last
event, enters one of the file's functions that the idle cluster does not enter. The request is sent
several times, and must enter the function each time. The idle cluster is observed for some seconds
before and after the request: reports, health checks and waiting threads belong to it, although
they run during the request. A file does not count if the request enters only functions that the
idle cluster also enters.

Also shown: the files of which the request enters any function, and those of the idle cluster; and
by package the *visits*. A visit is a function of another file that a function calls, counted once
however often it is called. It is a jump of a reader that follows the request.
"""

import argparse
import asyncio
import cProfile
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from baton.client import AsyncBatonClient
from baton.values import Query, Sampling, Stop
from tests.support.cluster.one_process import cluster_in_process
from tests.support.models.checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = (
    "baton",
    "decode",
    "engine",
    "models",
    "pool",
    "prefill",
    "router",
    "runtime",
    "transfer",
)
IDLE_S = 3.0
NUM_REQUESTS = 3  # functions that not all of them enter do not count
SETTLE_S = 1.0  # until deferred work of a request is complete


@dataclass(frozen=True, order=True)
class Function:
    """A function of the product, by its file (relative to the repository) and line."""

    file: str
    line: int
    name: str


@dataclass(frozen=True, order=True)
class Visit:
    """A function, and a function of another file that it calls."""

    caller: Function
    callee: Function


@dataclass(frozen=True)
class Entered:
    """The product's functions that were entered, and the visits between them."""

    functions: set[Function]
    visits: set[Visit]


class EnteredFunctions:
    """Functions entered by every thread that starts after `install`.

    The interpreter's own profiler counts calls: a profiler in Python would slow down spinning
    threads so much that the cluster could not serve.
    """

    def __init__(self) -> None:
        self._profiles: list[cProfile.Profile] = []

    def install(self) -> None:
        """Install the profiler. Call this before the cluster starts, because threads inherit it."""
        threading.setprofile(self._begin)
        self._begin()

    def _begin(self, *event: object) -> None:
        """Start a profiler for the current thread, at its first call."""
        sys.setprofile(None)
        profile = cProfile.Profile()
        self._profiles.append(profile)
        profile.enable()

    def _calls(self) -> Counter[tuple[CodeType | None, CodeType]]:
        """Return the number of calls by caller and callee; the caller None stands for all."""
        found: Counter[tuple[CodeType | None, CodeType]] = Counter()
        for profile in self._profiles:
            for entry in profile.getstats():
                if isinstance(entry.code, str):  # a built-in function
                    continue
                found[None, entry.code] += entry.callcount
                for called in entry.calls or ():
                    if not isinstance(called.code, str):
                        found[entry.code, called.code] += called.callcount
        return found

    @contextmanager
    def collected(self) -> Iterator[Entered]:
        """Yield what receives the functions and visits of the block, at its end."""
        before = self._calls()
        entered = Entered(set(), set())
        yield entered
        for (calling, called), count in self._calls().items():
            callee = _function(called) if count > before[calling, called] else None
            if callee is None:
                continue
            if calling is None:
                entered.functions.add(callee)
                continue
            # The profiler may add these counts later than those of all callers.
            caller = _function(calling)
            if caller is not None and caller.file != callee.file:
                entered.visits.add(Visit(caller, callee))


def _function(code: CodeType) -> Function | None:
    """Return the function of the product that has this code, or None."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in SHIPPED:
        return None
    return Function(str(path.relative_to(ROOT)), code.co_firstlineno, code.co_qualname)


@dataclass(frozen=True)
class RequestPath:
    """Functions entered by one request, and those entered by an idle cluster."""

    request: frozenset[Function]
    idle: frozenset[Function]
    visits: frozenset[Visit]

    @property
    def visits_by_package(self) -> dict[str, int]:
        """Return the visits to each package, without functions that the idle cluster enters."""
        counts = Counter(
            visit.callee.file.partition("/")[0]
            for visit in self.visits
            if visit.callee not in self.idle
        )
        return dict(sorted(counts.items()))

    @property
    def files(self) -> list[str]:
        """Return the files that count, sorted."""
        return sorted({function.file for function in self.request - self.idle})

    @property
    def touched(self) -> set[str]:
        """Return the files of which the request enters any function."""
        return {function.file for function in self.request}

    @property
    def idle_files(self) -> set[str]:
        return {function.file for function in self.idle}


async def _ask(client: AsyncBatonClient) -> None:
    query = Query(
        tuple(range(1, 100)), Sampling(temperature=0), Stop(max_tokens=8, ignore_eos=True)
    )
    async for _ in client.generate(query):
        pass


async def _compile(checkpoint: Path) -> None:
    """Serve once to compile every kernel. Under a profiler this would exceed a cluster's timeouts."""
    async with cluster_in_process(checkpoint, decode_pp=2) as client:
        await _ask(client)


async def _traced(client: AsyncBatonClient, entered: EnteredFunctions) -> Entered:
    with entered.collected() as request:
        await _ask(client)
    return request


async def _trace(checkpoint: Path, entered: EnteredFunctions) -> RequestPath:
    async with cluster_in_process(checkpoint, decode_pp=2) as client:
        await _ask(client)  # run one-time work
        with entered.collected() as before:
            await asyncio.sleep(IDLE_S)
        requests = [await _traced(client, entered) for _ in range(NUM_REQUESTS)]
        await asyncio.sleep(SETTLE_S)
        with entered.collected() as after:
            await asyncio.sleep(IDLE_S)
    return RequestPath(
        frozenset(set.intersection(*(request.functions for request in requests))),
        frozenset(before.functions | after.functions),
        frozenset(set.intersection(*(request.visits for request in requests))),
    )


def trace() -> RequestPath:
    """Return the functions that several plain requests enter, in a cluster after warm-up."""
    entered = EnteredFunctions()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder), "qwen3_5_text")
        asyncio.run(_compile(checkpoint))
        entered.install()
        return asyncio.run(_trace(checkpoint, entered))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a list")
    flags = parser.parse_args()
    path = trace()
    if flags.json:
        print(
            json.dumps(
                {
                    "files": len(path.files),
                    "touched": len(path.touched),
                    "idle": len(path.idle_files),
                    "listed": path.files,
                    "visits": path.visits_by_package,
                }
            )
        )
        return
    for name in path.files:
        print(name)
    print(
        f"{len(path.files)} files run for one request; {len(path.touched)} with those where it enters only what an "
        f"idle cluster enters, too; {len(path.idle_files)} of an idle cluster"
    )
    by_package = ", ".join(f"{name} {count}" for name, count in path.visits_by_package.items())
    print(f"visits: {by_package}")


if __name__ == "__main__":
    main()

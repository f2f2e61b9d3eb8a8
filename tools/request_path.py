"""Which files one plain request runs through, from the client to its last token: `python -m
tools.request_path`.

The whole cluster runs in this process (a prefill pool and a decode pool of two stages, real gRPC
and UCX). A file of the product counts when the request, between its first message and its last
event, enters one of the file's functions that the idle cluster does not enter; the request is sent
some times, and each time must enter it. The idle cluster is looked at for some seconds before and
after the request: reports, health checks and waiting threads are its work and not the request's,
though they run beside it. A file of which the request enters only functions that an idle cluster
enters, too, does not count.

Shown beside it: the files of which the request enters any function, and those of the idle cluster.
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
NUM_REQUESTS = 3  # what one of them enters and another does not is work of the moment
SETTLE_S = 1.0  # until what a request leaves to be done is done


@dataclass(frozen=True, order=True)
class Function:
    """One of the product, by its file (relative to the repository) and its place in it."""

    file: str
    line: int
    name: str


class EnteredFunctions:
    """Calls by function in every thread that starts after `install`, counted by the interpreter's
    own profiler: one in Python would slow the threads that spin so much that the cluster could not
    serve."""

    def __init__(self) -> None:
        self._profiles: list[cProfile.Profile] = []

    def install(self) -> None:
        """Before the cluster is made: a thread takes its profiler when it starts."""
        threading.setprofile(self._begin)
        self._begin()

    def _begin(self, *event: object) -> None:
        """In each thread, once: from the first call on it has a profiler of its own."""
        sys.setprofile(None)
        profile = cProfile.Profile()
        self._profiles.append(profile)
        profile.enable()

    def _calls(self) -> Counter[CodeType]:
        found: Counter[CodeType] = Counter()
        for profile in self._profiles:
            for entry in profile.getstats():
                if not isinstance(entry.code, str):  # a function that is compiled in
                    found[entry.code] += entry.callcount
        return found

    @contextmanager
    def collected(self) -> Iterator[set[Function]]:
        """The functions of the product that are entered in the block, filled in at its end."""
        before, entered = self._calls(), set[Function]()
        yield entered
        for code, count in self._calls().items():
            path = Path(code.co_filename)
            if (
                count > before[code]
                and path.is_relative_to(ROOT)
                and path.relative_to(ROOT).parts[0] in SHIPPED
            ):
                entered.add(
                    Function(str(path.relative_to(ROOT)), code.co_firstlineno, code.co_qualname)
                )


@dataclass(frozen=True)
class RequestPath:
    """What one request enters, and what a cluster enters that serves none."""

    request: frozenset[Function]
    idle: frozenset[Function]

    @property
    def files(self) -> list[str]:
        """Those that count, in order."""
        return sorted({function.file for function in self.request - self.idle})

    @property
    def touched(self) -> set[str]:
        """Files of which the request enters any function."""
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
    """Serve once, so that every kernel is compiled: under a profiler that takes longer than a
    cluster waits for."""
    async with cluster_in_process(checkpoint, decode_pp=2) as client:
        await _ask(client)


async def _traced(client: AsyncBatonClient, entered: EnteredFunctions) -> frozenset[Function]:
    with entered.collected() as request:
        await _ask(client)
    return frozenset(request)


async def _trace(checkpoint: Path, entered: EnteredFunctions) -> RequestPath:
    async with cluster_in_process(checkpoint, decode_pp=2) as client:
        await _ask(client)  # what happens once only
        with entered.collected() as before:
            await asyncio.sleep(IDLE_S)
        requests = [await _traced(client, entered) for _ in range(NUM_REQUESTS)]
        await asyncio.sleep(SETTLE_S)
        with entered.collected() as after:
            await asyncio.sleep(IDLE_S)
    return RequestPath(frozenset.intersection(*requests), frozenset(before | after))


def trace() -> RequestPath:
    """What each of some plain requests enters, in a cluster that has served another one before."""
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


if __name__ == "__main__":
    main()

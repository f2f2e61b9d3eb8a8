"""Which files one plain request runs through, from the client to its last token: `python -m tools.request_path`.

The whole cluster runs in this process (a prefill pool and a decode pool of two stages, real gRPC and UCX); what counts
is a file of the product any of whose functions is entered between the request's first message and its last event.
Background work of an idle cluster is counted on its own and shown beside it.
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
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.values import Query, Sampling, Stop
from tests.support.checkpoints import make_checkpoint
from tests.support.one_process import cluster_in_process

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("baton", "decode", "engine", "models", "pool", "prefill", "router", "runtime", "transfer")
IDLE_S = 2.0


class EnteredFiles:
    """Calls by file in every thread that starts after `install`, counted by the interpreter's own profiler: one in
    Python would slow the threads that spin so much that the cluster could not serve."""

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

    def _calls(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for profile in self._profiles:
            for entry in profile.getstats():
                if not isinstance(entry.code, str):
                    found[entry.code.co_filename] += entry.callcount
        return found

    @contextmanager
    def counted(self) -> Iterator[set[str]]:
        """The files of the product that are entered in the block, filled in at its end."""
        before, files = self._calls(), set[str]()
        yield files
        for name, count in self._calls().items():
            path = Path(name)
            if count > before[name] and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in SHIPPED:
                files.add(str(path.relative_to(ROOT)))


async def _ask(client: AsyncBatonClient) -> None:
    query = Query(tuple(range(1, 100)), Sampling(temperature=0), Stop(max_tokens=8, ignore_eos=True))
    async for _ in client.generate(query):
        pass


async def count(entered: EnteredFiles) -> tuple[set[str], set[str]]:
    """(files of one request, files of an idle cluster)."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder), "qwen3_5_text")
        async with cluster_in_process(checkpoint, decode_pp=2) as client:
            await _ask(client)  # what happens once only
            with entered.counted() as idle:
                await asyncio.sleep(IDLE_S)
            with entered.counted() as request:
                await _ask(client)
    return request, idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a list")
    flags = parser.parse_args()
    entered = EnteredFiles()
    entered.install()
    request, idle = asyncio.run(count(entered))
    if flags.json:
        print(json.dumps({"files": len(request), "idle": len(idle), "listed": sorted(request)}))
        return
    for name in sorted(request):
        print(name)
    print(f"{len(request)} files run for one request; {len(idle)} of an idle cluster")


if __name__ == "__main__":
    main()

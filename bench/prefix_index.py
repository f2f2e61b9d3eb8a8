"""`python -m bench.prefix_index`: time of a router to rebuild its index of prefix caches, and to
use it.

First, a full account of `--entries` resume points of one worker, as it arrives over the wire. Then
choices among 64 prefill workers, each with a part of the prompt in its cache, and 64 decode pools,
for prompts of 2,000 tokens in pages of 16.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry

from bench.report import Value, render
from pool.prefix.journal import PointJournal
from protos import worker_pb2
from router.text.model_facts import ModelLimits
from router.workers.directory import Directory, DirectoryOptions
from router.workers.placement_request import PlacementRequest
from router.workers.prefix_index import PrefixIndex, RoutedPrompt
from runtime.digests import block_names
from runtime.observe.metrics.router import RouterMetrics

NUM_WORKERS = 64
PROMPT_TOKENS = 2000
PAGE_SIZE = 16
NUM_CHOICES = 100


def taken_s(work: Callable[[], object]) -> float:
    """Return the core seconds of the work, so that other work on the core does not count."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def rebuild_s(num_entries: int) -> float:
    journal = PointJournal()
    rng = random.Random(0)
    journal.follow({rng.randbytes(16) for _ in range(num_entries)})
    with journal.watch() as watcher:
        wire = [report.SerializeToString() for report in watcher.take()]
    index = PrefixIndex()
    seconds = taken_s(
        lambda: [index.report("h:1", worker_pb2.CacheReport.FromString(each)) for each in wire]
    )
    assert index.has_all("h:1", len(wire))
    return seconds


async def choice_s() -> dict[str, float]:
    """Return the seconds to hash a prompt's blocks, to look up their workers, and to choose a pair.

    Hashing is once per request; the choice includes the lookup and the booking.
    """
    addresses = tuple(f"10.0.0.{number}:1" for number in range(NUM_WORKERS))
    pools = tuple(f"10.0.1.{number}:1" for number in range(NUM_WORKERS))
    facts = ModelLimits("m", "M", 1000, 1 << 20, 4, ())
    directory = Directory(
        DirectoryOptions(addresses, pools),
        facts,
        RouterMetrics.create(CollectorRegistry()),
        random.Random(0),
    )
    prompts = [[number, *range(1, PROMPT_TOKENS)] for number in range(NUM_CHOICES)]
    blocks = [block_names(prompt, PAGE_SIZE, compatibility="m") for prompt in prompts]
    for place, worker in enumerate(directory.workers):
        worker.introduced(
            worker_pb2.WorkerInfo(
                role=worker.role.value,
                incarnation=worker.address,
                architecture="M",
                vocab_size=1000,
                num_layers=4,
                compatibility="m",
                max_context_tokens=1 << 20,
                page_size=PAGE_SIZE,
                pages_total=1 << 20,
                max_running_requests=512,
                max_batch_requests=256,
                max_queued_requests=512,
            ),
            facts,
        )
        names = [name for known in blocks for name in known[: place * len(known) // NUM_WORKERS]]
        worker.caches.memory.report(
            worker.address, worker_pb2.CacheReport(whole=True, stored=b"".join(names))
        )
        worker.reported(worker_pb2.WorkerLoad(serving=True, pages_free=1 << 20, cache_reports=1))
    index = directory.workers[0].caches.memory
    taken: dict[str, list[float]] = {"names_s": [], "look_up_s": [], "place_s": []}
    for token_ids in prompts:
        prompt = RoutedPrompt(token_ids)
        taken["names_s"].append(taken_s(partial(prompt.block_names, PAGE_SIZE, "m")))
        taken["look_up_s"].append(
            taken_s(partial(index.depths, prompt.block_names(PAGE_SIZE, "m")))
        )
        taken["place_s"].append(
            taken_s(partial(directory.placement.place, PlacementRequest(prompt, PROMPT_TOKENS)))
        )
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--entries", type=int, default=1_000_000, help="entries of the index; default 1,000,000"
    )
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    values: dict[str, Value] = {
        "entries": flags.entries,
        "rebuild_s": rebuild_s(flags.entries),
        "num_workers": NUM_WORKERS,
        **asyncio.run(choice_s()),
    }
    print(render("prefix_index", values, as_json=flags.json))


if __name__ == "__main__":
    main()

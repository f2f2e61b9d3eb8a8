"""Placement by what prefill workers have in tiers of their own: reports are given by hand."""

import random
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from protos import worker_pb2
from router.workers.directory import Directory, DirectoryOptions
from router.workers.placement import MOST_COMPARED
from router.workers.placement_request import PlacementRequest, WorkerPair
from router.workers.prefix_index import RoutedPrompt
from router.workers.watch import apply_report
from router.workers.worker import Worker
from runtime.digests import block_names
from runtime.observe.metrics.router import RouterMetrics
from tests.router.harness import FACTS, worker_info
from tests.router.workers.test_directory import keeps

PROMPT = RoutedPrompt(list(range(400)))
NUM_KEPT = 384  # of its tokens, in whole pages


def directory_of(num_prefill: int) -> Directory:
    addresses = tuple(f"h:{number + 1}" for number in range(num_prefill))
    directory = Directory(
        DirectoryOptions(addresses, ("d:1",)),
        FACTS,
        RouterMetrics.create(CollectorRegistry()),
        random.Random(0),
    )
    for worker in directory.workers:
        starts(worker)
        assert not has(worker)
    return directory


def starts(worker: Worker, incarnation: str = "first") -> None:
    info = worker_info(
        worker.role,
        incarnation=f"{incarnation} of {worker.address}",
        compatibility="m",
        max_context_tokens=1000,
        pages_total=100,
    )
    worker.introduced(info, FACTS)


def has(worker: Worker, queued_tokens: int = 0, *, copies: int = 0, cost: float = 0.0) -> str:
    """Report a load after so many reports of copies; return the problem with the stream."""
    load = worker_pb2.WorkerLoad(
        serving=True,
        pages_free=100,
        slots_free=4,
        queued_tokens=queued_tokens,
        copy_reports=copies,
        copy_cost=cost,
    )
    return apply_report(worker, FACTS, worker_pb2.WatchResponse(load=load))


def has_copies(worker: Worker, prompt: Sequence[int], number: int = 0) -> None:
    """Report that tiers of the worker have the whole pages of this prompt, and nothing else."""
    names = b"".join(block_names(prompt, 16, compatibility="m", salt=""))
    report = worker_pb2.CacheReport(number=number, whole=True, stored=names)
    assert not apply_report(worker, FACTS, worker_pb2.WatchResponse(copies=report))


def placed(directory: Directory, prompt: RoutedPrompt = PROMPT) -> WorkerPair:
    pair = directory.placement.place(PlacementRequest(prompt, 500))
    assert pair is not None
    pair.release()
    return pair


@pytest.mark.parametrize(
    ("cost", "queued", "num_brought"),
    [
        (0.25, 280, 288),
        (0.25, 300, 0),
        (0.0, 180, 192),  # nothing was read yet
        (0.0, 200, 0),
        (1.5, 1, 0),  # reading is slower than computing
    ],
)
async def test_copies_in_a_tier_are_worth_what_they_save(
    cost: float, queued: int, num_brought: int
) -> None:
    directory = directory_of(2)
    idle, keeper, _ = directory.workers
    has_copies(keeper, PROMPT.token_ids)
    assert not has(keeper, queued, copies=1, cost=cost)
    pair = placed(directory)
    assert pair.prefill.worker is (keeper if num_brought else idle)
    assert pair.prefill.num_cached == 0, "what its memory has"
    assert pair.prefill.num_tokens == len(PROMPT.token_ids) - num_brought
    assert directory.placement.num_cached(PROMPT) == {
        keeper.address: round(NUM_KEPT * max(0, 1 - (cost or 0.5)))
    }


async def test_other_salts_and_prompts_without_cache_find_no_copies() -> None:
    directory = directory_of(1)
    has_copies(directory.workers[0], PROMPT.token_ids)
    ids = PROMPT.token_ids
    for prompt in (
        RoutedPrompt(ids, "salt"),
        RoutedPrompt(ids, uses_cache=False),
        RoutedPrompt(ids, adapter="a@1"),
        RoutedPrompt(ids[1:]),
    ):
        assert not directory.placement.num_cached(prompt)
    assert directory.placement.num_missing(PROMPT) == len(ids) - NUM_KEPT // 2


async def test_memory_counts_before_a_tier() -> None:
    directory = directory_of(1)
    worker = directory.workers[0]
    has_copies(worker, PROMPT.token_ids)
    keeps(worker, range(192))
    pair = placed(directory)
    assert pair.prefill.num_cached == 192
    assert pair.prefill.num_tokens == len(PROMPT.token_ids) - 192 - 96


async def test_copies_go_with_the_worker_and_its_stream() -> None:
    directory = directory_of(1)
    worker = directory.workers[0]
    has_copies(worker, PROMPT.token_ids)
    assert not has(worker, copies=1)
    has_copies(worker, PROMPT.token_ids[:100], number=1)
    assert not has(worker, copies=2)
    assert directory.placement.num_missing(PROMPT) == len(PROMPT.token_ids) - 48
    assert has(worker, copies=3) == "a report of its prefix cache is missing"
    starts(worker, "second")
    assert not has(worker)
    assert directory.placement.num_missing(PROMPT) == len(PROMPT.token_ids)


async def test_the_only_copy_in_a_large_fleet_is_found() -> None:
    directory = directory_of(3 * MOST_COMPARED)
    keeper = directory.workers[-2]
    has_copies(keeper, PROMPT.token_ids)
    assert {placed(directory).prefill.address for _ in range(10)} == {keeper.address}

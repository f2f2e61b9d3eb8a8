"""Pairs that failed a handoff: which are excluded, for how long, and what is tried if no other pair
is left."""

import random

import pytest
from prometheus_client import CollectorRegistry

from router.workers import links
from router.workers.directory import Directory, DirectoryOptions
from router.workers.links import SEVERED_MEMORY_S, FailedLinks
from router.workers.placement_request import PlacementRequest
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import Worker
from runtime.clock import ManualClock
from runtime.observe.metrics.router import RouterMetrics
from tests.router.harness import FACTS
from tests.router.workers.test_directory import serves

PROMPT = RoutedPrompt([1, 2, 3])


def directory(num_prefill: int, num_decode: int) -> Directory:
    """Build a directory of workers that serve and have room."""
    addresses = [f"127.0.0.1:{port}" for port in range(1, 1 + num_prefill + num_decode)]
    made = Directory(
        DirectoryOptions(tuple(addresses[:num_prefill]), tuple(addresses[num_prefill:])),
        FACTS,
        RouterMetrics.create(CollectorRegistry()),
        random.Random(0),
    )
    for worker in made.workers:
        serves(worker, incarnation=worker.address)
    return made


def placed(of: Directory, num_requests: int = 1) -> set[tuple[str, str]]:
    """Return the pairs that requests get; they keep their places."""
    pairs = [of.placement.place(PlacementRequest(PROMPT)) for _ in range(num_requests)]
    return {
        (pair.prefill.worker.address, pair.decode.worker.address)
        for pair in pairs
        if pair is not None
    }


def sever(of: Directory, source: Worker, pool: Worker) -> None:
    of.placement.failed_link(source.book(1), pool.book(1))


async def test_a_severed_pair_is_left_out_while_there_is_another() -> None:
    of = directory(2, 2)
    p0, p1, d0, d1 = of.workers
    sever(of, p0, d0)
    sever(of, p0, d1)
    assert {prefill for prefill, _ in placed(of, 4)} == {p1.address}
    assert of.placement.is_fed(PlacementRequest(PROMPT), d0.book(1))


async def test_a_full_pair_is_waited_for_rather_than_a_severed_one() -> None:
    of = directory(2, 1)
    p0, p1, d0 = of.workers
    sever(of, p0, d0)
    while p1.snapshot.has_room(PROMPT.num_tokens):
        p1.book(1)
    assert placed(of) == set()


async def test_the_only_pair_is_tried_and_a_success_counts() -> None:
    of = directory(1, 1)
    source, pool = of.workers
    sever(of, source, pool)
    assert placed(of) == {(source.address, pool.address)}
    assert of.placement.is_fed(PlacementRequest(PROMPT), pool.book(1)), "there is nothing better"


async def test_a_pool_that_its_only_source_cannot_reach_is_fed_by_none() -> None:
    of = directory(1, 2)
    source, first, second = of.workers
    sever(of, source, first)
    assert not of.placement.is_fed(PlacementRequest(PROMPT), first.book(1))
    assert placed(of) == {(source.address, second.address)}
    pair = of.placement.place_again(PlacementRequest(PROMPT, 0, ""), first.address)
    assert pair is not None
    assert pair.decode.worker is second
    of.placement.linked(source.book(1), first.book(1), 0.0)
    assert of.placement.is_fed(PlacementRequest(PROMPT), first.book(1))


async def test_another_source_is_sought_among_those_that_reach_the_pool() -> None:
    of = directory(3, 1)
    p0, p1, p2, pool = of.workers
    sever(of, p1, pool)
    booked = of.placement.book_prefill(
        PlacementRequest(PROMPT), pool.book(1), frozenset({p0.address})
    )
    assert booked is not None
    assert booked.worker is p2


async def test_memory_ends_with_time_and_with_an_incarnation_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock(100.0)
    pairs = FailedLinks(clock)
    source, first, second = directory(1, 2).workers
    pairs.add(source.incarnation, first.incarnation)
    assert first.incarnation in pairs.by_source()[source.incarnation]
    assert second.incarnation not in pairs.by_source().get(source.incarnation, ())
    clock.advance(SEVERED_MEMORY_S)
    assert first.incarnation not in pairs.by_source().get(source.incarnation, ())
    pairs.add(source.incarnation, first.incarnation)
    serves(first, incarnation="new")
    assert first.incarnation not in pairs.by_source().get(source.incarnation, ())
    monkeypatch.setattr(links, "MAX_SEVERED_PAIRS", 1)
    pairs.add(source.incarnation, first.incarnation)
    pairs.add(source.incarnation, second.incarnation)
    assert len(pairs) == 1
    assert second.incarnation in pairs.by_source()[source.incarnation]
    pairs.remove(source.incarnation, second.incarnation)
    assert not len(pairs)

"""Only what a decode pool lacks of a prompt crosses: the real service, real transfer agents, and
bytes counted."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from protos import decode_pb2 as pb
from tests.support.pool.arrivals import (
    NUM_LAYERS,
    SOURCE_PAGES,
    Arrivals,
    arrivals,
    cancelled,
    first_token,
    specs,
)
from transfer.plan import codec
from transfer.plan.handoff_terms import DestinationTerms


@pytest.fixture
async def pools() -> AsyncIterator[Arrivals]:
    async with arrivals(caches=True) as made:
        yield made
        assert made.complaints == []


NUM_PAGES = len(SOURCE_PAGES)
PAGE_BYTES = sum(spec.record_bytes for spec in specs() if spec.kind.is_paged)
STATE_BYTES = sum(spec.record_bytes for spec in specs() if not spec.kind.is_paged)


async def land(pools: Arrivals, request_key: int) -> tuple[DestinationTerms, int]:
    """Run one request to its commit; return the destination terms and the bytes transferred."""
    stream, destination = await pools.open()
    pools.deliver(destination, request_key=request_key)
    stream.send(first_token())
    committed = (await stream.next()).committed
    stream.send(cancelled())
    await pools.until(lambda: pools.is_free)
    return destination, committed.num_bytes


async def test_only_missing_pages_and_one_state_cross(pools: Arrivals) -> None:
    first, whole = await land(pools, 1)
    assert (first.held_tokens, whole) == (0, NUM_PAGES * PAGE_BYTES + STATE_BYTES)
    second, rest = await land(pools, 2)
    assert (second.held_tokens, rest) == (16, PAGE_BYTES + STATE_BYTES), (
        "four pages of five are there"
    )
    assert second.page_ids[:4] == first.page_ids[:4]
    moved = sum(
        pools.metric("baton_kv_transfer_bytes_total", kind=kind) for kind in ("kv", "state")
    )
    assert moved == whole + rest
    assert pools.metric("baton_cache_unsent_bytes_total") == whole - rest
    assert_read_alike(pools, second)


def assert_read_alike(pools: Arrivals, destination: DestinationTerms) -> None:
    """Check that the request's records equal those of the source."""
    for kind, theirs, ours in (
        ("kv", SOURCE_PAGES, destination.page_ids),
        ("state", [1], [destination.slot_id]),
    ):
        sent, landed = pools.source.records({kind}, theirs), pools.dest.records({kind}, ours)  # type: ignore[arg-type]
        assert len(sent) == NUM_LAYERS
        assert all((records == landed[key]).all() for key, records in sent.items())


async def test_a_source_that_does_not_know_sends_everything_elsewhere(pools: Arrivals) -> None:
    first, whole = await land(pools, 1)
    pools.terms = replace(pools.terms, sends_rest=False)
    second, again = await land(pools, 2)
    assert (second.held_tokens, again) == (0, whole)
    assert not set(first.page_ids[:4]) & set(second.page_ids), "what was kept of the first"
    assert_read_alike(pools, second)


async def test_a_source_that_is_replaced_by_one_that_does_not_know(pools: Arrivals) -> None:
    first, whole = await land(pools, 1)
    stream, destination = await pools.open()
    assert destination.held_tokens == 16
    for stage in pools.source.stages:
        stage.memory.randomize(99)  # to tell what crosses now from what was there
    pools.terms = replace(pools.terms, sends_rest=False)
    stream.send(pb.DecodeInput(new_source=codec.source_to_proto(pools.terms)))
    destination = codec.destination_from_proto((await stream.next()).destination)
    assert (destination.epoch, destination.held_tokens) == (1, 0)
    assert not set(first.page_ids[:4]) & set(destination.page_ids)
    pools.deliver(destination, request_key=2)
    stream.send(first_token())
    assert (await stream.next()).committed.num_bytes == whole
    assert_read_alike(pools, destination)
    stream.send(cancelled())
    await pools.until(lambda: pools.is_free)

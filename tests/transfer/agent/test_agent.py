"""Agents hand over according to the plan, layer by layer, over every transport; and they drain
after any failure."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine.core.layer_range import LayerRange
from engine.memory.layout import CacheKind
from runtime.clock import SystemClock
from testing.memory_transport import MemoryNetwork
from tests.support.transfer.handoff import Pool, assert_handed_over, hybrid_specs, wait_until
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import StageSessionState
from transfer.transport.authenticator import new_key
from transfer.transport.protocol import Transport
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

OPEN, COMPLETE = StageSessionState.OPEN, StageSessionState.COMPLETE
FAILED, DRAINED = StageSessionState.FAILED, StageSessionState.DRAINED
SOURCE_PAGES, DEST_PAGES = [3, 4, 5, 9, 10], [7, 8, 9, 2, 3]
NUM_TOKENS = 18


@pytest.fixture(params=["memory", "shm", "tcp"])
def make_transport(request: pytest.FixtureRequest) -> Callable[[], Transport]:
    if request.param == "memory":
        network = MemoryNetwork()
        return lambda: network.transport(SystemClock())
    return lambda: UcxTransport(profile=TransportProfile(request.param), clock=SystemClock())


class Pools:
    """Makes pools and shuts them down."""

    def __init__(self, make_transport: Callable[[], Transport]) -> None:
        self._make_transport = make_transport
        self._pools: list[Pool] = []

    def __call__(self, name: str, num_stages: int, num_layers: int = 6) -> Pool:
        pool = Pool(
            name, [self._make_transport() for _ in range(num_stages)], hybrid_specs(num_layers)
        )
        self._pools.append(pool)
        return pool

    def shutdown(self) -> None:
        for pool in self._pools:
            pool.shutdown()


@pytest.fixture
def pools(make_transport: Callable[[], Transport]) -> Iterator[Pools]:
    pools = Pools(make_transport)
    yield pools
    pools.shutdown()


def source_and_dest(pools: Pools, num_source: int = 1, num_dest: int = 1) -> tuple[Pool, Pool]:
    source, dest = pools("prefill", num_source), pools("decode", num_dest)
    for i, stage in enumerate(source.stages):
        stage.memory.randomize(seed=i + 1)
    return source, dest


@pytest.mark.parametrize(
    ("num_source", "num_dest"), [(1, 1), (1, 3), (3, 1), (2, 3), (3, 2), (6, 6)]
)
def test_any_split_hands_over_to_any_split_s4_9(
    pools: Pools, num_source: int, num_dest: int
) -> None:
    source, dest = source_and_dest(pools, num_source, num_dest)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.open_receive(terms, destination)
    source.send(terms, destination)
    sent = source.wait("s", COMPLETE, FAILED)
    landed = dest.wait("s", COMPLETE, FAILED)
    assert {event.state for event in sent + landed} == {COMPLETE}
    assert sum(event.num_bytes for event in sent) == sum(event.num_bytes for event in landed) > 0
    assert_handed_over(source, dest, SOURCE_PAGES, DEST_PAGES)
    for pool in (source, dest):
        assert not any(DRAINED in stage.log.states("s") for stage in pool.stages), (
            "drained before it was closed"
        )
        pool.close("s")
        pool.wait("s", DRAINED)
        assert all(stage.log.states("s") == [OPEN, COMPLETE, DRAINED] for stage in pool.stages)


def test_a_layer_leaves_only_when_it_is_done(pools: Pools) -> None:
    source, dest = source_and_dest(pools)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS, chunk_tokens=8)
    destination = dest.destination(terms, DEST_PAGES)
    dest.open_receive(terms, destination)
    source.open_send(terms, destination)
    agent, landed = source.stages[0].agent, dest.stages[0].memory.arrays
    agent.layer_done(1, 1, 8)  # the first chunk has passed layer 1: its first two pages may leave
    wait_until(lambda: bool(landed[1, CacheKind.KV][DEST_PAGES[:2]].all(axis=1).any()))
    agent.layer_done(1, 2, 16)  # layer 2 is recurrent: nothing before the whole prompt
    agent.layer_done(1, 3, 16)
    wait_until(lambda: bool(landed[3, CacheKind.KV][DEST_PAGES[3]].any()))
    assert not landed[1, CacheKind.KV][DEST_PAGES[2:]].any()
    assert not landed[3, CacheKind.KV][DEST_PAGES[4]].any()
    assert not landed[5, CacheKind.KV].any()
    assert not any(
        landed[layer_id, kind].any()
        for layer_id in (0, 2, 4)
        for kind in (CacheKind.CONV, CacheKind.STATE)
    )
    source.layers_done(NUM_TOKENS)
    dest.wait("s", COMPLETE)
    assert_handed_over(source, dest, SOURCE_PAGES, DEST_PAGES)


def test_layers_done_before_the_terms_arrive_are_remembered(pools: Pools) -> None:
    source, dest = source_and_dest(pools, 2, 2)
    for stage in source.stages:
        stage.agent.expect_send(1, NUM_TOKENS)
    source.layers_done(NUM_TOKENS)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.open_receive(terms, destination)
    for stage in source.stages:
        stage.agent.open_send(1, terms, destination)
    dest.wait("s", COMPLETE)
    assert_handed_over(source, dest, SOURCE_PAGES, DEST_PAGES)


def test_sessions_cross_each_other(pools: Pools) -> None:
    source, dest = source_and_dest(pools, 2, 2)
    sessions = {
        f"s{i}": ([2 * i + 1, 2 * i + 2], [20 - 2 * i, 21 - 2 * i], i + 1) for i in range(6)
    }
    terms = {
        name: source.terms(theirs, 8, slot_id=slot) for name, (theirs, _, slot) in sessions.items()
    }
    destinations = {
        name: dest.destination(terms[name], ours, session_id=name, nonce=i, slot_id=slot)
        for i, (name, (_, ours, slot)) in enumerate(sessions.items())
    }
    for name in sessions:
        dest.open_receive(terms[name], destinations[name])
    for i, name in enumerate(reversed(sessions)):
        source.open_send(terms[name], destinations[name], request_key=i)
    for i in range(len(sessions)):
        source.layers_done(8, request_key=i)
    for name in sessions:
        dest.wait(name, COMPLETE)
    theirs = [page for pages, _, _ in sessions.values() for page in pages]
    ours = [page for _, pages, _ in sessions.values() for page in pages]
    kinds = [kind for kind in CacheKind if kind.is_paged]
    landed = dest.records(kinds, ours)
    for key, records in source.records(kinds, theirs).items():
        assert np.array_equal(records, landed[key])


def test_closing_is_idempotent_and_drains_exactly_once(pools: Pools) -> None:
    source, dest = source_and_dest(pools, 1, 2)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.open_receive(terms, destination)
    source.open_send(terms, destination)
    source.wait("s", OPEN)
    for _ in range(3):
        dest.close("s")
        source.close("s")
        source.stages[0].agent.close_request(1)
        dest.close("never opened")
    dest.wait("s", DRAINED)
    source.wait("s", DRAINED)
    dest.close("s")
    source.layers_done(NUM_TOKENS)
    assert all(stage.log.states("s") == [OPEN, DRAINED] for stage in (*source.stages, *dest.stages))
    assert all(stage.agent.stats().num_open == 0 for stage in (*source.stages, *dest.stages))
    wait_until(
        lambda: all(stage.agent.stats().num_pending_operations == 0 for stage in dest.stages)
    )


def test_a_newer_epoch_replaces_the_older_one(pools: Pools) -> None:
    dead, source, dest = pools("dead", 1), pools("prefill", 2), pools("decode", 2)
    dead.stages[0].memory.randomize(seed=99)
    for i, stage in enumerate(source.stages):
        stage.memory.randomize(seed=i + 1)
    first = dead.terms(SOURCE_PAGES, NUM_TOKENS)
    old = dest.destination(first, DEST_PAGES)
    dest.open_receive(first, old)
    second = source.terms(SOURCE_PAGES, NUM_TOKENS)
    new = dest.destination(second, DEST_PAGES, epoch=1)
    dest.open_receive(second, new)
    assert all(stage.log.states("s", 0) == [OPEN, DRAINED] for stage in dest.stages)
    source.send(second, new)
    dest.wait("s", COMPLETE, epoch=1)
    dead.send(first, old)  # wakes up much too late
    dead.wait("s", COMPLETE, FAILED)
    assert_handed_over(source, dest, SOURCE_PAGES, DEST_PAGES)
    dest.stages[0].agent.open_receive(first, old)
    dest.close("s")
    dest.wait("s", DRAINED, epoch=1)
    assert dest.stages[0].log.states("s", 0) == [OPEN, DRAINED]


def test_an_epoch_that_is_opened_twice_is_sent_once(pools: Pools) -> None:
    source, dest = source_and_dest(pools)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.open_receive(terms, destination)
    source.send(terms, destination)
    source.open_send(terms, destination)
    ended = source.wait("s", COMPLETE, FAILED) + dest.wait("s", COMPLETE, FAILED)
    assert {event.state for event in ended} == {COMPLETE}
    source.open_send(terms, destination)
    source.close("s")
    source.wait("s", DRAINED)
    assert source.stages[0].agent.failure is None
    assert source.stages[0].agent.stats().num_pending_operations == 0


def test_terms_for_another_life_of_this_process_are_refused(pools: Pools) -> None:
    source, dest = source_and_dest(pools)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    stale = replace(
        destination, stages=(replace(destination.stages[0], incarnation="decode-0-earlier"),)
    )
    dest.stages[0].agent.open_receive(terms, stale)
    event = dest.wait("s", FAILED)[0]
    assert event.error_reason == "INCOMPATIBLE_PEER"
    assert "this is decode-0" in event.error_text
    dest.close("s")
    dest.wait("s", DRAINED)


def test_terms_with_other_layers_than_this_stage_has_are_refused(pools: Pools) -> None:
    source, dest = source_and_dest(pools, 1, 2)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    first, second = (stage.agent.endpoint for stage in dest.stages)
    stages = [replace(first, layers=LayerRange(0, 2)), replace(second, layers=LayerRange(2, 6))]
    destination = plan_destination(
        terms,
        session_id="s",
        epoch=0,
        tag_base=1 << 32,
        key=new_key(),
        page_ids=DEST_PAGES,
        slot_id=1,
        stages=stages,
        specs=dest.specs,
    )
    dest.open_receive(terms, destination)
    assert (
        dest.wait("s", FAILED)[0].error_text
        == "stage 0 has layers 0-3 of rank 0 of 1, not 0-2 of rank 0 of 1"
    )


def test_a_plan_the_sides_disagree_on_is_refused_by_both(pools: Pools) -> None:
    source, dest = source_and_dest(pools)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = replace(dest.destination(terms, DEST_PAGES), slot_id=2)
    dest.open_receive(terms, destination)
    source.open_send(terms, destination)
    for pool in (source, dest):
        assert pool.wait("s", FAILED)[0].error_reason == "INCOMPATIBLE_PEER"
        pool.close("s")
        pool.wait("s", DRAINED)


@pytest.mark.parametrize("pages", [[7, 8, 9, 2, 32], [7, 8, 9, 2, 4_000_000_000]])
def test_pages_outside_the_pool_are_refused_before_anything_is_posted(
    pools: Pools, pages: list[int]
) -> None:
    source, dest = source_and_dest(pools)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    dest.open_receive(terms, dest.destination(terms, pages))
    assert dest.wait("s", FAILED)[0].error_reason == "INTERNAL"
    assert dest.stages[0].agent.stats().num_pending_operations == 0


def test_a_source_without_an_address_fails_the_receive(pools: Pools) -> None:
    source, dest = source_and_dest(pools)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    terms = replace(terms, stages=(replace(terms.stages[0], address=b"nobody"),))
    dest.open_receive(terms, dest.destination(terms, DEST_PAGES))
    assert dest.wait("s", FAILED)[0].error_reason == "INCOMPATIBLE_PEER"


def test_shutdown_drains_open_sessions(pools: Pools) -> None:
    source, dest = source_and_dest(pools)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    dest.open_receive(terms, dest.destination(terms, DEST_PAGES))
    assert dest.stages[0].agent.shutdown(60.0)
    assert dest.stages[0].log.states("s") == [OPEN, DRAINED]
    assert dest.stages[0].agent.failure is None


def test_a_late_batch_does_not_reopen_a_closed_request(
    pools: Pools,
) -> None:
    source, dest = source_and_dest(pools)
    agent = source.stages[0].agent
    agent.close_request(50)  # cancelled: this overtakes its first batch
    agent.expect_send(50)
    agent.layer_done(50, 0, 4)
    terms = source.terms([1], 4)
    destination = dest.destination(terms, [1])
    agent.open_send(50, terms, destination)
    assert "request 50 is over" in source.wait("s", FAILED)[0].error_text
    source.wait("s", DRAINED)
    assert agent.stats().num_prompts == 0
    agent.close_all().result(60)
    dest.open_receive(terms, destination)
    source.send(terms, destination, request_key=50)  # another leader's
    dest.wait("s", COMPLETE)


def test_close_all_is_done_when_everything_has_drained(pools: Pools) -> None:
    source, dest = source_and_dest(pools)
    terms = source.terms([1], 4)
    dest.open_receive(terms, dest.destination(terms, [1]))
    agent = dest.stages[0].agent
    agent.close_all().result(60)
    assert dest.stages[0].log.states("s") == [OPEN, DRAINED]
    agent.close_all().result(60)

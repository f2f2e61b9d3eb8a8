"""Failures of handoffs that must never go unnoticed: wrong bytes, memory released too early,
leaks."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from engine.core.layer_range import LayerRange
from engine.memory.layout import CacheKind, CacheSpec
from runtime.clock import SystemClock
from testing.memory_transport import Fault, MemoryNetwork, MemoryTransport
from tests.support.transfer.damaging_transport import DamagingTransport, flip
from tests.support.transfer.handoff import Pool, assert_handed_over, hybrid_specs, wait_until
from tests.support.transfer.transfer_child import SendingChild
from transfer.agent.agent import AgentLimits
from transfer.plan.copy_plan import check_plan
from transfer.plan.handoff_terms import SourceTerms, StageEndpoint, StageSessionState
from transfer.transport.protocol import Transport
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

OPEN, COMPLETE = StageSessionState.OPEN, StageSessionState.COMPLETE
FAILED, DRAINED = StageSessionState.FAILED, StageSessionState.DRAINED
SOURCE_PAGES, DEST_PAGES = [3, 4, 5, 9, 10], [7, 8, 9, 2, 3]
NUM_TOKENS = 18
QUICK = AgentLimits(drain_s=0.3)


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture(params=["memory", "shm", "tcp"])
def make_transport(
    request: pytest.FixtureRequest, network: MemoryNetwork
) -> Callable[[], Transport]:
    if request.param == "memory":
        return lambda: network.transport(SystemClock())
    return lambda: UcxTransport(profile=TransportProfile(request.param), clock=SystemClock())


@pytest.fixture
def in_memory(network: MemoryNetwork) -> Iterator[tuple[Pool, Pool]]:
    """Build source and destination of one stage each, over the network with faults."""
    source, dest = (
        Pool(name, [network.transport(SystemClock())], hybrid_specs(4), limits=QUICK)
        for name in ("prefill", "decode")
    )
    source.stages[0].memory.randomize(1)
    yield source, dest
    network.release()
    source.shutdown()
    dest.shutdown()


def has_taken_a_message(pool: Pool) -> bool:
    """Return whether a message is on its way into the pool's memory."""
    return bool(cast(MemoryTransport, pool.stages[0].agent._transport)._delayed)


def test_one_flipped_bit_in_any_item_is_caught_and_named(
    make_transport: Callable[[], Transport],
) -> None:
    damaging = DamagingTransport(make_transport())
    source = Pool("prefill", [damaging], hybrid_specs(4))
    dest = Pool("decode", [make_transport(), make_transport()], hybrid_specs(4))
    source.stages[0].memory.randomize(1)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    rng = random.Random(5)
    for dest_stage in range(2):
        items = (
            check_plan(terms, dest.destination(terms, DEST_PAGES), source.specs)
            .lanes_to(dest_stage)[0]
            .items
        )
        for index, item in enumerate(items):
            name = f"{dest_stage}-{index}"
            destination = dest.destination(
                terms, DEST_PAGES, session_id=name, nonce=1000 * dest_stage + index
            )
            damaging.damage = {
                destination.tag_base + index: flip(rng.randrange(8 * item.num_bytes))
            }
            dest.open_receive(terms, destination)
            source.send(terms, destination, request_key=1000 * dest_stage + index)
            damaged, other = dest.stages[dest_stage].log, dest.stages[1 - dest_stage].log
            event = damaged.wait(name, COMPLETE, FAILED)
            # Both stages number their items from the same tag, so the other stage's item is damaged
            # as well, if it has one; no other is.
            assert event.error_reason == "DIGEST_MISMATCH"
            assert event.error_text.startswith(item.name + " from source stage 0"), event.error_text
            assert "(1 of " in event.error_text
            other.wait(name, COMPLETE, FAILED)
            dest.close(name)
            source.close(name)
            dest.wait(name, DRAINED)
    source.shutdown()
    dest.shutdown()


def test_a_damaged_list_of_authenticators_differs_from_damaged_items(
    make_transport: Callable[[], Transport],
) -> None:
    damaging = DamagingTransport(make_transport())
    source = Pool("prefill", [damaging], hybrid_specs(4))
    dest = Pool("decode", [make_transport()], hybrid_specs(4))
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    damaging.damage = {
        check_plan(terms, destination, source.specs).lanes_to(0)[0].trailer_tag: flip(77)
    }
    dest.open_receive(terms, destination)
    source.send(terms, destination)
    event = dest.wait("s", COMPLETE, FAILED)[0]
    assert event.error_reason == "DIGEST_MISMATCH"
    assert "list of authenticators from source stage 0" in event.error_text
    source.shutdown()
    dest.shutdown()


def test_swapped_items_are_caught(make_transport: Callable[[], Transport]) -> None:
    """Intact bytes in each other's place."""
    damaging = DamagingTransport(make_transport())
    source = Pool("prefill", [damaging], hybrid_specs(4))
    dest = Pool("decode", [make_transport()], hybrid_specs(4))
    source.stages[0].memory.randomize(1)
    terms = source.terms([3, 5, 9], 12)
    destination = dest.destination(terms, [7, 9, 2])
    items = check_plan(terms, destination, source.specs).lanes_to(0)[0].items
    first, second = [index for index, item in enumerate(items) if item.layer_id == 1][:2]
    for here, there in ((first, items[second]), (second, items[first])):
        other = source.stages[0].memory.view(
            there.layer_id, there.kind, there.source_index, there.num_records
        )
        damaging.damage[destination.tag_base + here] = lambda buffer, other=other: other  # type: ignore[misc]
    dest.open_receive(terms, destination)
    source.send(terms, destination)
    event = dest.wait("s", COMPLETE, FAILED)[0]
    assert event.error_reason == "DIGEST_MISMATCH"
    assert event.error_text.startswith("layer 1 kv page 7 from")
    assert "(2 of " in event.error_text
    source.shutdown()
    dest.shutdown()


def test_pages_are_not_drained_while_a_write_can_still_arrive(
    network: MemoryNetwork, in_memory: tuple[Pool, Pool]
) -> None:
    """The race of all races: the receiver aborts while a message it has taken is still being
    written."""
    source, _ = in_memory
    patient = Pool(
        "patient",
        [network.transport(SystemClock())],
        hybrid_specs(4),
        limits=AgentLimits(drain_s=60),
    )
    network.fault = lambda tag, num_bytes: Fault.DELAY
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = patient.destination(terms, DEST_PAGES)
    patient.open_receive(terms, destination)
    source.send(terms, destination)
    wait_until(lambda: has_taken_a_message(patient))
    patient.close("s")
    time.sleep(0.2)
    assert patient.stages[0].log.states("s") == [OPEN], (
        "reported drained while messages were on their way"
    )
    network.release()
    patient.wait("s", DRAINED)
    for array in patient.stages[0].memory.arrays.values():
        array[:] = 0xEE
    time.sleep(0.1)
    assert all((array == 0xEE).all() for array in patient.stages[0].memory.arrays.values())
    patient.shutdown()


def test_an_overdue_drain_cuts_the_connection(
    network: MemoryNetwork, in_memory: tuple[Pool, Pool]
) -> None:
    source, dest = in_memory
    network.fault = lambda tag, num_bytes: Fault.DELAY
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.open_receive(terms, destination)
    source.send(terms, destination)
    wait_until(lambda: has_taken_a_message(dest))
    dest.close("s")
    dest.wait("s", DRAINED)
    network.release()
    time.sleep(0.1)
    assert not any(array.any() for array in dest.stages[0].memory.arrays.values())


def test_a_newer_epoch_starts_only_when_the_older_is_drained(
    network: MemoryNetwork, in_memory: tuple[Pool, Pool]
) -> None:
    source, _ = in_memory
    dest = Pool(
        "decode-patient",
        [network.transport(SystemClock())],
        hybrid_specs(4),
        limits=AgentLimits(drain_s=60),
    )
    other = Pool("other", [network.transport(SystemClock())], hybrid_specs(4), limits=QUICK)
    other.stages[0].memory.randomize(2)
    network.fault = lambda tag, num_bytes: Fault.DELAY if tag >> 24 & 0xFF == 0 else Fault.NONE
    old_terms, new_terms = (
        other.terms(SOURCE_PAGES, NUM_TOKENS),
        source.terms(SOURCE_PAGES, NUM_TOKENS),
    )
    old, new = (
        dest.destination(old_terms, DEST_PAGES),
        dest.destination(new_terms, DEST_PAGES, epoch=1),
    )
    dest.open_receive(old_terms, old)
    other.send(old_terms, old)
    wait_until(lambda: has_taken_a_message(dest))
    agent, log = dest.stages[0].agent, dest.stages[0].log
    agent.open_receive(new_terms, new)
    time.sleep(0.2)
    assert (log.states("s", 0), log.states("s", 1)) == ([OPEN], [])
    network.release()
    log.wait("s", OPEN, epoch=1)  # then its terms travel
    source.send(new_terms, new)
    log.wait("s", COMPLETE, epoch=1)
    assert [(event.epoch, event.state) for event in log.events] == [
        (0, OPEN),
        (0, DRAINED),
        (1, OPEN),
        (1, COMPLETE),
    ]
    assert_handed_over(source, dest, SOURCE_PAGES, DEST_PAGES)
    dest.shutdown()
    other.shutdown()


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_epoch_that_never_started_is_not_drained_before_the_older_one(
    network: MemoryNetwork, in_memory: tuple[Pool, Pool], *, is_refused: bool
) -> None:
    """The last epoch's report speaks for the session: on its word memory is given back."""
    source, _ = in_memory
    dest = Pool(
        "decode-patient",
        [network.transport(SystemClock())],
        hybrid_specs(4),
        limits=AgentLimits(drain_s=60),
    )
    network.fault = lambda tag, num_bytes: Fault.DELAY
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    old, new = (dest.destination(terms, DEST_PAGES, epoch=epoch) for epoch in range(2))
    dest.open_receive(terms, old)
    source.send(terms, old)
    agent, log = dest.stages[0].agent, dest.stages[0].log
    wait_until(lambda: has_taken_a_message(dest))
    agent.open_receive(terms, replace(new, stages=terms.stages) if is_refused else new)
    agent.close("s")
    time.sleep(0.2)
    assert [(event.epoch, event.state) for event in log.events if event.state is not FAILED] == [
        (0, OPEN)
    ]
    network.release()
    log.wait("s", DRAINED, epoch=1)
    assert [event.epoch for event in log.events if event.state is DRAINED] == [0, 1]
    assert (log.find("s", FAILED, epoch=1) is not None) == is_refused
    dest.shutdown()


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.DIE, Fault.DUPLICATE])
@pytest.mark.parametrize("at", [0, 3, 8])
def test_lost_and_doubled_messages_never_pass_as_complete(
    network: MemoryNetwork, in_memory: tuple[Pool, Pool], fault: Fault, at: int
) -> None:
    source, dest = in_memory
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    network.fault = lambda tag, num_bytes: fault if tag == destination.tag_base + at else Fault.NONE
    dest.open_receive(terms, destination)
    source.send(terms, destination)
    if fault is Fault.DUPLICATE:
        dest.wait("s", COMPLETE)
        assert_handed_over(source, dest, SOURCE_PAGES, DEST_PAGES)
    elif fault is Fault.DIE:
        assert dest.wait("s", COMPLETE, FAILED)[0].error_reason == "PEER_LOST"
    else:
        source.wait("s", COMPLETE)
        time.sleep(0.1)
        assert dest.stages[0].log.states("s") == [OPEN]
    dest.close("s")
    dest.wait("s", DRAINED)
    wait_until(lambda: dest.stages[0].agent.stats().num_pending_operations == 0)


@pytest.mark.parametrize("moment", ["before", "half", "complete"])
@pytest.mark.parametrize("side", ["source", "dest"])
def test_an_abort_in_any_state_drains_both_sides(
    make_transport: Callable[[], Transport], moment: str, side: str
) -> None:
    source = Pool("prefill", [make_transport()], hybrid_specs(4))
    dest = Pool("decode", [make_transport()], hybrid_specs(4))
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.open_receive(terms, destination)
    source.open_send(terms, destination)
    if moment != "before":
        source.layers_done(8 if moment == "half" else NUM_TOKENS)
    if moment == "complete":
        dest.wait("s", COMPLETE)
        source.wait("s", COMPLETE)
    first, second = (source, dest) if side == "source" else (dest, source)
    first.close("s")
    first.wait("s", DRAINED)
    source.layers_done(NUM_TOKENS)
    second.close("s")
    second.wait("s", DRAINED)
    for pool in (source, dest):
        wait_until(lambda: pool.stages[0].agent.stats().num_pending_operations == 0)  # noqa: B023
        pool.shutdown()


@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_sessions_with_random_aborts_leave_nothing(
    make_transport: Callable[[], Transport], seed: int
) -> None:
    rng = random.Random(seed)
    source = Pool("prefill", [make_transport(), make_transport()], hybrid_specs(4))
    dest = Pool("decode", [make_transport(), make_transport()], hybrid_specs(4))
    opened = []
    for number in range(200):
        name, slot = f"s{number}", number % 7 + 1
        pages = rng.sample(range(1, 32), 3)
        terms = source.terms(pages, 10, slot_id=slot)
        destination = dest.destination(
            terms, rng.sample(range(1, 32), 3), session_id=name, nonce=number, slot_id=slot
        )
        for stage in dest.stages:
            stage.agent.open_receive(terms, destination)
        source.open_send(terms, destination, request_key=number)
        source.layers_done(rng.choice([0, 8, 10]), request_key=number)
        opened.append(number)
        if len(opened) > 8:
            victim = opened.pop(rng.randrange(len(opened)))
            for pool in rng.sample([source, dest], 2):
                pool.close(f"s{victim}")
    for number in opened:
        dest.close(f"s{number}")
        source.stages[0].agent.close_request(number)
        source.stages[1].agent.close_request(number)
    for stage in (*source.stages, *dest.stages):
        for number in range(200):
            stage.log.wait(f"s{number}", DRAINED)
            assert stage.log.states(f"s{number}").count(DRAINED) == 1
            assert stage.log.states(f"s{number}")[-1] is DRAINED
        assert FAILED not in [event.state for event in stage.log.events]
        wait_until(lambda: stage.agent.stats().num_pending_operations == 0)  # noqa: B023
        assert stage.agent.stats().num_open == stage.agent.stats().num_draining == 0
    source.shutdown()
    dest.shutdown()


@pytest.mark.parametrize("profile", [TransportProfile.SHM, TransportProfile.TCP])
def test_a_source_that_hangs_in_mid_item_cannot_write_after_the_drain(
    profile: TransportProfile,
) -> None:
    """Over real UCX: abort, forced drain, pages reused, and only then the hanging process goes
    on."""
    num_bytes = 8 << 20
    specs = tuple(
        CacheSpec(layer_id, CacheKind.KV, (num_bytes,), "uint8", 1) for layer_id in range(4)
    )
    child = SendingChild(profile, num_bytes, 4)
    dest = Pool(
        "decode",
        [UcxTransport(profile=profile, clock=SystemClock())],
        specs,
        num_pages=2,
        limits=QUICK,
    )
    terms = SourceTerms(
        "c", "text", 4, 4, 4, (1,), 1, (StageEndpoint(LayerRange(0, 4), child.address, "child"),)
    )
    destination = dest.destination(terms, [1])
    dest.open_receive(terms, destination)
    child.send_to(dest.stages[0].agent.address, destination.tag_base)
    arrays = dest.stages[0].memory.arrays
    wait_until(lambda: any(array[1, 0] for array in arrays.values()))
    child.process.send_signal(signal.SIGSTOP)
    dest.close("s")
    dest.wait("s", DRAINED)
    for array in arrays.values():
        array[:] = 0xEE
    child.process.send_signal(signal.SIGCONT)
    time.sleep(0.7)
    assert all(np.all(array == 0xEE) for array in arrays.values())
    child.stop()
    dest.shutdown()


@pytest.mark.parametrize("profile", [TransportProfile.SHM, TransportProfile.TCP])
def test_a_killed_source_fails_the_receive_within_seconds(profile: TransportProfile) -> None:
    num_bytes = 8 << 20
    specs = tuple(
        CacheSpec(layer_id, CacheKind.KV, (num_bytes,), "uint8", 1) for layer_id in range(4)
    )
    child = SendingChild(profile, num_bytes, 2)  # and never the rest
    dest = Pool("decode", [UcxTransport(profile=profile, clock=SystemClock())], specs, num_pages=2)
    terms = SourceTerms(
        "c", "text", 4, 4, 4, (1,), 1, (StageEndpoint(LayerRange(0, 4), child.address, "child"),)
    )
    destination = dest.destination(terms, [1])
    dest.open_receive(terms, destination)
    child.send_to(dest.stages[0].agent.address, destination.tag_base)
    child.stop()
    assert dest.wait("s", COMPLETE, FAILED)[0].error_reason == "PEER_LOST"
    dest.close("s")
    dest.wait("s", DRAINED)
    dest.shutdown()

"""One request on a decode pool of three stages, from reservation to its end: what must be there
before it may run, and what must be free after it ended, however it did."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from decode import handler
from decode import service as arrival
from engine.core.batch import ForwardMode
from engine.core.request import SampledToken
from engine.memory.layout import Buffer
from engine.pipeline.results import StepFailed, StepResult
from pool.request import router_call
from protos import decode_pb2 as pb
from runtime.clock import SystemClock
from runtime.errors import (
    BatonError,
    DeadlineError,
    HandoffError,
    IncompatiblePeerError,
    IntegrityError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
)
from testing.memory_transport import Fault
from tests.support.models.tiny_models import HYBRID, tiny
from tests.support.pool.arrivals import (
    NUM_LAYERS,
    SOURCE_PAGES,
    Arrivals,
    DecodeStream,
    arrivals,
    cancelled,
    first_token,
    state_bytes,
)
from tests.support.pool.local_pool import call
from tests.support.transfer.handoff import assert_handed_over
from transfer.plan import codec
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms, StageSessionState
from transfer.session import ReceiveSession, SessionTimeouts

OPEN, COMPLETE, DRAINED = (
    StageSessionState.OPEN,
    StageSessionState.COMPLETE,
    StageSessionState.DRAINED,
)


@pytest.fixture
async def pools() -> AsyncIterator[Arrivals]:
    async with arrivals() as made:
        yield made
        assert made.complaints == []


async def assert_gone(pools: Arrivals, session_id: str) -> None:
    """Check that every page and slot is free, released after the last write of every stage, and
    that every stage drains."""
    await pools.until(lambda: pools.is_free)
    assert all(
        stage.log.states(session_id)[-1] in (COMPLETE, DRAINED) for stage in pools.dest.stages
    )
    await pools.until(
        lambda: all(stage.log.states(session_id)[-1] is DRAINED for stage in pools.dest.stages)
    )
    call(pools.loop, pools.scheduler.on_idle)


async def all_landed(pools: Arrivals, session_id: str) -> None:
    await pools.until(
        lambda: all(COMPLETE in stage.log.states(session_id) for stage in pools.dest.stages)
    )


def run_step(pools: Arrivals, error: BatonError | None = None) -> None:
    """Run one batch of the engine, if there is one."""
    batch = pools.next_batch()
    if batch is None:
        return
    result = StepResult(
        0, [SampledToken(9) for row in batch.sampling if row is not None and error is None], error
    )
    call(pools.loop, lambda: pools.scheduler.on_result(batch, result))


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_s4_10_a_slot_is_read_only_after_every_stage_is_complete(
    pools: Arrivals, late: int
) -> None:
    stream, destination = await pools.open()
    late_layers = pools.dest.stages[late].memory.geometry.layers
    pools.deliver(destination, layers=lambda layer_id: layer_id not in late_layers)
    stream.send(first_token())
    others = [stage for rank, stage in enumerate(pools.dest.stages) if rank != late]
    await pools.until(
        lambda: all(COMPLETE in stage.log.states(destination.session_id) for stage in others)
    )
    await asyncio.sleep(0.05)  # for an early commit
    assert pools.next_batch() is None
    assert stream.events.empty()
    pools.finish_layers(lambda layer_id: layer_id in late_layers)
    assert (await stream.next()).WhichOneof("event") == "committed"
    batch = pools.next_batch()
    assert batch is not None
    assert (batch.mode, batch.slot_ids.tolist()) == (ForwardMode.DECODE, [destination.slot_id])
    call(pools.loop, lambda: pools.scheduler.on_result(batch, StepResult(0, [SampledToken(9)])))
    stream.send(cancelled())
    await assert_gone(pools, destination.session_id)


@pytest.mark.parametrize("layer_id", range(NUM_LAYERS))
async def test_s4_10_one_failing_stage_fails_the_request_and_frees_every_stage(
    pools: Arrivals, layer_id: int
) -> None:
    pools.network.fault = lambda tag, num_bytes: (
        Fault.FLIP if num_bytes == state_bytes(layer_id) else Fault.NONE
    )
    stream, destination = await pools.open()
    stream.send(first_token())
    pools.deliver(destination)
    where = f"stage {layer_id // 2}: layer {layer_id} state slot {destination.slot_id}"
    with pytest.raises(IntegrityError, match=where):
        await stream.ended()
    assert pools.next_batch() is None
    assert pools.metric("baton_kv_integrity_failures_total") == 1
    assert pools.metric("baton_kv_transfer_failures_total", reason="digest_mismatch") == 1
    await assert_gone(pools, destination.session_id)
    pools.network.fault = None
    pools.source.close(destination.session_id)
    again, destination = await pools.open()  # the same memory serves the next request
    pools.deliver(destination)
    again.send(first_token())
    assert (await again.next()).WhichOneof("event") == "committed"
    again.send(cancelled())
    await assert_gone(pools, destination.session_id)


async def to_destination(pools: Arrivals) -> tuple[DecodeStream, str]:
    stream, destination = await pools.open()
    return stream, destination.session_id


async def to_half_landed(pools: Arrivals) -> tuple[DecodeStream, str]:
    stream, destination = await pools.open()
    pools.deliver(destination, layers=lambda layer_id: layer_id < 3)
    await pools.until(lambda: COMPLETE in pools.dest.stages[0].log.states(destination.session_id))
    return stream, destination.session_id


async def to_landed(pools: Arrivals) -> tuple[DecodeStream, str]:
    """Open a request and transfer everything but the first token."""
    stream, destination = await pools.open()
    pools.deliver(destination)
    await all_landed(pools, destination.session_id)
    return stream, destination.session_id


async def to_committed(pools: Arrivals) -> tuple[DecodeStream, str]:
    stream, session_id = await to_landed(pools)
    stream.send(first_token())
    assert (await stream.next()).WhichOneof("event") == "committed"
    return stream, session_id


async def to_decoding(pools: Arrivals) -> tuple[DecodeStream, str]:
    stream, session_id = await to_committed(pools)
    run_step(pools)
    assert list((await stream.next()).tokens.token_ids) == [9]
    return stream, session_id


@pytest.mark.parametrize(
    "reach", [to_destination, to_half_landed, to_landed, to_committed, to_decoding]
)
async def test_s4_7_an_abort_frees_at_every_step(
    pools: Arrivals, reach: Callable[[Arrivals], Awaitable[tuple[DecodeStream, str]]]
) -> None:
    stream, session_id = await reach(pools)
    assert not pools.is_free
    stream.send(cancelled())
    await assert_gone(pools, session_id)


async def test_s4_7_a_failed_step_frees(pools: Arrivals) -> None:
    stream, session_id = await to_committed(pools)
    run_step(pools, StepFailed("stage 1: no"))
    with pytest.raises(InternalError):
        await stream.ended()
    await assert_gone(pools, session_id)


async def test_requests_that_one_error_ends_end_each_with_its_own(pools: Arrivals) -> None:
    """The frames of an error are cleared where it becomes a status; those of other requests must
    not be among them, or their ends would be bugs."""
    streams = [await to_committed(pools) for _ in range(2)]
    call(
        pools.loop,
        lambda: pools.scheduler.on_pipeline_lost([], PeerLostError("stage 1 of the pool died")),
    )
    for stream, _ in streams:
        with pytest.raises(PeerLostError, match="stage 1 of the pool died"):
            await stream.ended()
    for _, session_id in streams:
        await assert_gone(pools, session_id)


@pytest.mark.parametrize("how", ["length", "stop token"])
async def test_s4_7_a_request_that_its_first_token_ends_frees_without_a_step(
    pools: Arrivals, how: str
) -> None:
    stream, destination = (
        await pools.open(max_tokens=1) if how == "length" else await pools.open(stop_token_ids=[7])
    )
    pools.deliver(destination)
    stream.send(first_token(7))
    assert (await stream.next()).WhichOneof("event") == "committed"
    assert (await stream.next()).WhichOneof("event") == "finished"
    await stream.ended()
    assert pools.next_batch() is None
    await assert_gone(pools, destination.session_id)


async def test_s4_7_a_preempted_request_frees_its_slot_and_finishes(
    pools: Arrivals,
) -> None:
    stream, destination = await pools.open(max_tokens=16)
    pools.deliver(destination)
    stream.send(first_token())
    assert (await stream.next()).WhichOneof("event") == "committed"
    others = pools.scheduler.pages.alloc(pools.scheduler.pages.num_free, owner="others")
    while pools.scheduler.load().queued_requests == 0:
        run_step(pools)
    assert pools.scheduler.slots.num_free == pools.scheduler.slots.num_total
    assert pools.scheduler.pages.num_free == pools.scheduler.pages.num_total - others.num_pages
    occupancy = await pools.loop.submit(pools.scheduler.occupancy)
    assert occupancy.leases == {"landing": 0, "running": 0}
    assert occupancy.oldest_s > 0
    assert pools.metric("baton_preemptions_total") == 1, "counted when it happens"
    assert pools.metric("baton_local_prefill_total", reason="preempted") == 1
    others.end()
    while pools.scheduler.load().running_requests or pools.scheduler.load().queued_requests:
        run_step(pools)
    while (await stream.next()).WhichOneof("event") != "finished":
        pass
    await stream.ended()
    assert pools.metric("baton_preemptions_total") == 1
    await assert_gone(pools, destination.session_id)


async def test_terms_that_do_not_fit_are_a_handshake_that_failed(pools: Arrivals) -> None:
    pools.terms = replace(pools.terms, compatibility="another")
    with pytest.raises(IncompatiblePeerError):
        await pools.begin().ended()
    assert (
        pools.metric("baton_handshake_failures_total", reason=IncompatiblePeerError.reason.lower())
        == 1
    )
    assert pools.metric("baton_handshake_seconds_count") == 0
    await pools.until(lambda: pools.is_free)


@dataclass(frozen=True)
class Impatient(SessionTimeouts):
    """Timeouts that wait 0.1 s for the loss of a source."""

    report_s: float = 0.1


def refuse(*where: object) -> Buffer:
    raise HandoffError("no such page")


def new_source(terms: SourceTerms) -> pb.DecodeInput:
    return pb.DecodeInput(new_source=codec.source_to_proto(terms))


async def test_a_source_lost_with_everything_sent_and_nothing_said_is_replaced(
    pools: Arrivals,
) -> None:
    """It may have died between its last byte and its first token: the next one delivers into the
    same reservation."""
    stream, session_id = await to_landed(pools)
    pools.source.close(session_id)
    for stage in pools.source.stages:
        stage.memory.randomize(99)  # what another worker computed in its own pages
    stream.send(new_source(pools.terms))
    destination = codec.destination_from_proto((await stream.next()).destination)
    assert (destination.session_id, destination.epoch) == (session_id, 1)
    pools.deliver(destination, request_key=2)
    stream.send(first_token())
    assert (await stream.next()).WhichOneof("event") == "committed"
    assert_handed_over(
        pools.source, pools.dest, SOURCE_PAGES, destination.page_ids, 1, destination.slot_id
    )
    assert all(
        stage.log.states(session_id) == [OPEN, COMPLETE, DRAINED] for stage in pools.dest.stages
    )
    stream.send(cancelled())
    await pools.until(lambda: pools.is_free)


@pytest.mark.parametrize(
    ("reach", "wrong"),
    [(to_half_landed, {"compatibility": "another"}), (to_landed, {"num_tokens": 3})],
)
async def test_a_new_source_that_is_refused_leaves_the_old_epoch_to_drain(
    pools: Arrivals,
    reach: Callable[[Arrivals], Awaitable[tuple[DecodeStream, str]]],
    wrong: dict[str, Any],
) -> None:
    stream, session_id = await reach(pools)
    stream.send(new_source(replace(pools.terms, **wrong)))
    with pytest.raises((IncompatiblePeerError, InvalidRequestError)):
        await stream.ended()
    await assert_gone(pools, session_id)


async def test_a_pool_does_not_hand_a_prompt_over_to_itself(pools: Arrivals) -> None:
    """Its own prefills take over in place, but only from the start of a request."""
    stream, session_id = await to_landed(pools)
    own = tuple(stage.agent.endpoint for stage in pools.dest.stages)
    stream.send(new_source(replace(pools.terms, stages=own)))
    with pytest.raises(HandoffError, match="the new source of the prompt is this pool itself"):
        await stream.ended()
    await assert_gone(pools, session_id)


async def test_a_first_token_outside_the_vocabulary_is_refused_by_name(pools: Arrivals) -> None:
    stream, session_id = await to_landed(pools)
    stream.send(first_token(tiny(HYBRID).facts.vocab_size))
    with pytest.raises(HandoffError, match=r"first_token: token id .* is outside the vocabulary"):
        await stream.ended()
    assert pools.next_batch() is None
    await assert_gone(pools, session_id)


@pytest.mark.parametrize("remaining_s", [1.0, 600.0])
async def test_a_prompt_may_take_as_long_to_land_as_its_request_has(
    pools: Arrivals, monkeypatch: pytest.MonkeyPatch, remaining_s: float
) -> None:
    monkeypatch.setattr(arrival, "HANDOFF_TIMEOUT_S", 0.01)  # for a request that does not say
    stream, destination = await pools.open(remaining_s=remaining_s)
    if remaining_s == 1.0:
        with pytest.raises(DeadlineError, match="the prompt to land"):
            await stream.ended()
    else:
        assert (await pools.loop.submit(pools.scheduler.occupancy)).leases == {
            "landing": 1,
            "running": 0,
        }
        await asyncio.sleep(0.3)
        pools.deliver(destination)
        stream.send(first_token())
        assert (await stream.next()).WhichOneof("event") == "committed"
        stream.send(cancelled())
    await assert_gone(pools, destination.session_id)


async def to_failed(pools: Arrivals) -> tuple[DecodeStream, str]:
    """Open a request whose source dies during the transfer."""
    pools.network.fault = lambda tag, num_bytes: Fault.DIE
    stream, destination = await pools.open()
    pools.deliver(destination)
    failed = StageSessionState.FAILED
    await pools.until(
        lambda: all(
            failed in stage.log.states(destination.session_id) for stage in pools.dest.stages
        )
    )
    pools.network.fault = None
    return stream, destination.session_id


async def test_a_failed_handoff_of_a_live_source_ends_with_the_reason(
    pools: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its router knows of no failure and would wait for the commit until the deadline; so it learns
    of this one."""
    monkeypatch.setattr(handler, "SessionTimeouts", Impatient)
    stream, session_id = await to_failed(pools)
    with pytest.raises(PeerLostError):
        await stream.ended()
    await assert_gone(pools, session_id)


async def test_a_failed_handoff_waits_for_another_source_if_its_own_is_lost(
    pools: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one may queue for long on another worker."""
    monkeypatch.setattr(handler, "SessionTimeouts", Impatient)
    stream, destination = await pools.open()
    stream.send(pb.DecodeInput(source_lost=pb.DecodeSourceLost()))
    pools.network.fault = lambda tag, num_bytes: Fault.DIE
    pools.deliver(destination)
    failed = StageSessionState.FAILED
    await pools.until(
        lambda: all(
            failed in stage.log.states(destination.session_id) for stage in pools.dest.stages
        )
    )
    pools.network.fault = None
    await asyncio.sleep(3 * Impatient.report_s)
    stream.send(new_source(pools.terms))
    assert codec.destination_from_proto((await stream.next()).destination).epoch == 1
    stream.send(cancelled())
    await assert_gone(pools, destination.session_id)


async def test_a_pool_that_cannot_open_reports_an_error(
    pools: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = pools.dest.stages[1]
    monkeypatch.setattr(stage.memory, "view", refuse)
    stream = pools.begin()
    with pytest.raises(HandoffError, match="stage 1: no such page"):
        await stream.ended()
    assert stream.events.empty(), "its source never starts"
    await pools.until(lambda: pools.is_free)


async def test_a_handoff_that_takes_too_long_ends_its_lease(
    pools: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "HANDOFF_TIMEOUT_S", 0.5)
    stream, destination = await pools.open()
    with pytest.raises(DeadlineError):
        await stream.ended()
    assert pools.metric("baton_handshake_seconds_count") == 1
    assert pools.metric("baton_kv_lease_expired_total") == 1
    await assert_gone(pools, destination.session_id)


class Later:
    """A clock an hour ahead of all others."""

    def now(self) -> float:
        return SystemClock().now() + 3600.0


async def test_an_expired_request_takes_no_step(pools: Arrivals) -> None:
    """The engine checks the deadline, even if all other components are late."""
    stream, destination = await pools.open(remaining_s=600.0)
    pools.deliver(destination)
    stream.send(first_token())
    assert (await stream.next()).HasField("committed")
    pools.scheduler.clock = Later()
    assert pools.next_batch() is None
    with pytest.raises(DeadlineError, match="the request's deadline has passed"):
        await stream.ended()
    assert pools.metric("baton_kv_lease_expired_total") == 0, "no handoff was too slow"
    await assert_gone(pools, destination.session_id)


async def test_a_stage_that_posts_too_late_is_retryable_and_not_a_deadline(
    pools: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionTimeouts, "within", lambda _: SessionTimeouts(open_s=0.01))
    group = pools.service._parts.leader.group
    open_receive = group.open_receive

    def open_unseen(
        source: SourceTerms, destination: DestinationTerms, session: ReceiveSession, *_: object
    ) -> None:
        take = session.on_stage_event
        monkeypatch.setattr(
            session,
            "on_stage_event",
            lambda rank, event: None if event.state is OPEN else take(rank, event),
        )
        open_receive(source, destination, session, lambda: None)

    monkeypatch.setattr(group, "open_receive", open_unseen)
    with pytest.raises(HandoffError, match="gave up waiting for every stage to post its receives"):
        await pools.begin().ended()
    await pools.until(lambda: pools.is_free)
    assert pools.metric("baton_handshake_failures_total", reason="handoff_failed") == 1


async def test_a_router_may_have_as_many_requests_here_as_the_pool_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_call, "SPARE_OPEN", 0)  # read as its call begins
    async with arrivals() as pools:
        stream, destination = await pools.open()
        stream.send(cancelled())
        await assert_gone(pools, destination.session_id)

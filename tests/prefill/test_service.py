"""One prompt on a prefill pool of two stages, whose destination terms arrive at a pool that has
changed since its start."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from engine.core.layer_range import Placement, get_pp_indices
from engine.core.request import SampledToken
from engine.loop import EngineLoop, LoopObserver
from engine.memory.layout import PoolGeometry
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepResult
from models.weights_digest import StageDigests
from pool.pipeline.group import StageGroup
from pool.pipeline.leader import Leader
from pool.pipeline.membership import StageLink
from pool.pipeline.reclaimer import MemoryReclaimer
from pool.pipeline.session_reports import SessionReports
from pool.request import router_call
from pool.request.entry import DataRanks
from pool.request.handler import EventPost
from pool.request.role_switch import RoleSwitch
from pool.stage.metrics import LeaderMeters
from pool.stage.plan import StagePlan
from pool.stage.pool_size import PoolSize
from prefill import service as prefill_service
from prefill.prompts import PrefillLimits
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillParts, PrefillService
from protos import prefill_pb2 as pb
from protos import transfer_pb2, types_pb2
from runtime.clock import SystemClock
from runtime.digests import Compatibility
from runtime.errors import (
    CapacityError,
    DeadlineError,
    HandoffError,
    IncompatiblePeerError,
    PeerLostError,
    UnavailableError,
)
from testing.memory_transport import MemoryNetwork
from tests.support.models.tiny_models import HYBRID, tiny
from tests.support.pool.adapters import no_adapters
from tests.support.pool.arrivals import NUM_LAYERS, NUM_PAGES, NUM_SLOTS, PAGE_SIZE, PROMPT, specs
from tests.support.pool.local_pool import call
from tests.support.pool.streams import Stream, call_tracker, prefill_call
from tests.support.transfer.handoff import Pool
from transfer.plan import codec
from transfer.plan.handoff_terms import StageSessionEvent, StageSessionState
from transfer.session import SendSession, SessionTimeouts


@dataclass
class _Leader:
    loop: EngineLoop
    group: StageGroup
    serving: bool = True
    reason: str = ""
    compatibility: Compatibility = field(default_factory=lambda: Compatibility("c", "text"))


@dataclass
class SendingPool:
    """The service, its pool, a decode pool to send to, and complaints of the reclaimer. Nothing
    computes."""

    service: PrefillService
    scheduler: PrefillScheduler
    loop: EngineLoop
    group: StageGroup
    second: StageLink
    reclaimer: MemoryReclaimer
    dest: Pool
    complaints: list[str]


@asynccontextmanager
async def sending_pool() -> AsyncIterator[SendingPool]:
    network, event_loop, complaints = MemoryNetwork(), asyncio.get_running_loop(), list[str]()

    def on_report(rank: int, event: StageSessionEvent) -> None:
        event_loop.call_soon_threadsafe(reports.deliver, rank, event)

    reports = SessionReports(event_loop)

    source = Pool(
        "prefill", [network.transport(SystemClock()) for _ in range(2)], specs(), listener=on_report
    )
    dest = Pool("decode", [network.transport(SystemClock())], specs())
    group = StageGroup(source.stages[0].agent, [Placement(rank, 2) for rank in range(2)], reports)
    second = StageLink(1, source.stages[1].agent.endpoint, b"", StageDigests())
    group.pool_formed([second])
    scheduler = PrefillScheduler(
        pages=PageAllocator(NUM_PAGES),
        slots=SlotAllocator(NUM_SLOTS),
        clock=SystemClock(),
        limits=PrefillLimits(
            page_size=PAGE_SIZE, chunk_tokens=8, grid=1, max_running=4, max_queued=4
        ),
    )
    post = EventPost(event_loop)
    loop = EngineLoop(scheduler, observer=LoopObserver(settled=post.flush))
    loop.start()
    ranges = [get_pp_indices(NUM_LAYERS, rank, 2) for rank in range(2)]
    geometry = PoolGeometry(PAGE_SIZE, NUM_PAGES, NUM_SLOTS, ranges[0], specs())
    reclaimer = MemoryReclaimer(reports, loop, complaints.append)
    service = PrefillService(
        PrefillParts(
            leader=cast(Leader, _Leader(loop, group)),
            ranks=DataRanks((scheduler,)),
            plan=StagePlan(
                tiny(HYBRID),
                ranges,
                geometry,
                {},
                PoolSize(geometry.num_pages, geometry.num_slots, 64),
                max_held=8,
            ),
            reclaimer=reclaimer,
            meters=LeaderMeters.create(CollectorRegistry(), geometry),
            post=post,
            switch=RoleSwitch(("prefill",), ("prefill",)),
            adapters=no_adapters(),
            chunk_tokens=8,
        ),
        call_tracker(),
    )
    try:
        yield SendingPool(service, scheduler, loop, group, second, reclaimer, dest, complaints)
    finally:
        loop.stop()
        for pool in (source, dest):
            await asyncio.to_thread(pool.shutdown)


def opening(time_left_s: float | None = None) -> pb.PrefillInput:
    request = types_pb2.EngineRequest(request_id="r", prompt_token_ids=PROMPT, max_tokens=4)
    return pb.PrefillInput(
        open=pb.PrefillOpen(
            request=request, context=types_pb2.RequestContext(time_left_s=time_left_s)
        )
    )


class Later:
    """A clock an hour ahead of all others."""

    def now(self) -> float:
        return SystemClock().now() + 3600.0


async def test_a_prompt_that_expires_in_the_queue_is_never_computed() -> None:
    """The engine checks the deadline, even if all other components are late."""
    async with sending_pool() as pools:
        stream = prefill_call(pools.service.Serve).open(opening(time_left_s=600.0))
        async with asyncio.timeout(60):
            while not pools.scheduler.load().queued_requests:  # noqa: ASYNC110 - a scheduler has no event to wait for
                await asyncio.sleep(0.001)
        pools.scheduler.clock = Later()
        assert await pools.loop.submit(pools.scheduler.next_batch) is None
        with pytest.raises(DeadlineError, match="that its deadline leaves"):
            await stream.ended()
        call(pools.loop, pools.scheduler.on_idle)
        assert stream.events.empty()
        assert pools.complaints == []


def lost(pools: SendingPool) -> None:
    pools.group.stage_lost(1, "stage 1 of the pool died")


def lost_and_replaced(pools: SendingPool) -> None:
    pools.group.stage_lost(1, "stage 1 of the pool died")
    successor = replace(pools.second.endpoint, incarnation="another life")
    pools.group.pool_formed([replace(pools.second, endpoint=successor)])


@pytest.mark.parametrize("change", [lost, lost_and_replaced])
async def test_destination_terms_for_a_broken_pool_end_the_request(
    change: Callable[[SendingPool], None],
) -> None:
    async with sending_pool() as pools:
        stream = prefill_call(pools.service.Serve).open(opening())
        async with asyncio.timeout(60):
            while stream.events.empty():
                await pools.loop.submit(
                    pools.scheduler.next_batch
                )  # and the engine is within its forward from then on
            terms = codec.source_from_proto((await stream.next()).started.terms)
            change(pools)
            destination = pools.dest.destination(terms, range(1, len(terms.page_ids) + 1))
            stream.send(pb.PrefillInput(destination=codec.destination_to_proto(destination)))
            with pytest.raises(UnavailableError):
                await stream.ended()
            assert (pools.reclaimer.open_tasks, pools.group.open_sessions) == (0, 0), (
                "there is no session to drain"
            )
        call(
            pools.loop, lambda: pools.scheduler.on_pipeline_lost([], PeerLostError("stage 1 died"))
        )
        pages, slots = pools.scheduler.pages, pools.scheduler.slots
        assert (pages.num_free, slots.num_free) == (pages.num_total, slots.num_total)
        assert pools.complaints == []


async def test_a_pool_that_does_not_decode_keeps_no_prompt_in_place() -> None:
    """Otherwise it would report as sent what nobody received."""
    async with sending_pool() as pools:
        stream = prefill_call(pools.service.Serve).open(opening())
        async with asyncio.timeout(60):
            while stream.events.empty():
                await pools.loop.submit(pools.scheduler.next_batch)
        assert (await stream.next()).started.terms.request_key == 0
        destination = transfer_pb2.DestinationTerms(session_id="s", in_place=True)
        stream.send(pb.PrefillInput(destination=destination))
        with pytest.raises(IncompatiblePeerError, match="in_place: this pool does not decode"):
            await stream.ended()


async def test_a_request_cannot_have_the_session_of_another_one() -> None:
    async with sending_pool() as pools:
        first, destination = await to_first_token(pools)
        first.send(pb.PrefillInput(destination=destination))
        second, own = await to_first_token(pools)
        own.session_id = destination.session_id
        second.send(pb.PrefillInput(destination=own))
        with pytest.raises(IncompatiblePeerError, match="session_id is that of an open session"):
            await second.ended()
        assert pools.group.open_sessions == 1
        assert first.events.empty(), "the first one goes on"
        assert pools.complaints == []


OPEN, COMPLETE, DRAINED = (
    StageSessionState.OPEN,
    StageSessionState.COMPLETE,
    StageSessionState.DRAINED,
)


PrefillStream = Stream[pb.PrefillInput, pb.PrefillEvent]


async def to_first_token(pools: SendingPool) -> tuple[PrefillStream, transfer_pb2.DestinationTerms]:
    """Compute a prompt; return its stream and the destination terms to send."""
    stream = prefill_call(pools.service.Serve).open(opening())
    async with asyncio.timeout(60):
        while stream.events.qsize() < 2:
            if (batch := await pools.loop.submit(pools.scheduler.next_batch)) is not None:
                drawn = [SampledToken(5) for row in batch.sampling if row is not None]
                call(pools.loop, partial(pools.scheduler.on_result, batch, StepResult(0, drawn)))
            await asyncio.sleep(0.001)
    terms = codec.source_from_proto((await stream.next()).started.terms)
    assert (await stream.next()).HasField("first_token")
    destination = pools.dest.destination(terms, range(1, len(terms.page_ids) + 1))
    return stream, codec.destination_to_proto(destination)


async def test_missing_destination_terms_are_a_retryable_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_service, "DESTINATION_TIMEOUT_S", 0.01)
    async with sending_pool() as pools:
        stream, _ = await to_first_token(pools)
        with pytest.raises(HandoffError, match="gave up waiting for the destination terms"):
            await stream.ended()


@pytest.mark.parametrize(
    ("reported", "limit", "waiting_for"),
    [
        ((), "open_s", "every stage to be ready to send"),
        ((OPEN,), "move_s", "every byte to leave"),
        ((OPEN, COMPLETE), "finish_s", "the router to confirm the handoff"),
    ],
)
async def test_a_handoff_state_that_lasts_too_long_is_a_retryable_error(
    monkeypatch: pytest.MonkeyPatch,
    reported: Sequence[StageSessionState],
    limit: str,
    waiting_for: str,
) -> None:
    monkeypatch.setattr(
        prefill_service,
        "SendSession",
        partial(SendSession, timeouts=replace(SessionTimeouts(), **{limit: 0.01})),
    )
    async with sending_pool() as pools:
        sessions: list[SendSession] = []

        def report(*states: StageSessionState) -> None:
            (session,) = sessions
            for rank in range(2):
                for state in states:
                    session.on_stage_event(
                        rank, StageSessionEvent(session.session_id, session.epoch, state)
                    )

        def open_send(
            _key: int,
            _source: object,
            _destination: object,
            session: SendSession,
            on_change: Callable[[], object],
            _data_rank: int,
        ) -> None:
            sessions.append(session)
            report(*reported)
            on_change()

        monkeypatch.setattr(pools.group, "open_send", open_send)
        monkeypatch.setattr(pools.group, "close_request", lambda *_: report(DRAINED))
        stream, destination = await to_first_token(pools)
        stream.send(pb.PrefillInput(destination=destination))
        with pytest.raises(HandoffError, match=f"gave up waiting for {waiting_for}"):
            await stream.ended()
        assert pools.complaints == []


async def test_a_router_may_have_as_many_requests_here_as_run_and_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One more is refused by the queue, whose limit routers know."""
    monkeypatch.setattr(router_call, "SPARE_OPEN", 0)
    async with sending_pool() as pools:
        shared = prefill_call(pools.service.Serve)
        streams = [shared.open(opening()) for _ in range(5)]
        with pytest.raises(CapacityError, match="4 prompts are queued"):
            await streams[-1].ended()
        await shared.drop()

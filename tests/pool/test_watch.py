"""Reports of a worker while its engine is within a step."""

import asyncio
import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from engine.core.layer_range import LayerRange
from engine.core.request import Request, SamplingParams
from engine.loop import EngineLoop, LoopObserver
from engine.memory.layout import PoolGeometry
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepResult, StepResults
from engine.pipeline.step_plan import RankBatches
from pool.pipeline.leader import Leader
from pool.prefix.journal import PointJournal
from pool.request.role_switch import RoleSwitch
from pool.stage.metrics import LeaderMeters, LoadBoard
from pool.watch import WatchContext, WorkerService, worker_load
from prefill.prompts import PrefillLimits
from prefill.scheduler import PrefillScheduler
from protos import worker_pb2 as pb
from runtime.clock import ManualClock, SystemClock
from runtime.errors import InvalidRequestError
from tests.pool.test_watch_interval import no_cache


class LongForward:
    """A pipeline of one stage that computes until the test lets it end."""

    depth = 1
    runs_apart = False

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def launch(self, step: RankBatches) -> None:
        self.began.set()
        assert self.may_end.wait(60)

    def collect(self, timeout_s: float) -> StepResults | None:
        return (StepResult(1, []),)

    def wake(self) -> None: ...


def make_scheduler() -> PrefillScheduler:
    return PrefillScheduler(
        pages=PageAllocator(100),
        slots=SlotAllocator(0),
        clock=SystemClock(),
        limits=PrefillLimits(page_size=4, chunk_tokens=8, grid=4, max_running=4, max_queued=4),
    )


async def loads(service: WorkerService) -> AsyncIterator[pb.WorkerLoad]:
    async for response in service.Watch(pb.WatchRequest(interval_s=0.05), cast(WatchContext, None)):
        if response.HasField("load"):
            yield response.load


async def test_load_reports_wait_for_no_step() -> None:
    """A router takes a worker that is silent for two seconds for lost; a forward may take longer
    than that."""
    scheduler, forward = make_scheduler(), LongForward()
    board = LoadBoard(scheduler, SystemClock())
    loop = EngineLoop(scheduler, observer=LoopObserver(settled=board.publish))
    meters = LeaderMeters.create(CollectorRegistry(), PoolGeometry(4, 100, 0, LayerRange(0, 1), ()))
    leader = cast(
        Leader,
        SimpleNamespace(loop=loop, serving=True, reason="", group=SimpleNamespace(open_sessions=0)),
    )
    service = WorkerService(
        pb.WorkerInfo,
        lambda role: worker_load(leader, board.load_of(), meters),
        PointJournal(),
        no_cache,
        RoleSwitch((), ()),
    )
    loop.start()
    try:
        request = Request("r", tuple(range(20)), 5, SamplingParams(temperature=0))
        await loop.submit(lambda: scheduler.submit(request, lambda event: None))
        await loop.submit(lambda: scheduler.submit(request, lambda event: None))
        loop.post(lambda: loop.attach(forward))
        assert await asyncio.to_thread(forward.began.wait, 60)
        seen: list[pb.WorkerLoad] = []
        async with asyncio.timeout(30):
            async for load in loads(service):
                seen.append(load)
                if len(seen) == 5:
                    break
        assert [(load.running_requests, load.queued_requests) for load in seen] == [(1, 1)] * 5
        assert [load.queued_tokens for load in seen] == [20 - 8 + 20] * 5
        assert all(earlier.busy_s < later.busy_s for earlier, later in pairwise(seen))
    finally:
        forward.may_end.set()
        loop.stop()


async def test_an_engine_that_waits_is_not_busy() -> None:
    loop = EngineLoop(make_scheduler())
    loop.start()
    try:
        await loop.submit(lambda: None)
        async with asyncio.timeout(30):
            while loop.busy_since_s is not None:  # noqa: ASYNC110 - happens on the loop's thread
                await asyncio.sleep(0.005)
    finally:
        loop.stop()


def test_waiting_times_grow_between_two_publications() -> None:
    clock = ManualClock()
    scheduler = make_scheduler()
    scheduler.clock = clock
    board = LoadBoard(scheduler, clock)
    assert board.occupancy.oldest_s == 0
    scheduler.submit(Request("r", (1, 2), 5, SamplingParams(temperature=0)), lambda event: None)
    clock.advance(2.0)
    assert board.load_of().queued_requests == 0, "nothing was published since"
    board.publish()
    assert (board.load_of().queued_requests, board.occupancy.oldest_s) == (1, 2.0)
    clock.advance(3.0)
    assert board.occupancy.oldest_s == 5.0


@pytest.mark.parametrize("interval_s", [0.0, 61.0])
async def test_an_interval_out_of_bounds_is_refused_by_name(interval_s: float) -> None:
    service = WorkerService(
        pb.WorkerInfo, lambda role: pb.WorkerLoad(), PointJournal(), no_cache, RoleSwitch((), ())
    )
    with pytest.raises(InvalidRequestError, match="interval_s: must be from"):
        await anext(
            aiter(service.Watch(pb.WatchRequest(interval_s=interval_s), cast(WatchContext, None)))
        )

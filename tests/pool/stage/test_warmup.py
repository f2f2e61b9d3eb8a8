"""A warm-up leaks nothing, however it ends."""

import asyncio
from collections.abc import Iterator

import pytest

from decode.entry import DecodeLimits
from decode.scheduler import DecodeScheduler
from decode.worker import is_finished
from engine.core.request import Request, SamplingParams
from engine.loop import EngineLoop
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepResults
from engine.pipeline.step_plan import RankBatches
from pool.stage import warmup as warmup_module
from pool.stage.warmup import run_inside
from runtime.clock import SystemClock
from runtime.errors import DeadlineError, PeerLostError


class Mute:
    """A pipeline from which nothing comes back."""

    depth = 1
    runs_apart = False

    def launch(self, step: RankBatches) -> None: ...

    def collect(self, timeout_s: float) -> StepResults | None:
        return None

    def wake(self) -> None: ...


class Dead(Mute):
    def collect(self, timeout_s: float) -> StepResults | None:
        raise PeerLostError("the connection to stage 1 has ended")


@pytest.fixture
def scheduler() -> DecodeScheduler:
    limits = DecodeLimits(
        page_size=4, grid=1, depth=1, max_running=1, max_context_tokens=32, growth_tokens=4
    )
    return DecodeScheduler(
        pages=PageAllocator(9), slots=SlotAllocator(3), limits=limits, clock=SystemClock()
    )


@pytest.fixture
def loop(scheduler: DecodeScheduler) -> Iterator[EngineLoop]:
    loop = EngineLoop(scheduler)
    loop.start()
    yield loop
    loop.stop()


async def warm_up(loop: EngineLoop, scheduler: DecodeScheduler) -> None:
    request = Request("warm-up", (0,), 2, SamplingParams(temperature=0))
    await run_inside(
        loop,
        lambda emit: scheduler.submit_local(request, emit),
        is_finished,
        lambda key: loop.post(lambda: scheduler.release(key)),
    )


async def until_nothing_is_held(loop: EngineLoop, scheduler: DecodeScheduler) -> None:
    """Wait until memory of a cancelled caller, which passes two threads, is free."""
    async with asyncio.timeout(60):
        while True:
            load = await loop.submit(scheduler.load)
            if (load.running_requests, load.pages_free, load.slots_free) == (
                0,
                scheduler.pages.num_total,
                2,
            ):
                return
            await asyncio.sleep(0.01)


async def test_a_warm_up_that_fails_holds_nothing(
    loop: EngineLoop, scheduler: DecodeScheduler
) -> None:
    for _ in range(2):
        loop.post(lambda: loop.attach(Dead()))
        with pytest.raises(PeerLostError):
            await warm_up(loop, scheduler)
        await until_nothing_is_held(loop, scheduler)


async def test_a_warm_up_that_times_out_or_is_cancelled_leaks_nothing(
    loop: EngineLoop, scheduler: DecodeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup_module, "WARM_UP_TIMEOUT_S", 0.05)
    loop.post(lambda: loop.attach(Mute()))
    with pytest.raises(DeadlineError):
        await warm_up(loop, scheduler)
    loop.post(lambda: loop.detach(PeerLostError("the pool broke")))
    await until_nothing_is_held(loop, scheduler)
    cancelled = asyncio.create_task(warm_up(loop, scheduler))
    await asyncio.sleep(0)  # it has submitted, and will never see the result
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await until_nothing_is_held(loop, scheduler)

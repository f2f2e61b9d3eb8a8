"""The loop against a scripted scheduler and pipeline: order, window, failure, commands."""

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from engine import loop as loop_module
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.rows import Row, build_batch
from engine.core.time_limits import HangWatch, StepLimit
from engine.loop import EngineLoop, LoopObserver
from engine.pipeline.results import StepFailed, StepResult, StepResults
from engine.pipeline.step_plan import RankBatches
from runtime.clock import ManualClock
from runtime.errors import BatonError, CapacityError, InternalError, PeerLostError, UnavailableError


class ScriptedScheduler:
    """A scheduler that hands out `work` batches and logs its calls."""

    def __init__(self, work: int = 0) -> None:
        self.work = work
        self.log: list[str] = []
        self.idle = threading.Event()
        self.idle_error: BatonError | None = None
        self._next = 0

    def next_batch(self) -> ForwardBatch | None:
        if self._next >= self.work:
            return None
        self._next += 1
        return build_batch(ForwardMode.DECODE, [Row(self._next, [1], 0, [1], 0, None)])

    def on_result(self, batch: ForwardBatch, result: StepResult) -> None:
        self.log.append(f"result {batch.request_keys[0]} {'error' if result.error else 'ok'}")

    def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
        self.log.append(f"lost {[batch.request_keys[0] for batch in in_flight]} {error.reason}")

    def on_idle(self) -> None:
        self.idle.set()
        if self.idle_error is not None:
            raise self.idle_error


class ScriptedPipeline:
    """A pipeline that returns results in order once `depth` batches are in; records the widest
    window."""

    runs_apart = False

    def __init__(self, depth: int, *, dies_at: int = 0, fails_at: int = 0) -> None:
        self.depth = depth
        self.widest = 0
        self._dies_at, self._fails_at = dies_at, fails_at
        self._inside: deque[int] = deque()
        self._sequence = 0

    def launch(self, step: RankBatches) -> None:
        self._sequence += 1
        self._inside.append(self._sequence)
        self.widest = max(self.widest, len(self._inside))

    def collect(self, timeout_s: float) -> StepResults | None:
        sequence = self._inside.popleft()
        if sequence == self._dies_at:
            raise PeerLostError("stage 1 died")
        return (StepResult(sequence, [], StepFailed("no") if sequence == self._fails_at else None),)

    def wake(self) -> None:
        pass


@pytest.fixture
def running() -> Iterator[list[EngineLoop]]:
    loops: list[EngineLoop] = []
    yield loops
    for loop in loops:
        loop.stop()


def start(
    running: list[EngineLoop], scheduler: ScriptedScheduler, observer: LoopObserver | None = None
) -> EngineLoop:
    loop = EngineLoop(scheduler, observer=observer, idle_check_s=0)
    running.append(loop)
    loop.start()
    return loop


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_window_is_the_pipelines_depth(running: list[EngineLoop], depth: int) -> None:
    scheduler, pipeline = ScriptedScheduler(work=9), ScriptedPipeline(depth)
    loop = start(running, scheduler)
    loop.post(lambda: loop.attach(pipeline))
    assert scheduler.idle.wait(30)
    assert pipeline.widest == depth
    assert scheduler.log == [f"result {i} ok" for i in range(1, 10)]


def test_a_queued_step_is_timed_from_the_previous_result(
    running: list[EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps compute apart, the loop's waits are no pauses of the stage, and its launches no
    forwards."""
    clock, seen = ManualClock(), list[tuple[str, float]]()

    class OneSecondEach(ScriptedPipeline):
        runs_apart = True

        def collect(self, timeout_s: float) -> StepResults | None:
            clock.advance(1.0)
            return super().collect(timeout_s)

    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=clock.now))
    scheduler = ScriptedScheduler(work=3)
    loop = start(
        running,
        scheduler,
        LoopObserver(
            launched_s=lambda seconds, batch: seen.append(("forward", seconds)),
            step_s=lambda seconds, batch: seen.append(("step", seconds)),
            waited_s=lambda seconds: seen.append(("waited", seconds)),
        ),
    )
    loop.post(lambda: loop.attach(OneSecondEach(2)))
    assert scheduler.idle.wait(30)
    assert seen == [("forward", 1.0), ("step", 1.0)] * 3


def test_a_failed_step_is_published_and_the_loop_continues(running: list[EngineLoop]) -> None:
    scheduler = ScriptedScheduler(work=3)
    loop = start(running, scheduler)
    loop.post(lambda: loop.attach(ScriptedPipeline(1, fails_at=2)))
    assert scheduler.idle.wait(30)
    assert scheduler.log == ["result 1 ok", "result 2 error", "result 3 ok"]


async def test_a_lost_peer_ends_requests_in_flight_and_a_new_pipeline_serves(
    running: list[EngineLoop],
) -> None:
    scheduler = ScriptedScheduler(work=4)
    loop = start(running, scheduler)
    await loop.submit(lambda: loop.attach(ScriptedPipeline(2, dies_at=2)))
    async with asyncio.timeout(30):
        while "lost [2, 3] PEER_LOST" not in scheduler.log:  # noqa: ASYNC110 - happens on the loop's thread
            await asyncio.sleep(0.01)
    assert scheduler.log == ["result 1 ok", "lost [2, 3] PEER_LOST"]
    scheduler.idle.clear()
    await loop.submit(lambda: loop.attach(ScriptedPipeline(2)))
    assert await asyncio.to_thread(scheduler.idle.wait, 30)
    assert scheduler.log[2:] == ["result 4 ok"]


async def test_a_broken_pipeline_is_reported_once_and_a_detached_one_never(
    running: list[EngineLoop],
) -> None:
    lost: list[str] = []
    scheduler = ScriptedScheduler(work=1)
    loop = start(running, scheduler)
    loop.post(
        lambda: loop.attach(ScriptedPipeline(1, dies_at=1), lambda error: lost.append(str(error)))
    )
    assert await asyncio.to_thread(scheduler.idle.wait, 30)
    assert lost == ["stage 1 died"]
    await loop.submit(
        lambda: loop.attach(ScriptedPipeline(1), lambda error: lost.append(str(error)))
    )
    await loop.submit(lambda: loop.detach(PeerLostError("its owner says so")))
    assert lost == ["stage 1 died"]


async def test_detaching_a_broken_pipeline_ends_requests_that_came_later(
    running: list[EngineLoop],
) -> None:
    scheduler = ScriptedScheduler()
    loop = start(running, scheduler)
    await loop.submit(lambda: loop.detach(PeerLostError("stage 1 left")))
    assert scheduler.log == ["lost [] PEER_LOST"]


def test_a_thread_that_ends_leaves_its_reason(running: list[EngineLoop]) -> None:
    class Broken(ScriptedScheduler):
        def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
            raise KeyError("lost count")

    loop = start(running, Broken(work=1))
    loop.post(lambda: loop.attach(ScriptedPipeline(1, dies_at=1)))
    loop._thread.join(30)
    assert isinstance(loop.failure, KeyError)


async def test_submit_returns_and_raises_here(running: list[EngineLoop]) -> None:
    loop = start(running, ScriptedScheduler())
    assert await loop.submit(lambda: threading.current_thread().name) == "engine"

    def refuse() -> None:
        raise InternalError("no")

    with pytest.raises(InternalError, match="no"):
        await loop.submit(refuse)


async def test_an_unknown_error_is_reported_and_does_not_end_the_thread(
    running: list[EngineLoop],
) -> None:
    told: list[str] = []
    loop = start(running, ScriptedScheduler(), LoopObserver(unhealthy=told.append))

    def explode() -> None:
        raise ZeroDivisionError("boom")

    loop.post(explode)
    assert await loop.submit(lambda: "alive") == "alive"
    assert told == ["boom"]


async def test_running_out_of_memory_in_a_step_is_explained(running: list[EngineLoop]) -> None:
    told: list[str] = []
    loop = start(running, ScriptedScheduler(), LoopObserver(unhealthy=told.append))
    loop.post(lambda: torch.zeros(1 << 62, dtype=torch.uint8))
    assert await loop.submit(lambda: "alive") == "alive"
    assert told == ["memory ran out in a step"]


async def test_a_leak_found_when_idle_is_reported(running: list[EngineLoop]) -> None:
    told: list[str] = []
    scheduler = ScriptedScheduler(work=1)
    scheduler.idle_error = InternalError("page 3 is lost")
    loop = start(running, scheduler, LoopObserver(unhealthy=told.append))
    loop.post(lambda: loop.attach(ScriptedPipeline(1)))
    assert await asyncio.to_thread(scheduler.idle.wait, 30)
    await loop.submit(lambda: None)
    assert set(told) == {"page 3 is lost"}
    assert scheduler.log == ["result 1 ok"], "a leak breaks no pipeline"


def test_the_step_timeout_follows_measured_steps_above_a_floor() -> None:
    limit = StepLimit()
    assert limit.seconds == 600, "the first step may compile"
    limit.observe(0.02)
    assert limit.seconds == 60
    limit.observe(8.0)
    assert limit.seconds == 160
    for _ in range(3000):
        limit.observe(0.02)
    assert limit.seconds == 60, "one long step is no excuse for ever"
    limit = StepLimit(5.0)
    assert limit.seconds == 600
    limit.observe(0.02)
    assert limit.seconds == 5


def test_only_one_step_that_lasts_is_a_hung_engine() -> None:
    clock = ManualClock()
    watch = HangWatch(clock)
    looks = []
    for busy_since_s in (
        1.0,
        1.0,
        None,
        2.0,
        2.0,
        3.0,
        3.0,
        3.0,
        3.0,
        3.0,
    ):  # a step a second, then one that lasts
        clock.advance(1.0)
        looks.append(watch.is_over(busy_since_s, 3.0))
    assert looks == [False] * 9 + [True]


def test_a_process_that_was_held_up_is_not_a_hung_engine() -> None:
    clock = ManualClock()
    watch = HangWatch(clock)
    assert not watch.is_over(1.0, 3.0)
    clock.advance(600)  # stopped, and going on
    assert not watch.is_over(1.0, 3.0)


async def test_commands_that_free_memory_are_taken_despite_a_full_queue(
    running: list[EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "MAX_COMMANDS", 2)
    loop = start(running, ScriptedScheduler())
    began, gate, released = threading.Event(), threading.Event(), list[str]()

    def hold() -> None:
        began.set()
        gate.wait(30)

    loop.post(hold)
    assert await asyncio.to_thread(began.wait, 30)
    waiting = [asyncio.create_task(loop.submit(lambda: None)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError, match="2 commands queued"):
        await loop.submit(lambda: None)
    loop.post(lambda: released.append("a page"))
    gate.set()
    await asyncio.gather(*waiting)
    assert await loop.submit(lambda: released) == ["a page"]


async def test_an_engine_that_has_ended_refuses_instead_of_keeping_its_callers(
    running: list[EngineLoop],
) -> None:
    class Broken(ScriptedScheduler):
        def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
            raise KeyError("lost count")

    loop = start(running, Broken(work=1))
    loop.post(lambda: loop.attach(ScriptedPipeline(1, dies_at=1)))
    await asyncio.to_thread(loop._thread.join, 30)
    with pytest.raises(UnavailableError, match="the engine loop has ended"):
        await loop.submit(lambda: None)


async def test_the_result_of_a_cancelled_caller_is_released(
    running: list[EngineLoop],
) -> None:
    loop = start(running, ScriptedScheduler())
    began, gate, undone = threading.Event(), threading.Event(), threading.Event()
    taken: list[str] = []

    def take() -> str:
        began.set()
        gate.wait(120)
        return "lease"

    def undo(result: str) -> None:
        taken.append(result)
        undone.set()

    waiting = asyncio.create_task(loop.submit(take, undo=undo))
    assert await asyncio.to_thread(began.wait, 30)
    waiting.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(undone.wait, 30)
    assert taken == ["lease"]


async def test_an_error_for_a_caller_that_was_cancelled_is_no_bug_in_the_log(
    running: list[EngineLoop],
) -> None:
    loop, complaints = start(running, ScriptedScheduler()), list[dict[str, object]]()
    began, gate = threading.Event(), threading.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def refuse() -> None:
        began.set()
        gate.wait(120)
        raise CapacityError("48 requests hold memory", resource="held requests")

    waiting = asyncio.create_task(loop.submit(refuse))
    assert await asyncio.to_thread(began.wait, 30)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await loop.submit(lambda: None)
    await asyncio.sleep(0)  # the previous call has returned by now
    del waiting
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []

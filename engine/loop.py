"""The engine loop: schedule, prepare, launch, collect, publish.

The loop keeps a window of batches in flight. The window is the depth of the pipeline. It is 1 on a
single stage, and 2 if the stage prepares the next step while one computes. On a pipelined pool it
is the number of stages. One thread runs the loop and owns the scheduler, its allocators and the
stage channel. Other threads pass commands to it.

    commands ─▶ [ scheduler.next_batch ─▶ pipeline.launch ]* ─▶ pipeline.collect ─▶
    scheduler.on_result ─▶ …

A pool with several data ranks has one scheduler per rank. A step then holds one batch of each
scheduler (`plan_step`).
"""

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard, TypeVar

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.time_limits import StepLimit
from engine.pipeline.results import StepResult
from engine.pipeline.stages import Pipeline
from engine.pipeline.step_plan import RankBatches, plan_step
from runtime.errors import (
    BatonError,
    CapacityError,
    DeadlineError,
    IntegrityError,
    InternalError,
    PeerLostError,
    UnavailableError,
)
from runtime.process.host_memory import is_out_of_memory

logger = logging.getLogger(__name__)

LostListener = Callable[[BatonError], object]
T = TypeVar("T")
ENGINE_THREAD = "engine"
MAX_COMMANDS = 65536


class Scheduler(Protocol):
    """The policy that decides which requests run. Only the loop's thread calls it."""

    def next_batch(self) -> ForwardBatch | None:
        """Return the next batch to launch, or None if nothing new is ready."""
        ...

    def on_result(self, batch: ForwardBatch, result: StepResult) -> None:
        """Publish the results of a batch. If `result.error` is set, end its requests."""
        ...

    def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
        """End every request that depends on the lost pipeline."""
        ...

    def on_idle(self) -> None:
        """Check that nothing leaked, while no request runs or waits.

        Raises:
            InternalError: something leaked.
        """
        ...


@dataclass(frozen=True)
class LoopObserver:
    """The callbacks that receive the loop's measurements. The loop's thread calls all of them."""

    # The time of stage 0's own forward.
    launched_s: Callable[[float, ForwardBatch], object] = lambda seconds, batch: None
    # The time from launch to result.
    step_s: Callable[[float, ForwardBatch], object] = lambda seconds, batch: None
    waited_s: Callable[[float], object] = lambda seconds: None
    # Called before a forward and before a wait: the scheduler's state is consistent.
    settled: Callable[[], object] = lambda: None
    unhealthy: Callable[[str], object] = lambda reason: None


class EngineLoop:
    """A thread that runs a scheduler over a pipeline.

    `submit` is the only way in. Other threads read the scheduler's state, without waiting for a
    step, from what `observer.settled` published and from `busy_since_s`. Without a pipeline (before
    the pool has formed, or after it broke), commands run and batches wait. A broken pipeline stays
    broken: its owner is notified and can attach another one.
    """

    def __init__(
        self,
        *schedulers: Scheduler,
        observer: LoopObserver | None = None,
        step_limit: StepLimit | None = None,
        idle_check_s: float = 1.0,
    ) -> None:
        """Prepare a loop that `start` starts.

        `schedulers` has one scheduler per data rank. `idle_check_s` is the least time between two
        idle checks, because each check visits every id of the pools.
        """
        self._schedulers = schedulers
        self._idle_check_s = idle_check_s
        self._checked_s = 0.0
        self._observer = observer or LoopObserver()
        self.step_limit = step_limit or StepLimit()
        self._pipeline: Pipeline | None = None
        self._on_lost: LostListener = lambda error: None
        self._failure: BaseException | None = None
        self._in_flight: deque[tuple[RankBatches, float]] = deque()
        self._collected_s = 0.0  # time of the latest result
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopping = False
        self._was_busy = False
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """Return the error that ended the loop's thread, or None. Nothing runs after it."""
        return self._failure

    @property
    def busy_since_s(self) -> float | None:
        """Return when the current command or step began, in seconds of the monotonic clock.

        Return None while the thread waits for work. Any thread may call it.
        """
        return self._busy_since_s

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10) -> None:
        """End the loop after the queued commands. Batches in flight are abandoned."""
        self.post(self._stop)
        self._thread.join(timeout_s)

    def post(self, command: Callable[[], object]) -> None:
        """Queue `command` for the loop's thread.

        It is never rejected, because releases of memory and reports about stages must not be lost.
        The number of such commands is bounded by the stages and by the calls of `submit`, which are
        bounded.
        """
        self._commands.put(command)
        pipeline = self._pipeline
        if pipeline is not None:
            pipeline.wake()

    async def submit(
        self, call: Callable[[], T], *, undo: Callable[[T], object] = lambda result: None
    ) -> T:
        """Run `call` on the loop's thread, and return its result or raise its error.

        If the caller is cancelled, it never sees the result. Then `undo(result)` runs on the loop's
        thread and releases what the call reserved.

        Raises:
            CapacityError: too many commands are queued.
            UnavailableError: the loop's thread has ended.
        """
        if self._failure is not None:
            raise UnavailableError(f"the engine loop has ended: {self._failure}")
        if self._commands.qsize() >= MAX_COMMANDS:
            raise CapacityError(
                f"the engine has {MAX_COMMANDS} commands queued", resource="engine commands"
            )
        loop = asyncio.get_running_loop()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - the awaiting caller raises it
                future.set_exception(error)

        self.post(command)
        answer = asyncio.wrap_future(future, loop=loop)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            # Reading the exception avoids the warning about an exception that was never retrieved.
            answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            future.add_done_callback(
                lambda ended: None if ended.exception() else self.post(lambda: undo(ended.result()))
            )
            raise

    def attach(self, pipeline: Pipeline, on_lost: LostListener = lambda error: None) -> None:
        """Begin to launch batches.

        `on_lost` is called once if the pipeline breaks, from the loop's thread and after all
        dependent requests have ended. It is not called after `detach`. Only the loop's thread may
        call this method.
        """
        self._pipeline = pipeline
        self._on_lost = on_lost

    def detach(self, error: BatonError) -> None:
        """Remove the pipeline, and end all requests that depended on it.

        Only the loop's thread may call this method.
        """
        self._pipeline = None
        steps = [step for step, _ in self._in_flight]
        self._in_flight.clear()
        for rank, scheduler in enumerate(self._schedulers):
            scheduler.on_pipeline_lost(
                [batch for step in steps if _has_rows(batch := step[rank])], error
            )

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._guarded_turn()
        except BaseException as error:  # outermost handler of the thread: the owner reads `failure`
            logger.critical("the engine's thread has ended", exc_info=error)
            self._failure = error

    def _guarded_turn(self) -> None:
        try:
            self._turn()
        except (PeerLostError, DeadlineError) as error:
            self._lose(error)
        except IntegrityError as error:
            # For requests this equals a lost stage: the same tokens can be sampled again, here or
            # on another pool.
            logger.error("bytes between stages were damaged: %s", error)
            self._lose(PeerLostError(str(error)))
        except Exception as error:
            # An unexpected error must not end the thread silently.
            logger.exception("unexpected error in the engine loop")
            what = "memory ran out in a step" if is_out_of_memory(error) else str(error)
            self._observer.unhealthy(what)
            self._lose(UnavailableError(f"the engine stopped: {what}"))

    def _lose(self, error: BatonError) -> None:
        """End the requests of the broken pipeline and notify its owner, if one is attached."""
        was_attached = self._pipeline is not None
        on_lost = self._on_lost
        self.detach(error)
        if was_attached:
            on_lost(error)

    def _turn(self) -> None:
        self._note_busy()
        self._drain_commands()
        pipeline = self._pipeline
        if pipeline is not None:
            has_launched = False
            while len(self._in_flight) < pipeline.depth and (step := self._next_step()) is not None:
                self._observer.settled()
                launched = self._note_busy()
                self._in_flight.append((step, launched))
                pipeline.launch(step)
                if step[0] is not None and not pipeline.runs_apart:
                    self._observer.launched_s(time.monotonic() - launched, step[0])
                self._was_busy = has_launched = True
            if self._in_flight:
                if not has_launched:
                    self._observer.settled()
                self._collect(pipeline)
                return
        if self._was_busy and time.monotonic() - self._checked_s >= self._idle_check_s:
            self._was_busy, self._checked_s = False, time.monotonic()
            self._check_idle()
        self._observer.settled()
        self._wait_for_command()

    def _next_step(self) -> RankBatches | None:
        """Return the next batch of each data rank, or None if no rank has one."""
        step = plan_step([scheduler.next_batch() for scheduler in self._schedulers])
        return step if any(batch is not None for batch in step) else None

    def _check_idle(self) -> None:
        try:
            for scheduler in self._schedulers:
                scheduler.on_idle()
        except InternalError as error:  # a leak does not break the pipeline
            logger.exception("an invariant is broken")
            self._observer.unhealthy(str(error))

    def _collect(self, pipeline: Pipeline) -> None:
        began = time.monotonic()
        step, launched = self._in_flight[0]
        results = pipeline.collect(0.5)
        if pipeline.runs_apart:
            launched = max(launched, self._collected_s)  # it waited for the previous step
        else:
            self._observer.waited_s(time.monotonic() - began)
        if results is None:
            if time.monotonic() - launched > self.step_limit.seconds:
                raise PeerLostError(f"a step took longer than {self.step_limit.seconds:g} s")
            return
        self._in_flight.popleft()
        self._collected_s = time.monotonic()
        step_s = self._collected_s - launched
        self.step_limit.observe(step_s)
        if pipeline.runs_apart and step[0] is not None:
            self._observer.launched_s(step_s, step[0])
        for scheduler, batch, result in zip(self._schedulers, step, results, strict=True):
            if _has_rows(batch) and result is not None:
                self._observer.step_s(step_s, batch)
                scheduler.on_result(batch, result)

    def _drain_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._note_busy()
            command()

    def _wait_for_command(self) -> None:
        self._busy_since_s = None
        try:
            command = self._commands.get(timeout=self._idle_check_s or 1.0)
        except queue.Empty:
            return
        self._note_busy()
        command()
        self._was_busy = True

    def _note_busy(self) -> float:
        """Record that the thread begins one command or one step."""
        self._busy_since_s = now = time.monotonic()
        return now


def _has_rows(batch: ForwardBatch | None) -> TypeGuard[ForwardBatch]:
    """Return whether the batch came from its scheduler, not from the padding of idle ranks."""
    return batch is not None and batch.mode is not ForwardMode.IDLE

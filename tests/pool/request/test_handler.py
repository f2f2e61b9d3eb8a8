"""Release of a request's memory: two lifetimes, request and transfer; and delivery of the engine's
events."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.core.layer_range import Placement
from pool.pipeline.group import StageGroup
from pool.pipeline.session_reports import SessionReports
from pool.request import handler as module
from pool.request.handler import EventPost, MemoryReclaimer
from runtime.clock import SystemClock
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageSessionEvent,
    StageSessionState,
)
from transfer.session import ReceiveSession, SendSession
from transfer.transport.authenticator import new_key


def drained_event() -> StageSessionEvent:
    return StageSessionEvent("s", 0, StageSessionState.DRAINED)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - lists have no event to wait for
            await asyncio.sleep(0.005)


class FakeLoop:
    """Runs commands at once."""

    def post(self, command: Callable[[], object]) -> None:
        command()


def make_reclaimer() -> tuple[MemoryReclaimer, SessionReports, list[str]]:
    reports, told = SessionReports(asyncio.get_running_loop()), list[str]()
    return MemoryReclaimer(reports, FakeLoop(), told.append), reports, told  # type: ignore[arg-type]


def watched(reports: SessionReports, *, num_stages: int) -> ReceiveSession:
    session = ReceiveSession("s", num_stages=num_stages, clock=SystemClock())
    reports.watch(session, lambda: None)
    return session


async def test_memory_is_released_only_when_every_stage_has_drained_s4_7_s4_10() -> None:
    reclaimer, reports, told = make_reclaimer()
    done: list[str] = []
    session = watched(reports, num_stages=2)
    reclaimer.end(
        lambda: done.append("released"), close=lambda: done.append("closed"), session=session
    )
    assert done == ["closed"]
    reports.deliver(0, drained_event())
    await asyncio.sleep(0)
    assert done == ["closed"]
    reports.deliver(1, drained_event())
    await until(lambda: done == ["closed", "released"])
    assert reports.num_watched == 0
    assert told == []
    await until(lambda: reclaimer.open_tasks == 0)


async def test_without_a_session_memory_is_released_at_once() -> None:
    reclaimer, _, _ = make_reclaimer()
    done: list[str] = []
    reclaimer.end(lambda: done.append("released"))
    assert done == ["released"]


async def test_a_session_that_does_not_drain_keeps_its_memory_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 0.01)
    reclaimer, reports, told = make_reclaimer()
    done: list[str] = []
    reclaimer.end(lambda: done.append("released"), session=watched(reports, num_stages=1))
    await until(lambda: told)
    assert done == []
    assert "did not drain" in told[0]


async def test_a_stalled_process_reads_pending_reports_before_it_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After SIGSTOP the timeout expires before a report can be read, and the pool would never serve
    again."""
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 1.0)
    reclaimer, reports, told = make_reclaimer()
    done: list[str] = []
    reclaimer.end(lambda: done.append("released"), session=watched(reports, num_stages=1))
    await asyncio.sleep(0)  # it waits

    async def report() -> None:
        for _ in range(5):  # what comes over a stream takes some turns of the loop
            await asyncio.sleep(0)
        reports.deliver(0, drained_event())

    reporting = asyncio.create_task(report())
    time.sleep(1.5)  # noqa: ASYNC251 - the whole loop stands still
    await reporting
    await until(lambda: reclaimer.open_tasks == 0)
    assert (done, told) == (["released"], [])


class FakeAgent:
    """Leaves everything to the test."""

    def open_send(
        self, request_key: int, source: SourceTerms, destination: DestinationTerms
    ) -> None:
        pass


async def test_a_request_sent_to_its_source_again_lets_the_older_epoch_drain() -> None:
    reclaimer, reports, told = make_reclaimer()
    group = StageGroup(FakeAgent(), [Placement()], reports)  # type: ignore[arg-type]
    source = SourceTerms("", "", 4, 4, 4, (1,), 0, ())
    released: list[int] = []
    sessions = [
        SendSession("s", epoch=epoch, num_stages=1, clock=SystemClock()) for epoch in range(2)
    ]

    def begin(epoch: int) -> None:
        group.open_send(
            epoch + 1,
            source,
            DestinationTerms("s", epoch, 0, (1,), 0, (), "", new_key()),
            sessions[epoch],
            lambda: None,
        )

    def end(epoch: int) -> None:
        sessions[epoch].abort("its stream ended")
        reclaimer.end(lambda: released.append(epoch), session=sessions[epoch])

    begin(0)
    end(0)
    begin(1)
    reports.deliver(0, StageSessionEvent("s", 0, StageSessionState.DRAINED))
    await until(lambda: released == [0])
    end(1)
    reports.deliver(0, StageSessionEvent("s", 1, StageSessionState.DRAINED))
    await until(lambda: released == [0, 1])
    assert (group.open_sessions, told) == (0, [])


async def test_events_of_a_step_arrive_at_once_and_an_error_blocks_none() -> None:
    loop, seen, errors = asyncio.get_running_loop(), list[object](), list[object]()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    failure = RuntimeError("of one request")

    def fail(event: object) -> None:
        raise failure

    post = EventPost(loop)
    for receive, event in ((seen.append, 1), (fail, 2), (seen.append, 3)):
        post.put(receive, event)
    post.flush()
    loop.call_soon(seen.append, "the loop's next callback")
    await until(lambda: len(seen) == 3)
    assert (seen, errors) == ([1, 3, "the loop's next callback"], [failure])


async def test_the_loop_runs_at_once_but_not_after_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(module, "_give_way", lambda: taken.append("way"))
    monkeypatch.setattr(module, "LET_IN_S", 60.0)
    post = EventPost(asyncio.get_running_loop())
    for event in ("first", "second"):
        post.put(taken.append, event)
        post.flush()
    assert taken == ["way"]
    await asyncio.sleep(0)
    monkeypatch.setattr(module, "LET_IN_S", 0.0)
    post.flush()  # nothing
    post.put(taken.append, "third")
    post.flush()
    assert taken == ["way", "first", "second", "way"]
    await asyncio.sleep(0)
    assert taken == ["way", "first", "second", "way", "third"]


async def test_deferrable_events_wake_the_loop_once_by_its_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, seen, calls = asyncio.get_running_loop(), list[object](), list[object]()
    post, wake = EventPost(loop), loop.call_soon_threadsafe

    def called(*args: Any) -> None:  # noqa: ANN401 - as the loop has it
        calls.append(args)
        wake(*args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", called)

    def step(event: object, *, can_wait: bool = True) -> None:
        post.put(seen.append, event, can_wait=can_wait)
        post.flush()

    step("first")
    await asyncio.sleep(0)
    assert (seen, len(calls)) == (["first"], 1), "the loop sleeps, so it is sent at once"
    step("second")
    step("third")
    await asyncio.sleep(0)
    assert (seen, len(calls)) == (["first"], 1)
    await until(lambda: seen == ["first", "second", "third"])
    assert len(calls) == 1
    step("fourth")
    step("last", can_wait=False)
    await asyncio.sleep(0)
    assert (seen[3:], len(calls)) == (["fourth", "last"], 2), (
        "what must not wait takes along what came before"
    )
    await asyncio.sleep(3 * module.PACE_S)
    step("after a pause")
    assert len(calls) == 3
    await asyncio.sleep(0)
    assert seen[5:] == ["after a pause"]


async def test_nothing_is_lost_between_a_thread_that_posts_and_the_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PACE_S", 0.0001)
    seen, post = list[object](), EventPost(asyncio.get_running_loop())

    def engine() -> None:
        for number in range(20_000):
            post.put(seen.append, number, can_wait=True)
            post.flush()

    await asyncio.to_thread(engine)
    await until(lambda: len(seen) == 20_000)
    assert seen == list(range(20_000))

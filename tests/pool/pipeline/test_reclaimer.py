"""Release of a request's memory: two lifetimes, request and transfer."""

import asyncio
import time
from collections.abc import Callable

import pytest

from engine.core.layer_range import Placement
from pool.pipeline import reclaimer as module
from pool.pipeline.group import StageGroup
from pool.pipeline.reclaimer import MemoryReclaimer
from pool.pipeline.session_reports import SessionReports
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
    assert "did not drain within 0.01 s on 1 of its stages: [0]" in told[0]


async def test_a_wait_for_a_drain_outlasts_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 0.01)
    reclaimer, reports, told = make_reclaimer()
    waiting = asyncio.create_task(reclaimer.drained(watched(reports, num_stages=1)))
    await until(lambda: told)
    assert not waiting.done(), "a stage may still use the memory"
    reports.deliver(0, drained_event())
    await waiting
    assert reports.num_watched == 0


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

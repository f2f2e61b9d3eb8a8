"""Events that a request's task handles, and the timeouts of expected worker responses."""

import asyncio
import time
from functools import partial

import pytest

from protos import decode_pb2
from router.request import worker_stream
from router.request.worker_stream import DueTimer, Ended, FlowInbox, Over, Received


class Closed:
    """A stream whose close does nothing."""

    def close(self) -> None:
        """Do nothing."""


def received(position: int = 0) -> Received:
    return Received(Closed(), decode_pb2.DecodeEvent(position=position))


async def test_an_inbox_is_idle_only_while_its_task_waits_and_it_is_empty() -> None:
    inbox = FlowInbox()
    assert not inbox.is_idle, "its task has not come yet"
    getting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    assert inbox.is_idle
    inbox.post(Over())
    assert not inbox.is_idle, "its task has not woken yet"
    inbox.post(Ended(None, lost="why"))
    assert await getting == Over()
    assert not inbox.is_idle, "its task works"
    assert await inbox.get() == Ended(None, lost="why")


async def test_events_of_workers_are_bounded_and_the_end_always_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_stream, "MAX_UNHANDLED", 2)
    inbox = FlowInbox()
    assert [inbox.post(received()) for _ in range(3)] == [True, True, False]
    assert inbox.post(Over())
    assert [type(await inbox.get()) for _ in range(3)] == [Received, Received, Over]


async def test_a_missing_response_is_overdue_once() -> None:
    overdue: list[float] = []
    timer, began = DueTimer(lambda: overdue.append(time.monotonic())), time.monotonic()
    timer.owe(0.1)
    assert not timer.is_over
    await asyncio.sleep(0.2)
    assert timer.is_over
    assert len(overdue) == 1
    assert 0.1 <= overdue[0] - began < 0.2
    timer.close()


async def test_a_received_or_postponed_response_is_not_overdue() -> None:
    overdue: list[str] = []
    settled, later, sooner = (
        DueTimer(partial(overdue.append, name)) for name in ("settled", "later", "sooner")
    )
    for timer in (settled, later):
        timer.owe(0.05)
    sooner.owe(60)
    settled.settle()
    later.owe(60)
    sooner.owe(0.05)
    await asyncio.sleep(0.15)
    assert overdue == ["sooner"]
    assert (settled.is_over, later.is_over, sooner.is_over) == (False, False, True)
    settled.owe(0.05)
    later.close()
    await asyncio.sleep(0.1)
    assert overdue == ["sooner", "settled"]


async def test_a_stalled_process_reads_pending_events_before_timing_out() -> None:
    """As after SIGSTOP: the time is over before anything that came could be read."""
    overdue: list[int] = []
    timer = DueTimer(lambda: overdue.append(1))
    timer.owe(0.05)
    loop = asyncio.get_running_loop()

    def answered() -> None:
        timer.settle()

    time.sleep(0.5)  # noqa: ASYNC251 - the whole loop stands still
    loop.call_later(0.1, answered)  # what comes over a stream takes some turns of the loop
    await asyncio.sleep(0.4)
    assert overdue == []
    timer.owe(0.05)
    time.sleep(0.5)  # noqa: ASYNC251
    await asyncio.sleep(0.4)
    assert overdue == [1], "it has had its time by now"

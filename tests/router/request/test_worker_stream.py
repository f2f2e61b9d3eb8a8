"""The timeouts of expected worker responses."""

import asyncio
import time
from functools import partial

from router.request.worker_stream import DueTimer


def soon(seconds: float) -> float:
    """Return a loop time in `seconds`."""
    return asyncio.get_running_loop().time() + seconds


async def test_a_missing_response_is_overdue_once() -> None:
    overdue: list[float] = []
    timer, began = DueTimer(lambda: overdue.append(time.monotonic())), time.monotonic()
    timer.expect(soon(0.1))
    await asyncio.sleep(0.2)
    assert len(overdue) == 1
    assert 0.1 <= overdue[0] - began < 0.2
    timer.close()


async def test_a_received_or_postponed_response_is_not_overdue() -> None:
    overdue: list[str] = []
    settled, later, sooner = (
        DueTimer(partial(overdue.append, name)) for name in ("settled", "later", "sooner")
    )
    for timer in (settled, later):
        timer.expect(soon(0.05))
    sooner.expect(soon(60))
    settled.expect(None)
    later.expect(soon(60))
    sooner.expect(soon(0.05))
    await asyncio.sleep(0.15)
    assert overdue == ["sooner"]
    settled.expect(soon(0.05))
    later.close()
    await asyncio.sleep(0.1)
    assert overdue == ["sooner", "settled"]


async def test_a_stalled_process_reads_pending_events_before_timing_out() -> None:
    """As after SIGSTOP: the time is over before anything that came could be read."""
    overdue: list[int] = []
    timer = DueTimer(lambda: overdue.append(1))
    timer.expect(soon(0.05))
    loop = asyncio.get_running_loop()

    def answered() -> None:
        timer.expect(None)

    time.sleep(0.5)  # noqa: ASYNC251 - the whole loop stands still
    loop.call_later(0.1, answered)  # what comes over a stream takes some turns of the loop
    await asyncio.sleep(0.4)
    assert overdue == []
    timer.expect(soon(0.05))
    time.sleep(0.5)  # noqa: ASYNC251
    await asyncio.sleep(0.4)
    assert overdue == [1], "it has had its time by now"

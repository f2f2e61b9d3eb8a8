"""A request that gets no further is reported with what everything waits for."""

import asyncio
import re

import pytest

from runtime.clock import SystemClock
from tests.support.cluster import stuck
from transfer.session import SendSession


class RequestFlow:
    """A request like the router's. The report finds these by their name."""

    def __init__(self) -> None:
        self.sessions = {"it": SendSession("stuck", epoch=0, clock=SystemClock(), num_stages=1)}

    async def run(self) -> None:
        await self._search()

    async def _search(self) -> None:
        await asyncio.Event().wait()


async def test_a_stuck_request_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stuck, "LIMIT_S", 0.0)
    monkeypatch.setattr(stuck, "LOOK_S", 0.01)
    tasks = [
        asyncio.create_task(RequestFlow().run()),
        asyncio.create_task(stuck.report_stuck_requests()),
    ]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    output = capsys.readouterr().out
    assert output.count("a request takes longer") == 1
    assert re.search(r"RequestFlow\.run:\d+ > RequestFlow\._search:\d+ > Event\.wait", output)
    assert "threads:" in output
    assert "SendSession(session_id='stuck'" in output
    assert 'stuck.py", line' in output  # this thread's stack

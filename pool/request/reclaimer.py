"""Ends what a request leaves behind, after its stream is gone: close its session everywhere, wait for the drain, and
only then give its memory back. Two lifetimes, request and transfer; memory is free when both have ended."""

import asyncio
import logging
from collections.abc import Callable

from engine.loop import EngineLoop
from pool.pipeline.group import Session, SessionReports
from runtime.clock import HELD_UP_S

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 30.0


class MemoryReclaimer:
    """Runs one short task per ended request. `unhealthy` hears of a session that will not drain: its memory stays
    leased rather than be written to by a stranger."""

    def __init__(self, reports: SessionReports, loop: EngineLoop, unhealthy: Callable[[str], None]) -> None:
        self._reports = reports
        self._loop = loop
        self._unhealthy = unhealthy
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    def end(self, release: Callable[[], None], *, close: Callable[[], None] | None = None,
            session: Session | None = None) -> None:
        """`close` aborts or releases on every stage; `release` runs on the engine thread once `session` has drained.
        None: none was ever opened."""
        if close is not None:
            close()
        if session is None:
            self._loop.post(release)
            return
        drained = self._reports.drained(session)
        if drained.is_set():
            self._reports.forget(session.session_id, session.epoch)
            self._loop.post(release)
            return
        task = asyncio.create_task(self._finish(release, session.session_id, session.epoch, drained))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, release: Callable[[], None], session_id: str, epoch: int,
                      drained: asyncio.Event) -> None:
        if not await _in_time(drained):
            self._unhealthy(f"session {session_id} did not drain within {DRAIN_TIMEOUT_S} s")
            return
        self._reports.forget(session_id, epoch)
        self._loop.post(release)


async def _in_time(drained: asyncio.Event) -> bool:
    """Whether it is set within the time, for all of which this process must have listened: one that was stopped and
    goes on has to read first what was reported meanwhile."""
    loop = asyncio.get_running_loop()
    due_at = loop.time() + DRAIN_TIMEOUT_S
    while not drained.is_set():
        try:
            async with asyncio.timeout_at(due_at):
                await drained.wait()
        except TimeoutError:
            now = loop.time()
            if now - due_at < HELD_UP_S:
                break
            due_at = now + DRAIN_TIMEOUT_S
    return drained.is_set()

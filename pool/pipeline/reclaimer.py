"""Release of the memory of transfers, once nothing accesses it."""

import asyncio
from collections.abc import Callable

from engine.loop import EngineLoop
from pool.pipeline.session_reports import SessionReports, TransferSession
from runtime.clock import STALLED_S, Deadline, LoopClock

DRAIN_TIMEOUT_S = 30.0


class MemoryReclaimer:
    """Release of a request's memory after its stream has ended.

    It closes the session on every stage, waits until it has drained, and only then releases the
    memory. Request and transfer have separate lifetimes; memory is free when both have ended.

    It runs one short task per ended request. `unhealthy` is called for a session that does not
    drain: its memory stays leased, because a transfer may still write to it.
    """

    def __init__(
        self, reports: SessionReports, loop: EngineLoop, unhealthy: Callable[[str], None]
    ) -> None:
        self._reports = reports
        self._loop = loop
        self._unhealthy = unhealthy
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    def end(
        self,
        release: Callable[[], None],
        *,
        close: Callable[[], None] | None = None,
        session: TransferSession | None = None,
    ) -> None:
        """Close a request's session on every stage and release its memory after it has drained.

        `close` aborts or releases the session on every stage. `release` runs on the engine thread
        once `session` has drained. `session` is None if none was opened.
        """
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
        task = asyncio.create_task(self._finish(release, session, session.epoch, drained))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drained(self, session: TransferSession) -> None:
        """Wait until no stage can access the memory of a closed session.

        After the limit, the pool is unhealthy, and this waits on.
        """
        drained = self._reports.drained(session)
        if not await self._drains(session, drained):
            await drained.wait()
        self._reports.forget(session.session_id, session.epoch)

    async def _finish(
        self,
        release: Callable[[], None],
        session: TransferSession,
        epoch: int,
        drained: asyncio.Event,
    ) -> None:
        if await self._drains(session, drained):
            self._reports.forget(session.session_id, epoch)
            self._loop.post(release)

    async def _drains(self, session: TransferSession, drained: asyncio.Event) -> bool:
        """Return whether a session drains in time; the pool is unhealthy if not."""
        if await _in_time(drained):
            return True
        self._unhealthy(
            f"session {session.session_id} did not drain within {DRAIN_TIMEOUT_S} s on "
            f"{len(session.undrained)} of its stages: {session.undrained}"
        )
        return False


async def _in_time(drained: asyncio.Event) -> bool:
    """Return whether `drained` is set in time.

    Time during which this process was stopped does not count, because it must first read the
    reports that arrived meanwhile.
    """
    clock = LoopClock()
    deadline = Deadline.after(clock, DRAIN_TIMEOUT_S)
    while not drained.is_set():
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await drained.wait()
        except TimeoutError:
            if deadline.overrun_s() < STALLED_S:
                break
            deadline = Deadline.after(clock, DRAIN_TIMEOUT_S)
    return drained.is_set()

"""The searches for another worker or pair, for a request whose worker failed."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from router.request import events as ev
from router.request.events import SearchDecode, SearchPair, SearchPrefill
from router.request.notes import booking_of
from router.request.preemption import PausedRequest, Preemption
from router.request.retries import FlowLimits
from router.workers.directory import Directory
from router.workers.placement import WorkerPlacement
from router.workers.placement_request import PlacementRequest, WorkerPair
from router.workers.worker import Booking, WorkerRole
from runtime.clock import Deadline, LoopClock

RETRY_PAUSE_S = 0.05
MAX_RETRY_PAUSE_S = 0.5


@dataclass(frozen=True)
class WorkerSearch:
    """The searches of one request. Each ends after the time that a worker may take to return."""

    directory: Directory
    limits: FlowLimits
    request: PlacementRequest
    preemption: Preemption
    priority: int

    async def worker(self, command: SearchPrefill | SearchDecode) -> ev.RequestEvent:
        """Search for a worker in place of one that failed; return what came of it."""
        if isinstance(command, SearchPrefill):
            found = await self.prefill(command, booking_of(command.pool))
            return _found_event(command.number, found)
        found, has_started_over = await self.decode(command)
        return _found_event(command.number, found, has_started_over=has_started_over)

    async def prefill(self, command: SearchPrefill, pool: Booking) -> Booking | None:
        """Book a prefill worker for the pool; return None if there was none in time."""
        await asyncio.sleep(RETRY_PAUSE_S)
        return await self._until(
            lambda: self._placement.book_prefill(self.request, pool, command.tried),
            self._restart_s(WorkerRole.PREFILL),
        )

    async def decode(self, command: SearchDecode) -> tuple[Booking | None, bool]:
        """Book a decode pool, or None; return as well whether the search started over.

        It starts over with all pools when each has refused. The time for that is longer if the
        pools are alive and only full.
        """
        booking = self._book_decode(command, command.tried)
        if booking is not None:
            return booking, False
        is_full = command.is_full and self._placement.has_decode(
            self.request.of_kind(command.compatibility)
        )
        timeout_s = self.limits.capacity_wait_s if is_full else self._restart_s(WorkerRole.DECODE)
        timeout_s = Deadline(LoopClock(), command.since_s + timeout_s).remaining_s()
        if timeout_s <= 0:
            return None, True
        await self._pause()
        return await self._until(lambda: self._book_decode(command, frozenset()), timeout_s), True

    async def pair(self, command: SearchPair) -> WorkerPair | None:
        """Book a pair in place of the one whose pool is lost, or return None.

        The search takes longer while a compatible pair exists and is only full. A preempted request
        waits for its turn meanwhile, however long that takes.
        """
        lost = booking_of(command.lost)
        request = self.request.of_kind(lost.compatibility)
        if command.gives_way:
            with self.preemption.paused(self.priority) as paused:
                return await self._resumed(request, paused)
        await asyncio.sleep(RETRY_PAUSE_S)
        clock = LoopClock()
        began_s = clock.now()
        while True:
            pair = self._placement.place_again(request, lost.worker.address)
            if pair is not None:
                return pair
            is_full = self._placement.has_pair(request)
            timeout_s = self.limits.capacity_wait_s if is_full else self._restart_s(*WorkerRole)
            deadline = Deadline(clock, began_s + timeout_s)
            if deadline.is_over:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.remaining_s()):
                    await self.directory.changed()

    async def _resumed(self, request: PlacementRequest, paused: PausedRequest) -> WorkerPair | None:
        """Book a pair with room at the turn of a paused request, or None if no pair is left."""
        clock = LoopClock()
        paired_s = clock.now()  # the last time at which there was a pair
        while True:
            if self.preemption.may_resume(paused):
                pair = self._placement.place(request)
                if pair is not None:
                    return pair
            if self._placement.has_pair(request):
                paired_s = clock.now()
            elif clock.now() - paired_s > self._restart_s(*WorkerRole):
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_RETRY_PAUSE_S):
                    await self.directory.changed()

    def _restart_s(self, *roles: WorkerRole) -> float:
        """Return how long to wait for a lost worker: at least as long as it took to start.

        There is nothing to wait for if no worker of a role has the adapter.
        """
        adapter = self.request.prompt.adapter
        if adapter and not all(self.directory.knows_adapter(role, adapter) for role in roles):
            return 0.0
        return max(self.limits.peer_wait_s, self.directory.restart_estimate_s)

    @property
    def _placement(self) -> WorkerPlacement:
        return self.directory.placement

    def _book_decode(self, command: SearchDecode, tried: frozenset[str]) -> Booking | None:
        return self._placement.book_decode(self.request.of_kind(command.compatibility), tried)

    async def _until(
        self, attempt: Callable[[], Booking | None], timeout_s: float
    ) -> Booking | None:
        """Return the first booking of `attempt` within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.directory.until(attempt)
        except TimeoutError:
            return None

    async def _pause(self) -> None:
        """Wait until the pools may have changed."""
        await asyncio.sleep(RETRY_PAUSE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_RETRY_PAUSE_S):
                await self.directory.changed()


def _found_event(
    number: int, worker: Booking | None, *, has_started_over: bool = False
) -> ev.RequestEvent:
    """Return the event of a search that ended, successfully unless `worker` is None."""
    if worker is None:
        return ev.SearchFailed(number)
    return ev.WorkerFound(number, worker, has_started_over)

"""Running requests that give way to more urgent ones, and resume after them.

A preempted request keeps its stream. Its pool frees its memory, and it resumes like a request whose
pool drains: another pair recomputes the tokens that the client has, and the response continues with
the same bits. Until then it is paused, ahead of queued requests that are no more urgent. It is
neither refused nor charged again.
"""

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import Protocol

from router.workers.placement import WorkerPlacement
from router.workers.placement_request import PlacementRequest
from router.workers.worker import Booking
from runtime.clock import Clock

SETTLE_S = 0.05  # between two preemptions; reports include the freed memory meanwhile


class Preemptible(Protocol):
    """A running request that may give way."""

    @property
    def preemptible_on(self) -> Booking | None:
        """Return the booking of the pool that generates its response; None if it cannot give way
        now.
        """
        ...

    def preempt(self) -> None:
        """Leave the pool, and wait for a turn to resume."""
        ...


@dataclass(frozen=True, order=True)
class PausedRequest:
    """A preempted request; sorts in the order in which requests resume."""

    priority: int
    number: int


class Preemption:
    """The requests of a router that may give way, and those that have.

    Requests of the priority `least` and less urgent ones give way. `first_waiting` returns the
    priority of the first queued request, None if none is queued.
    """

    def __init__(
        self,
        placement: WorkerPlacement,
        clock: Clock,
        least: int,
        first_waiting: Callable[[], int | None],
    ) -> None:
        self._placement = placement
        self._clock = clock
        self._least = least
        self._first_waiting = first_waiting
        self._running: dict[Preemptible, int] = {}  # with their priorities, oldest first
        self._paused: list[PausedRequest] = []  # the next to resume first
        self._numbers = count()
        self._settled_at_s = 0.0

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    def add(self, request: Preemptible, priority: int) -> None:
        """Note that a request runs. It may give way until `discard`."""
        if priority >= self._least:
            self._running[request] = priority

    def discard(self, request: Preemptible) -> None:
        """Note that a request has ended. Idempotent."""
        self._running.pop(request, None)

    def make_room(self, request: PlacementRequest, priority: int) -> None:
        """Preempt a request for one of this priority that lacks room in the decode pools.

        That is the least urgent, youngest request on a pool that fits. Each call preempts at most
        one.
        """
        now_s = self._clock.now()
        if (
            not self._running
            or now_s < self._settled_at_s
            or self._placement.awaits_prefill(request)
        ):
            return
        found = [
            (other_priority, other, booking)
            for other, other_priority in self._running.items()
            if other_priority > priority
            and (booking := other.preemptible_on) is not None
            and request.fits(booking.worker)
        ]
        if found:
            _, victim, booking = max(reversed(found), key=itemgetter(0))
            self._settled_at_s = now_s + SETTLE_S
            booking.finished()
            victim.preempt()

    @contextmanager
    def paused(self, priority: int) -> Iterator[PausedRequest]:
        """Count a request as paused inside the block."""
        request = PausedRequest(priority, next(self._numbers))
        bisect.insort(self._paused, request)
        try:
            yield request
        finally:
            self._paused.remove(request)

    def may_resume(self, request: PausedRequest) -> bool:
        """Return whether it is this request's turn."""
        first = self._first_waiting()
        return self._paused[0] is request and (first is None or first >= request.priority)

    def holds_back(self, priority: int) -> bool:
        """Return whether a request of this priority waits until a paused one has resumed."""
        return bool(self._paused) and self._paused[0].priority <= priority

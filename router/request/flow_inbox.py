"""What happens to a request on its workers, and the queue of what its own task has to handle of it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from protos import decode_pb2, prefill_pb2
from runtime.clock import HELD_UP_S
from runtime.errors import BatonError

MAX_UNHANDLED = 64  # events of one request; workers wait for the request, or have little to say


class Stream(Protocol):
    """That something came by."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Received:
    """A message of a worker."""

    stream: Stream
    event: prefill_pb2.PrefillEvent | decode_pb2.DecodeEvent


@dataclass(frozen=True)
class Ended:
    """A worker's stream is over: as it should, with the worker's error, or because it was lost, and why."""

    stream: Stream | None
    error: BatonError | None = None
    lost: str = ""


@dataclass(frozen=True)
class Over:
    """Nothing more is needed of the workers, or handling what came went wrong."""

    error: Exception | None = None


@dataclass(frozen=True)
class Overdue:
    """An answer that was due has not come."""


Event = Received | Ended | Over | Overdue


class FlowInbox:
    """What a request's task has to handle, in order: what happens while nothing waits here, and needs no wait, is
    handled where it happens."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._reader: asyncio.Future[None] | None = None  # that waits for an event

    @property
    def is_idle(self) -> bool:
        """Whether the task waits, with nothing to handle."""
        return self._reader is not None and not self._reader.done() and not self._events

    def post(self, event: Event) -> bool:
        """Never waits. False if too many events wait already, for one of a worker."""
        if len(self._events) >= MAX_UNHANDLED and isinstance(event, Received):
            return False
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return True

    async def get(self) -> Event:
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._events.popleft()


class DueTimer:
    """Calls `overdue` when an answer that is due has not come in time. One timer for a request and not one for an
    answer: it is moved when it goes off too soon. Build inside a running event loop."""

    def __init__(self, overdue: Callable[[], object]) -> None:
        self._overdue = overdue
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.due_at: float | None = None  # loop time; None while none is due

    @property
    def is_over(self) -> bool:
        """Whether it should be there."""
        return self.due_at is not None and self._loop.time() >= self.due_at

    def owe(self, seconds: float) -> None:
        """An answer is due so soon, in place of any other."""
        self.due_at = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self.due_at:
            self._set(self.due_at)

    def settle(self) -> None:
        """None is due any more."""
        self.due_at = None

    def close(self) -> None:
        """Idempotent."""
        self.due_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.due_at is None:
            return
        now = self._loop.time()
        if now < self.due_at:
            self._set(self.due_at)
        elif now - self.due_at >= HELD_UP_S:
            # This router did not run, as when its process was held up: what the worker sent is read first.
            self.due_at = now + HELD_UP_S
            self._set(self.due_at)
        else:
            self._overdue()

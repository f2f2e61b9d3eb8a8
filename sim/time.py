"""Virtual time: an event loop whose clock jumps to the next due callback instead of waiting for it.

Any coroutine runs on it unchanged. Timers, deadlines and pauses take no real time, and running code
takes no virtual time. Fleets set millions of timers and cancel most of them, so the loop is a heap
of tuples and a queue.
"""

import asyncio
import gc
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

from runtime.errors import InternalError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

COLLECTION = 50_000, 10, 2  # garbage collection thresholds of the three generations
_SPARE_TIMERS = 1024  # cancelled timers allowed in the heap, in addition to half of its size


class _Due(asyncio.TimerHandle):
    """A callback that is queued or timed. Omits the debugging state of asyncio's handles."""

    __slots__ = ("_virtual", "arguments", "callback", "context", "is_cancelled")

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., object],
        arguments: tuple[object, ...],
        loop: "VirtualLoop",
        context: Context | None,
    ) -> None:
        self._when = when_s
        self._virtual = loop
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.is_cancelled = False

    def cancelled(self) -> bool:
        return self.is_cancelled

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.arguments = ()
            self._virtual.num_cancelled += 1


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop in virtual time, starting at 0 s.

    It supports neither sockets nor threads. A callback that raises ends the run. Callbacks without
    a context of their own run in the context of the caller of `run_forever`.
    """

    def __init__(self) -> None:
        self._is_running = False  # asyncio's constructor calls `is_running`
        super().__init__()
        self.num_cancelled = 0  # upper bound of the cancelled timers in the heap
        self._now_s = 0.0
        self._serial = count()
        self._soon: deque[_Due] = deque()
        self._timers: list[tuple[float, int, _Due]] = []
        self._is_stopping = False

    def time(self) -> float:
        return self._now_s

    def is_running(self) -> bool:
        return self._is_running

    def stop(self) -> None:
        self._is_stopping = True

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        due = _Due(self._now_s, callback, args, self, context)
        self._soon.append(due)
        return due

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        # Called by the handler of an interrupt, on the only thread.
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        due = _Due(self._now_s + delay, callback, args, self, context)
        heapq.heappush(self._timers, (due.when(), next(self._serial), due))
        return due

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        due = _Due(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._serial), due))
        return due

    def run_forever(self) -> None:
        """Run until `stop`.

        Raises:
            InternalError: no callback is queued and no timer is left.
        """
        asyncio._set_running_loop(self)  # noqa: SLF001 (intended for event loops)
        self._is_running = True
        self._is_stopping = False
        soon = self._soon
        try:
            while not self._is_stopping:
                if soon:
                    due = soon.popleft()
                    if due.is_cancelled:
                        continue
                else:
                    due = self._next_timer()
                if due.context is None:
                    due.callback(*due.arguments)
                else:
                    due.context.run(due.callback, *due.arguments)
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)  # noqa: SLF001

    def _next_timer(self) -> _Due:
        """Return the next timer, and advance the time to it."""
        if self.num_cancelled > _SPARE_TIMERS + len(self._timers) // 2:
            self._timers = [each for each in self._timers if not each[2].is_cancelled]
            heapq.heapify(self._timers)
            self.num_cancelled = 0
        timers = self._timers
        pop = heapq.heappop
        while timers:
            when_s, _, due = pop(timers)
            if not due.is_cancelled:
                if when_s > self._now_s:
                    self._now_s = when_s
                return due
            self.num_cancelled -= 1
        raise InternalError("the simulation waits for something that will never happen")


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in virtual time.

    Raises:
        InternalError: no callback is queued and no timer is left.
    """
    with _seldom_collected(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def keep_all() -> None:
    """Exempt the objects that exist now from garbage collection until the end of the run.

    Requests are reference cycles that hold their prompts, so collections are needed but should only
    search those. The collection after the freeze updates the object count by which Python schedules
    full collections.
    """
    gc.freeze()
    gc.collect()


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Collect garbage less often: a fleet's objects stay, and Python's default takes a fifth of a
    run.
    """
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTION)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)

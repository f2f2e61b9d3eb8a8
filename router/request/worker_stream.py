"""What the prefill stream and the decode stream of a request have in common: a place on the call
that all requests to a worker share, what they know of the request, and the queue of what its task
has to handle.

Messages go out without waiting, and events are delivered as they arrive. The stream's life is the
request's life on that worker: `close` makes the worker give it up. Nothing that comes for a closed
stream is delivered.

`PrefillStream` and `DecodeStream` (`router.request.streams`) each own one booking and one
`WorkerStream` at a time, and move on to another worker (`router.request.retries`).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from protos import decode_pb2, prefill_pb2, types_pb2
from router.workers.directory import Directory
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import Worker
from router.workers.worker_call import WorkerCall
from runtime.clock import HELD_UP_S
from runtime.errors import BatonError
from runtime.observe.tracing import Metadata
from runtime.process.supervision import first_leaf

InputT = TypeVar("InputT", prefill_pb2.PrefillInput, decode_pb2.DecodeInput)
EventT = TypeVar("EventT", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)

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
    """A worker's stream is over: as it should, with the worker's error, or because it was lost, and
    why."""

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


class WorkerStream(Generic[InputT, EventT]):
    """One request on one worker. Satisfies `router.workers.worker_call.RequestReceiver`."""

    def __init__(
        self,
        worker: Worker,
        call: WorkerCall[InputT, EventT],
        deliver: Callable[[Received | Ended], object],
    ) -> None:
        """`open` makes streams."""
        self._worker = worker
        self._call: WorkerCall[InputT, EventT] = call
        self._deliver = deliver
        self._key = 0
        self._is_ending = False

    @classmethod
    def open(
        cls,
        worker: Worker,
        call: WorkerCall[InputT, EventT],
        opening: InputT,
        deliver: Callable[[Received | Ended], object],
    ) -> Self:
        """Never fails: a worker that cannot be called was lost, which is delivered."""
        stream = cls(worker, call, deliver)
        worker.attach(stream)
        stream._key = call.open(stream, opening)
        return stream

    def send(self, message: InputT) -> None:
        """Never waits and never fails: the end of a dead stream is delivered."""
        self._call.send(self._key, message)

    @property
    def unsent(self) -> InputT | None:
        """The last message, as long as it may still be changed."""
        return self._call.unsent(self._key)

    def let_end(self) -> None:
        """The worker ends it by itself now, as it should."""
        self._is_ending = True

    def close(self) -> None:
        """End it now. Every stream must be closed, also one that has ended."""
        self._call.leave(self._key, is_ending=self._is_ending)
        self._worker.detach(self)

    def received(self, event: EventT) -> None:
        self._deliver(Received(self, event))

    def ended(self, error: BatonError | None) -> None:
        self._deliver(Ended(self, error))

    def call_lost(self, reason: str) -> None:
        self._deliver(Ended(self, lost=reason))


class FlowInbox:
    """What a request's task has to handle, in order: what happens while nothing waits here, and
    needs no wait, is handled where it happens."""

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
    """Calls `overdue` when an answer that is due has not come in time. One timer for a request and
    not one for an answer: it is moved when it goes off too soon. Build inside a running event
    loop."""

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
            # This router did not run, as when its process was held up: what the worker sent is read
            # first.
            self.due_at = now + HELD_UP_S
            self._set(self.due_at)
        else:
            self._overdue()


@dataclass(frozen=True)
class FlowLimits:
    """How patient a request is. `peer_wait_s` leaves a client without an answer for less than five
    seconds, where workers start within that time."""

    prefill_attempts: int = 3
    peer_wait_s: float = 4.0  # for a lost worker to be replaced or to come back
    capacity_wait_s: float = 60.0  # for room in a decode pool, when all refused
    reserve_s: float = 4.0  # a decode stream opened to its destination terms
    commit_s: float = 30.0  # the last byte sent to its commit
    migrations: int = 3  # decode pools that may be lost under one request

    def restart_estimate_s(self, directory: Directory) -> float:
        """For a lost worker, which may take as long as it took to start."""
        return max(self.peer_wait_s, directory.restart_estimate_s)


@dataclass(frozen=True)
class FlowParts:
    """What both kinds of stream need; `ends_at` is the loop time at which the request's time is up,
    `trace` what its workers go on with. `deliver` gets what comes by the streams, `overdue` is
    called when an answer is."""

    request: types_pb2.EngineRequest
    prompt: RoutedPrompt
    directory: Directory
    limits: FlowLimits
    group: asyncio.TaskGroup
    ends_at: float
    trace: Metadata
    deliver: Callable[[Received | Ended], object]
    overdue: Callable[[], object]

    @property
    def context_tokens(self) -> int:
        """What the request may come to, prompt plus completion."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    def context(self) -> types_pb2.RequestContext:
        """What a worker gets beside what is asked."""
        time_left_s = max(0.0, self.ends_at - asyncio.get_running_loop().time())
        return types_pb2.RequestContext(time_left_s=time_left_s, **dict(self.trace))


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first BatonError comes out as itself instead of inside a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        known = failures.subgroup(BatonError)
        raise first_leaf(failures if known is None else known) from None

"""Parts that the prefill and decode streams of a request share.

`WorkerStream` is a place on the call that all requests to a worker share. `FlowParts` is what a
stream knows of its request, and `FlowInbox` queues the events for the request's task.

Messages are sent without waiting, and events are delivered as they arrive. The stream lives as long
as the request on that worker: `close` makes the worker give the request up. Events for a closed
stream are dropped.

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
from runtime.clock import STALLED_S, Deadline, LoopClock
from runtime.errors import BatonError
from runtime.observe.tracing import Metadata
from runtime.process.supervision import first_leaf

InputT = TypeVar("InputT", prefill_pb2.PrefillInput, decode_pb2.DecodeInput)
EventT = TypeVar("EventT", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)

MAX_UNHANDLED = 64  # events of one request; workers send few, or wait for the request


class Stream(Protocol):
    """Handle that identifies the stream of an event."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Received:
    """A message from a worker."""

    stream: Stream
    event: prefill_pb2.PrefillEvent | decode_pb2.DecodeEvent


@dataclass(frozen=True)
class Ended:
    """The end of a worker's stream: regular, with the worker's error, or with the reason `lost`."""

    stream: Stream | None
    error: BatonError | None = None
    lost: str = ""


@dataclass(frozen=True)
class Over:
    """The end of a request: the workers are no longer needed, or handling an event failed."""

    error: Exception | None = None


@dataclass(frozen=True)
class Overdue:
    """A reply that was due has not arrived."""


StreamEvent = Received | Ended | Over | Overdue


class WorkerStream(Generic[InputT, EventT]):
    """One request on one worker. Implements `router.workers.worker_call.RequestReceiver`."""

    def __init__(
        self,
        worker: Worker,
        call: WorkerCall[InputT, EventT],
        deliver: Callable[[Received | Ended], object],
    ) -> None:
        """Call `open` instead."""
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
        """Open a stream to `worker`. Never fails: the loss of a worker is delivered."""
        stream = cls(worker, call, deliver)
        worker.attach(stream)
        stream._key = call.open(stream, opening)
        return stream

    def send(self, message: InputT) -> None:
        """Send a message. Never waits and never fails: the end of a dead stream is delivered."""
        self._call.send(self._key, message)

    @property
    def unsent(self) -> InputT | None:
        """Return the last message while it may still be changed, else None."""
        return self._call.unsent(self._key)

    def let_end(self) -> None:
        """Expect the worker to end the stream by itself."""
        self._is_ending = True

    def close(self) -> None:
        """End the stream now. Every stream must be closed, also one that has ended."""
        self._call.leave(self._key, is_ending=self._is_ending)
        self._worker.detach(self)

    def received(self, event: EventT) -> None:
        self._deliver(Received(self, event))

    def ended(self, error: BatonError | None) -> None:
        self._deliver(Ended(self, error))

    def call_lost(self, reason: str) -> None:
        self._deliver(Ended(self, lost=reason))


class FlowInbox:
    """Events for a request's task, in order.

    An event that needs no wait is handled where it arrives while this inbox is empty.
    """

    def __init__(self) -> None:
        self._events: deque[StreamEvent] = deque()
        self._reader: asyncio.Future[None] | None = None  # resolved by the next event

    @property
    def is_idle(self) -> bool:
        """Return whether the task waits and no event is queued."""
        return self._reader is not None and not self._reader.done() and not self._events

    def post(self, event: StreamEvent) -> bool:
        """Queue an event without waiting; return False if a worker has too many queued."""
        if len(self._events) >= MAX_UNHANDLED and isinstance(event, Received):
            return False
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return True

    async def get(self) -> StreamEvent:
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._events.popleft()


class DueTimer:
    """Timer that calls `overdue` when a due reply has not arrived in time.

    One timer serves all replies of a request: it is moved if it fires too early. Build it inside a
    running event loop.
    """

    def __init__(self, overdue: Callable[[], object]) -> None:
        self._overdue = overdue
        self._loop = asyncio.get_running_loop()
        # By the loop, as its timers are. So `at_s` may be passed to `call_at`.
        self._clock = LoopClock(self._loop)
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: Deadline | None = None  # None while no reply is due

    @property
    def is_over(self) -> bool:
        """Return whether the reply is overdue."""
        return self._deadline is not None and self._deadline.is_over

    def owe(self, timeout_s: float) -> None:
        """Expect a reply within `timeout_s`, in place of any other."""
        self._deadline = Deadline.after(self._clock, timeout_s)
        if self._timer is None or self._timer.when() > self._deadline.at_s:
            self._set(self._deadline)

    def settle(self) -> None:
        """Cancel the expectation: no reply is due."""
        self._deadline = None

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, deadline: Deadline) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline.at_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if not self._deadline.is_over:
            self._set(self._deadline)
        elif self._deadline.overrun_s() >= STALLED_S:
            # This router did not run, for example because its process was stopped. Messages that
            # the worker sent meanwhile are handled first.
            self._deadline = Deadline.after(self._clock, STALLED_S)
            self._set(self._deadline)
        else:
            self._overdue()


@dataclass(frozen=True)
class FlowLimits:
    """Timeouts of a request and limits on its attempts.

    With the default `peer_wait_s` a client waits less than five seconds for a token, if workers
    restart within that time.
    """

    prefill_attempts: int = 3
    peer_wait_s: float = 4.0  # until a lost worker is replaced or back
    capacity_wait_s: float = 60.0  # for capacity in a decode pool, after all refused
    reserve_s: float = 4.0  # from opening a decode stream to its destination terms
    commit_s: float = 30.0  # from the last byte sent to its commit
    migrations: int = 3  # decode pools that one request may lose

    def restart_estimate_s(self, directory: Directory) -> float:
        """Return how long to wait for a lost worker: at least as long as it took to start."""
        return max(self.peer_wait_s, directory.restart_estimate_s)


@dataclass(frozen=True)
class FlowParts:
    """Inputs that both kinds of stream need.

    `trace` is the trace context for the request's workers. `deliver` receives the events of the
    streams; `overdue` is called when a reply is late.
    """

    request: types_pb2.EngineRequest
    prompt: RoutedPrompt
    directory: Directory
    limits: FlowLimits
    group: asyncio.TaskGroup
    deadline: Deadline
    trace: Metadata
    deliver: Callable[[Received | Ended], object]
    overdue: Callable[[], object]

    @property
    def context_tokens(self) -> int:
        """Return the maximum length of the request: prompt plus completion."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    def context(self) -> types_pb2.RequestContext:
        """Return the context that accompanies the request: time left in seconds and trace."""
        return types_pb2.RequestContext(time_left_s=self.deadline.remaining_s(), **dict(self.trace))


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a TaskGroup whose first BatonError is raised directly, not in an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        known = failures.subgroup(BatonError)
        raise first_leaf(failures if known is None else known) from None

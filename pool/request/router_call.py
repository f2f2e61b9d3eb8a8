"""The pool's side of one router's call, which carries all of that router's requests under their
keys.

`router.workers.worker_call` is the other side. Each request has its own task, its own place in the
server's `CallTracker`, and exactly one end, unless the router cancels it. An error of one request
ends no other. Events wait here and are sent together with those of other requests. Unread events
are bounded by the length of the responses, because tokens are joined (`decode.event_sender`) and
scores are held back (`prefill.service`). When the call ends, its requests end as well.

A router may send invalid messages:

- A message for a request that is over is dropped, because it may have crossed the request's end.
- A message that a request cannot accept ends that request.
- A reused key, or too many inputs in a message, ends the call, because the router is no longer
  trusted.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Generic

from prometheus_client import Counter

from pool.request.streams import MAX_UNREAD, EventSender, EventT, Inbox, InputT
from protos import types_pb2
from runtime.errors import CapacityError, DeadlineError, FieldViolation, InvalidRequestError
from runtime.observe.tracing import Metadata
from runtime.rpc.calls import CallTracker, MessageLimits, OpenCall, SendQueue
from runtime.rpc.status import RpcFailure

# Requests of one router beyond those that its pool takes; rejected ones count until the router has
# read their end.
SPARE_OPEN = 1024
MAX_INPUTS = 1024  # per message
# Per message: a router handles one of this size without a pause, and accepts it with all logprobs.
MAX_EVENTS = 256
MAX_TOKENS = 16384
END_S = 5.0  # seconds for its requests to end after the call has ended
# Seconds after a deadline; waits within the request time out first and name their reason.
LATE_S = 0.25


@dataclass(frozen=True)
class Opening(Generic[InputT, EventT]):
    """A request that begins. `timeout_s` is infinite without a deadline."""

    input: InputT
    inbox: Inbox[InputT, Any]
    event_sender: EventSender[EventT]
    timeout_s: float


@dataclass(frozen=True)
class RequestKind(Generic[InputT, EventT]):
    """The differences between the roles.

    `method` names a request in metrics, traces and logs. `serve` runs a request to its end and
    raises the error that it ends with.
    """

    method: str
    serve: Callable[[Opening[InputT, EventT]], Awaitable[None]]
    context_of: Callable[[InputT], types_pb2.RequestContext]
    ended: Callable[[int, types_pb2.RequestEnded], EventT]


@dataclass(eq=False)
class _OpenRequest(Generic[InputT, EventT]):
    """One request in progress. `violation` is an error of its router from before its task began."""

    inbox: Inbox[InputT, Any]
    event_sender: EventSender[EventT]
    task: asyncio.Task[None] | None = None
    call: OpenCall | None = None  # set when its task begins
    violation: FieldViolation | None = None

    def refuse(self, violation: FieldViolation) -> None:
        if self.call is None:
            self.violation = violation
        else:
            self.call.expel(InvalidRequestError(violation))


class RouterCall(Generic[InputT, EventT]):
    """One call of a router, from its first message to its end.

    Create it inside a running event loop.
    """

    def __init__(
        self,
        kind: RequestKind[InputT, EventT],
        calls: CallTracker,
        expired: Counter,
        num_taken: int = 0,
    ) -> None:
        """Create the call.

        `expired` counts waits of requests that timed out. `num_taken` is the number of requests
        that the pool runs or queues at the same time. The call's own limit is higher, so that a
        router meets the pool's limit first.
        """
        self._kind: RequestKind[InputT, EventT] = kind
        self._calls = calls
        self._max_open = num_taken + SPARE_OPEN
        self._num_admitted = 0
        self._expired = expired
        self._queue: SendQueue[EventT] = SendQueue(MessageLimits(MAX_EVENTS, MAX_TOKENS))
        self._requests: dict[int, _OpenRequest[InputT, EventT]] = {}
        # Requests that are over but whose end was not sent yet.
        self._ends: dict[int, OpenCall] = {}
        self._last_key = 0
        self._has_room = asyncio.Event()
        self._has_all = False  # whether the router has half-closed

    async def events(
        self, messages: AsyncIterator[Sequence[InputT]]
    ) -> AsyncGenerator[list[EventT], None]:
        """Yield the events of each message to send, until half-close and the end of all requests.

        `messages` are the inputs of each message received.

        Raises:
            InvalidRequestError: the router broke the protocol.
        """
        reader = asyncio.create_task(self._read(messages))
        try:
            while events := await self._queue.take():
                yield events
                self._sent(events)
        finally:
            reader.cancel()
            await self._end_all()

    async def _read(self, messages: AsyncIterator[Sequence[InputT]]) -> None:
        try:
            async for inputs in messages:
                if len(inputs) > MAX_INPUTS:
                    raise InvalidRequestError(
                        FieldViolation(
                            "inputs",
                            f"a message may have at most {MAX_INPUTS}, this one has {len(inputs)}",
                        )
                    )
                for item in inputs:
                    # Wait until the router reads.
                    while len(self._requests) + len(self._ends) >= 2 * self._max_open:
                        self._has_room.clear()
                        await self._has_room.wait()
                    self._received(item)
        except Exception as error:  # noqa: BLE001 - the call ends with this error
            self._queue.close(error)
        finally:
            self._has_all = True
            self._close_if_over()

    def _received(self, item: InputT) -> None:
        kind = item.WhichOneof("input")
        request = self._requests.get(item.key)
        if kind == "open":
            self._open(item)
        elif kind == "cancelled":
            self._give_up(item.key, request)
        elif request is None:
            return  # the message crossed the request's end
        elif kind is None:
            request.refuse(FieldViolation("input", "is missing, or of another version"))
        elif not request.inbox.received(item):
            request.refuse(FieldViolation("input", f"more than {MAX_UNREAD} are unread"))

    def _open(self, item: InputT) -> None:
        if item.key <= self._last_key:
            raise InvalidRequestError(
                FieldViolation(
                    "key", f"keys must rise, but {item.key} was opened after {self._last_key}"
                )
            )
        self._last_key = item.key
        request = self._requests[item.key] = _OpenRequest[InputT, EventT](
            Inbox(self._expired), EventSender(self._queue, item.key)
        )
        # The task gets an empty context, so that it does not inherit the ids and span of the call's
        # task.
        request.task = asyncio.get_running_loop().create_task(
            self._serve(item, request), context=Context()
        )

    def _give_up(self, key: int, request: "_OpenRequest[InputT, EventT] | None") -> None:
        """Cancel a request for the router."""
        self._queue.drop(key)
        if request is None:
            if (call := self._ends.pop(key, None)) is not None:
                self._calls.over(call)
                self._has_room.set()
            return
        request.event_sender.is_open = False
        if request.task is not None:
            request.task.cancel()
        if request.call is None:  # its task never began, so it cannot clean up
            self._forget(key)

    async def _serve(self, item: InputT, request: "_OpenRequest[InputT, EventT]") -> None:
        call = request.call = self._calls.begin(self._kind.method)
        ended = types_pb2.RequestEnded()

        async def fail(failure: RpcFailure) -> None:
            ended.ParseFromString(failure.status)

        try:
            await self._calls.run(
                call,
                _trace_of(self._kind.context_of(item)),
                lambda: self._placed(item, request, call),
                fail,
            )
        except asyncio.CancelledError:  # the router cancelled it, or the call is over
            self._calls.over(call)
            raise
        else:
            if request.event_sender.is_open:
                self._ends[item.key] = call
                request.event_sender.send(self._kind.ended(item.key, ended))
            else:  # cancelled just before the end
                self._calls.over(call)
        finally:
            request.event_sender.is_open = False
            self._forget(item.key)

    async def _placed(
        self, item: InputT, request: "_OpenRequest[InputT, EventT]", call: OpenCall
    ) -> None:
        if request.violation is not None:
            raise InvalidRequestError(request.violation)
        if self._num_admitted >= self._max_open:
            raise CapacityError(
                f"{self._max_open} requests of one router are in progress, which is the limit",
                resource="requests",
            )
        timeout_s = _timeout_s(self._kind.context_of(item))
        timer = None
        if not math.isinf(timeout_s):
            timer = asyncio.get_running_loop().call_later(
                timeout_s + LATE_S, _out_of_time, call, timeout_s
            )
        self._num_admitted += 1
        try:
            with self._calls.place():
                await self._kind.serve(
                    Opening(item, request.inbox, request.event_sender, timeout_s)
                )
        finally:
            self._num_admitted -= 1
            if timer is not None:
                timer.cancel()

    def _sent(self, events: Sequence[EventT]) -> None:
        if self._ends:
            for event in events:
                if (
                    event.HasField("ended")
                    and (call := self._ends.pop(event.key, None)) is not None
                ):
                    self._calls.over(call)
            self._has_room.set()

    def _forget(self, key: int) -> None:
        del self._requests[key]
        self._has_room.set()
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._has_all and not self._requests:
            self._queue.close()

    async def _end_all(self) -> None:
        """Cancel all requests of the call and wait until they have released their resources."""
        for call in self._ends.values():
            self._calls.over(call)
        for request in self._requests.values():
            # Drop the events of requests that end meanwhile: the router is gone.
            request.event_sender.is_open = False
        tasks = [request.task for request in self._requests.values() if request.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)


def _out_of_time(call: OpenCall, timeout_s: float) -> None:
    call.expel(
        DeadlineError(
            f"the request did not end within the {timeout_s:.3g} s that its deadline left"
        )
    )


def _trace_of(context: types_pb2.RequestContext) -> Metadata:
    return tuple(
        (key, value)
        for key, value in (("traceparent", context.traceparent), ("tracestate", context.tracestate))
        if value
    )


def _timeout_s(context: types_pb2.RequestContext) -> float:
    """Return the seconds until the deadline, infinite without one.

    Raises:
        InvalidRequestError: the value is negative or not finite.
    """
    if not context.HasField("time_left_s"):
        return math.inf
    if not 0 <= context.time_left_s < math.inf:
        raise InvalidRequestError(
            FieldViolation(
                "context.time_left_s",
                f"must be a finite number, not negative, got {context.time_left_s}",
            )
        )
    return context.time_left_s

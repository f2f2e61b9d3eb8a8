"""What happens around every gRPC handler: counting, checking who calls, bounding what a call holds,
refusing while draining, and errors becoming statuses.

Handlers are async: unary ones return a message, streaming ones are async generators. They raise
`BatonError`s and never touch status codes. A streaming handler that is cancelled is closed before
the call ends, so its `finally` blocks have run when the client's cancellation is complete.

To gRPC every handler takes a stream of requests, also where the method has one: gRPC reads that one
before it calls a handler, but leaves it to a handler of streams to read. So who may not call, or is
one too many, is refused by what came in its metadata, and its message is never read.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from runtime.errors import FieldViolation, InvalidRequestError, RequestAborted
from runtime.observe.metrics import RpcMetrics
from runtime.observe.tracing import Tracing, context_of
from runtime.rpc.calls import CallTracker, failed
from runtime.rpc.read_limits import (
    CallLimiter,
    MessageBounds,
    ReadLimiter,
    ReadLimits,
    WriteTimeout,
    bounded,
    held_bytes,
)
from runtime.rpc.status import RpcFailure
from runtime.security.access import Access, ServerSecurity, access_to, address_of

if TYPE_CHECKING:  # generic in the type stubs only
    from grpc import RpcMethodHandler as Handler

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]

# Calls of one message and one answer; requests of callers that need no token have a name in them
# and nothing else.
MAX_QUESTION_BYTES, MAX_OPEN_BYTES = 256 << 10, 4 << 10
# What many requests of a router share: about 1 MiB, of which each has parts of its own, or the one
# input of a long one.
SHARED_MESSAGE_BYTES = 2 << 20
# Calls that need no token, by method: streams may last for ever.
_MAX_OPEN_CALLS = {"/grpc.health.v1.Health/Check": 64, "/grpc.health.v1.Health/Watch": 64}
_MAX_OTHER_OPEN_CALLS = 4
_MAX_BACKGROUND_CALLS = 256  # of callers with the same access: watchers shut no router out
# Of messages being read: bytes in all, and how long the slowest may keep the next one waiting.
# Those that need no token arrive with the call or are no honest ones.
RECEIVING_BYTES, _MAX_PLACES, _PATIENCE_S = 128 << 20, 64, 5.0
_OPEN_INTAKE = ReadLimits(places=1, patience_s=0.1, limit_s=5.0)
# Statuses wait behind what a client has not read; what has arrived of a call outlives its handler.
_ABORT_S, _SETTLE_S = 1.0, 0.1


@dataclass(frozen=True)
class CallLimits:
    """`max_message_bytes` of one request, `max_held_bytes` of those of all calls under way,
    `max_calls` at once, and `write_s` for a client to take one response."""

    max_message_bytes: int
    max_calls: int = 2048
    max_held_bytes: int = 128 << 20
    write_s: float = 120.0


class CallGuard(grpc.aio.ServerInterceptor):
    """One per server. `calls` are those in flight, but for those that are open to every caller
    (health, reflection): these are bounded, and neither counted nor waited for.

    `background_methods` ("/baton.v1.Worker/Watch") are streams without an end of their own: they
    neither hold up a drain nor are refused by it.
    """

    def __init__(
        self,
        *,
        background_methods: frozenset[str],
        limits: CallLimits,
        metrics: RpcMetrics,
        security: ServerSecurity,
        tracing: Tracing,
    ) -> None:
        self._security = security
        self._background = background_methods
        self._limits = limits
        places = max(1, min(_MAX_PLACES, RECEIVING_BYTES // limits.max_message_bytes))
        self._read_limiter = ReadLimiter(ReadLimits(places, _PATIENCE_S))
        self._open_read_limiter = ReadLimiter(_OPEN_INTAKE)
        self._limiter = CallLimiter("calls", limits.max_calls, limits.max_held_bytes)
        self._background_limiter: dict[Access, CallLimiter] = {}
        self._open_limiter: dict[str, CallLimiter] = {}
        self._guarded_handlers: dict[
            str, tuple[object, Any]
        ] = {}  # by method: what is guarded, and the guarded one
        self.calls = CallTracker(self._limiter, metrics, tracing, background_methods)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler[RequestT, ResponseT] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler[RequestT, ResponseT] | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        known = self._guarded_handlers.get(method)
        if known is None or known[0] is not handler:
            known = self._guarded_handlers[method] = handler, self._guarded(method, handler)
        guarded: Handler[RequestT, ResponseT] = known[1]
        return guarded

    def _guarded(self, method: str, handler: Any) -> Any:  # noqa: ANN401 (gRPC's four handler kinds share no type)
        behaviors: dict[tuple[bool, bool], Behavior] = {
            (False, False): handler.unary_unary,
            (False, True): handler.unary_stream,
            (True, False): handler.stream_unary,
            (True, True): handler.stream_stream,
        }
        behavior = behaviors[handler.request_streaming, handler.response_streaming]
        access, limiter = access_to(method), self._limiter_for(method)
        is_open = access is Access.OPEN
        read_limiter = self._open_read_limiter if is_open else self._read_limiter
        begins_work = handler.request_streaming or handler.response_streaming

        async def served(requests: object, context: Context) -> object:
            client = self._client_of(access, context)
            with limiter.taken(client):
                if begins_work and not is_open and method not in self._background:
                    self.calls.check_open()
                if handler.request_streaming:
                    return await self._run(behavior, requests, context)
                request = await read_limiter.receive(
                    lambda: _first_message(context),
                    lambda release: _when_over(context, release),
                    client,
                )
                with limiter.holding(held_bytes(request), client):
                    return await self._run(behavior, request, context)

        async def guarded(requests: object, context: Context) -> object:
            end = self._answer if is_open else self._call
            return await end(method, context, lambda: served(requests, context))

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        largest = MAX_OPEN_BYTES if is_open else MAX_QUESTION_BYTES
        if begins_work and not is_open:
            largest = self._limits.max_message_bytes
        bounds = MessageBounds(min(largest, self._limits.max_message_bytes))
        if access is Access.ROUTER:
            bounds = replace(bounds, uncounted_bytes=SHARED_MESSAGE_BYTES)
        return make(
            guarded, bounded(handler.request_deserializer, bounds), handler.response_serializer
        )

    def _client_of(self, access: Access, context: Context) -> str:
        """What a caller's share goes by: who a client is, or else where the call comes from.
        Routers and stages have no shares."""
        if access is Access.CLIENT:
            return self._security.caller(context).account
        return address_of(context.peer()) if access is Access.OPEN else ""

    def _limiter_for(self, method: str) -> CallLimiter:
        access = access_to(method)
        if method in self._background:
            if access not in self._background_limiter:
                self._background_limiter[access] = CallLimiter(
                    "endless calls", _MAX_BACKGROUND_CALLS, self._limits.max_held_bytes
                )
            return self._background_limiter[access]
        if access is not Access.OPEN:
            return self._limiter
        if method not in self._open_limiter:
            max_calls = _MAX_OPEN_CALLS.get(method, _MAX_OTHER_OPEN_CALLS)
            self._open_limiter[method] = CallLimiter(
                f"calls of {method}", max_calls, max_calls * MAX_OPEN_BYTES
            )
        return self._open_limiter[method]

    async def _run(self, behavior: Behavior, request: object, context: Context) -> object:
        if not inspect.isasyncgenfunction(behavior):
            return await behavior(request, context)
        stall = WriteTimeout(self._limits.write_s)
        try:
            # Closed here and now: left to the garbage collector, a cancelled handler would hold its
            # pages until then.
            async with stall, contextlib.aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    stall.write_began()
                    await context.write(response)
                    stall.write_ended()
        except TimeoutError:
            if not stall.has_expired:
                raise
            raise RequestAborted(
                f"the client has read nothing for {self._limits.write_s:g} s"
            ) from None
        except grpc.aio.InternalError:  # of gRPC, before it cancels the handler
            raise RequestAborted(
                "the client has ended the call while a response was being sent"
            ) from None
        return None

    async def _call(
        self, method: str, context: Context, serve: Callable[[], Awaitable[object]]
    ) -> object:
        """What `serve` gives; None where it was given up on."""

        async def checked() -> object:
            self._security.check(method, context)
            return await serve()

        call = self.calls.begin(method)
        try:
            return await self.calls.run(
                call,
                context_of(context.invocation_metadata()),
                checked,
                lambda failure: _abort(context, failure),
            )
        finally:
            self.calls.over(call)

    async def _answer(
        self, method: str, context: Context, serve: Callable[[], Awaitable[object]]
    ) -> object:
        """Errors become statuses, and nothing else."""
        try:
            return await serve()
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 (the process edge: every error becomes a status)
            failure = failed(method, error)
        await _abort(context, failure)
        return None


async def _first_message(context: Context) -> Message:
    """Raises InvalidRequestError if the stream ends without one."""
    message = await context.read()
    if not isinstance(message, Message):
        raise InvalidRequestError(FieldViolation("request", "no message came"))
    return message


def _when_over(context: Context, then: Callable[[], None]) -> None:
    """Call `then` when gRPC has let go of what arrived of a call: a little after its handler."""
    loop = asyncio.get_running_loop()

    context.add_done_callback(lambda _: loop.call_later(_SETTLE_S, then))  # type: ignore[arg-type]  # the stubs' error


async def _abort(context: Context, failure: RpcFailure) -> None:
    """End the call. Raises gRPC's AbortError when the status is out; one that waits behind what the
    client does not read, or that a call the client has ended does not take, is left to gRPC, so
    that the handler ends."""
    with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
        async with asyncio.timeout(_ABORT_S):
            await context.abort(failure.code, failure.message, failure.trailing_metadata)

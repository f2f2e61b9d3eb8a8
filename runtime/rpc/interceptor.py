"""Interceptor around every gRPC handler.

It counts calls, checks access and limits, rejects calls while draining, and turns errors into
statuses.

Handlers are async: unary ones return a message, streaming ones are async generators. They raise
`BatonError`s and never set status codes. A cancelled streaming handler is closed before the call
ends, so its `finally` blocks have run when the client's cancellation is complete.

gRPC sees every handler as one of a request stream, even if the method has a single request: gRPC
reads a single request before it calls the handler, but leaves a stream to the handler. So a call
without access or beyond a limit is rejected by its metadata, and its message is never read.
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
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.tracing import Tracing, context_of
from runtime.rpc.calls import CallTracker, failed
from runtime.rpc.message_bounds import MessageBounds, bounded, held_bytes
from runtime.rpc.read_limits import CallLimiter, ReadLimiter, ReadLimits, WriteTimeout
from runtime.rpc.status import RpcFailure
from runtime.security.access import Access, ServerSecurity, access_to, address_of

if TYPE_CHECKING:  # generic in the type stubs only
    from grpc import RpcMethodHandler as Handler

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]

# Limits of unary requests, and of requests without a token, which contain only a name.
MAX_QUESTION_BYTES = 256 << 10
MAX_OPEN_BYTES = 4 << 10
# Limit of uncounted bytes in a router's messages, which many requests share: about 1 MiB, or the
# single input of a long request.
SHARED_MESSAGE_BYTES = 2 << 20
# Limits of concurrent calls by method that need no token, whose streams may be endless.
_MAX_OPEN_CALLS = {"/grpc.health.v1.Health/Check": 64, "/grpc.health.v1.Health/Watch": 64}
_MAX_OTHER_OPEN_CALLS = 4
_MAX_BACKGROUND_CALLS = 256  # per access level, so that watchers cannot lock out routers
# Limits of messages being read: bytes in total, and how long the slowest may delay the next one.
# Calls that need no token get a short limit: an honest client sends the message with the call.
RECEIVING_BYTES = 128 << 20
_MAX_PLACES = 64
_CROWDED_TIMEOUT_S = 5.0
_OPEN_INTAKE = ReadLimits(places=1, crowded_timeout_s=0.1, timeout_s=5.0)
# A status waits until the client has read earlier messages. gRPC releases the received bytes of a
# call some time after its handler ends.
_ABORT_S = 1.0
_SETTLE_S = 0.1


@dataclass(frozen=True)
class CallLimits:
    """Limits of a server's calls.

    `max_message_bytes` limits one request, `max_held_bytes` the requests of all open calls.
    `max_calls` limits the number of open calls. `write_s` is the time in which a client must take
    one response.
    """

    max_message_bytes: int
    max_calls: int = 2048
    max_held_bytes: int = 128 << 20
    write_s: float = 120.0


class CallGuard(grpc.aio.ServerInterceptor):
    """Interceptor of one server.

    `calls` tracks the open calls, except for those that are open to every caller (health,
    reflection). The latter are limited, but neither counted nor awaited.

    `background_methods` ("/baton.v1.Worker/Watch") are endless streams: they neither delay a drain
    nor are rejected by it.
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
        self._read_limiter = ReadLimiter(ReadLimits(places, _CROWDED_TIMEOUT_S))
        self._open_read_limiter = ReadLimiter(_OPEN_INTAKE)
        self._limiter = CallLimiter("calls", limits.max_calls, limits.max_held_bytes)
        self._background_limiter: dict[Access, CallLimiter] = {}
        self._open_limiter: dict[str, CallLimiter] = {}
        # By method: the original handler and its guarded form.
        self._guarded_handlers: dict[str, tuple[object, Any]] = {}
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
        access = access_to(method)
        limiter = self._limiter_for(method)
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
        """Return the key of a caller's share: a client's account, or else its address.

        Routers and stages have no shares.
        """
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
            # Close the generator explicitly: otherwise a cancelled handler would hold its pages
            # until the garbage collector runs.
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
        except grpc.aio.InternalError:  # gRPC raises it before it cancels the handler
            raise RequestAborted(
                "the client has ended the call while a response was being sent"
            ) from None
        return None

    async def _call(
        self, method: str, context: Context, serve: Callable[[], Awaitable[object]]
    ) -> object:
        """Serve a tracked call; return the result of `serve`, or None if it failed."""

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
        """Serve an untracked call; errors become statuses."""
        try:
            return await serve()
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 (the process edge: every error becomes a status)
            failure = failed(method, error)
        await _abort(context, failure)
        return None


async def _first_message(context: Context) -> Message:
    """Return the request of a call. Raises InvalidRequestError if the stream has none."""
    message = await context.read()
    if not isinstance(message, Message):
        raise InvalidRequestError(FieldViolation("request", "the stream has no message"))
    return message


def _when_over(context: Context, then: Callable[[], None]) -> None:
    """Call `then` when gRPC has released the received bytes of a call, shortly after its handler."""
    loop = asyncio.get_running_loop()

    context.add_done_callback(lambda _: loop.call_later(_SETTLE_S, then))  # type: ignore[arg-type]  # the stubs' error


async def _abort(context: Context, failure: RpcFailure) -> None:
    """End the call with a status. Raises gRPC's AbortError once the status is sent.

    A status that cannot be sent is left to gRPC, so that the handler ends: the client does not read
    earlier messages, or has ended the call.
    """
    with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
        async with asyncio.timeout(_ABORT_S):
            await context.abort(failure.code, failure.message, failure.trailing_metadata)

"""What happens around every gRPC handler: counting, checking who calls, refusing while draining, and
errors becoming statuses.

Handlers are async: unary ones return a message, streaming ones are async generators. They raise `BatonError`s and
never touch status codes. A streaming handler that is cancelled is closed before the call ends, so its `finally` blocks
have run when the client's cancellation is complete.
"""

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from runtime.access import Access, access_to
from runtime.errors import BatonError, DrainingError, FieldViolation, InternalError, InvalidRequestError
from runtime.log import bound_ids
from runtime.metrics import RpcMetrics
from runtime.security import ServerSecurity
from runtime.status import MAX_VIOLATIONS, RpcFailure, failure_of
from runtime.tracing import UNTRACED, Tracing, context_of

if TYPE_CHECKING:  # generic in the type stubs only
    from grpc import RpcMethodHandler as Handler

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]


class CallGuard(grpc.aio.ServerInterceptor):
    """One per server. Knows the calls in flight; what is open to everybody (health, reflection) passes untouched.

    `background_methods` ("/baton.v1.Worker/Watch") are streams without an end of their own: they neither hold up a
    drain nor are refused by it.
    """

    def __init__(self, *, background_methods: frozenset[str], max_message_bytes: int, metrics: RpcMetrics,
                 security: ServerSecurity, tracing: Tracing) -> None:
        self._security = security
        self._tracing = tracing
        self._background = background_methods
        self._max_message_bytes = max_message_bytes
        self._metrics = metrics
        self._tasks: dict[asyncio.Task[object], str] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._refusal = ""
        self._expelled: set[asyncio.Task[object]] = set()

    def refuse_new(self, reason: str) -> None:
        """From now on new streams end with UNAVAILABLE and this reason: they begin work. A call of one message ends
        some (`Abort`) or asks how it goes, which is wanted most while others wait for the drain."""
        self._refusal = reason
        self._metrics.draining.set(1)

    async def wait_quiet(self, *, timeout_s: float) -> bool:
        """Whether all calls that count have ended within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    def hand_back(self) -> None:
        """End the calls that count with UNAVAILABLE, so that their callers go on elsewhere."""
        self._expel(task for task, method in self._tasks.items() if method not in self._background)

    def expel(self) -> None:
        """End every call, the background ones too, with UNAVAILABLE."""
        self._expel(self._tasks)

    def _expel(self, tasks: Iterable[asyncio.Task[object]]) -> None:
        for task in tasks:
            self._expelled.add(task)
            task.cancel()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler[RequestT, ResponseT] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler[RequestT, ResponseT] | None":
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or access_to(method) is Access.OPEN:
            return handler
        guarded: Handler[RequestT, ResponseT] = self._guarded(method, handler)
        return guarded

    def _guarded(self, method: str, handler: Any) -> Any:  # noqa: ANN401 (gRPC's four handler kinds share no type)
        kind = f"{'stream' if handler.request_streaming else 'unary'}_" \
               f"{'stream' if handler.response_streaming else 'unary'}"
        behaviors: dict[str, Behavior] = {
            "unary_unary": handler.unary_unary, "unary_stream": handler.unary_stream,
            "stream_unary": handler.stream_unary, "stream_stream": handler.stream_stream,
        }
        behavior = behaviors[kind]

        async def guarded(request: object, context: Context) -> object:
            async with self._call(method, context):
                if self._refusal and kind != "unary_unary" and method not in self._background:
                    raise DrainingError(self._refusal)
                self._check_size(request)
                return await _run(behavior, request, context)

        make = {
            "unary_unary": grpc.unary_unary_rpc_method_handler, "unary_stream": grpc.unary_stream_rpc_method_handler,
            "stream_unary": grpc.stream_unary_rpc_method_handler,
            "stream_stream": grpc.stream_stream_rpc_method_handler,
        }[kind]
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _check_size(self, request: object) -> None:
        if isinstance(request, Message) and (size := request.ByteSize()) > self._max_message_bytes:
            raise InvalidRequestError(FieldViolation(
                "request", f"a message may have at most {self._max_message_bytes} bytes, this one has {size}"))

    @contextlib.asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[None]:
        started = time.monotonic()
        code, failure = grpc.StatusCode.OK, None
        tracing = UNTRACED if method in self._background else self._tracing
        with tracing.call(method, context_of(context.invocation_metadata())) as span, self._registered(method):
            try:
                self._security.check(method, context)
                yield
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                if asyncio.current_task() not in self._expelled:
                    raise
                failure = failure_of(DrainingError("the server is stopping"))
            except grpc.aio.AbortError:
                code = grpc.StatusCode.UNKNOWN
                raise
            except Exception as error:  # noqa: BLE001 (the process edge: every error becomes a status)
                failure = _failed(method, error)
            finally:
                code = failure.code if failure else code
                self._metrics.ended(method, code.name, time.monotonic() - started)
                span.note(grpc_code=code.name)
            if failure is not None:
                await context.abort(failure.code, failure.message, failure.trailing_metadata)

    @contextlib.contextmanager
    def _registered(self, method: str) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = method
        self._metrics.in_flight(method).inc()
        self._note_quiet()
        try:
            yield
        finally:
            del self._tasks[task]
            self._expelled.discard(task)
            self._metrics.in_flight(method).dec()
            self._note_quiet()

    def _note_quiet(self) -> None:
        if all(method in self._background for method in self._tasks.values()):
            self._quiet.set()
        else:
            self._quiet.clear()


async def _run(behavior: Behavior, request: object, context: Context) -> object:
    if not inspect.isasyncgenfunction(behavior):
        return await behavior(request, context)
    # Closed here and now: left to the garbage collector, a cancelled handler would hold its pages until then.
    async with contextlib.aclosing(behavior(request, context)) as responses:
        async for response in responses:
            await context.write(response)
    return None


def _failed(method: str, error: Exception) -> RpcFailure:
    """Log a failure as what it is (a bug with its traceback, anything else as a line) and give its status. What is
    wrong with a request quotes it, so the log has only the names of its fields."""
    failure = failure_of(error, bound_ids().get("request_id", ""))
    fields = {"method": method, "code": failure.code.name}
    if isinstance(error, InvalidRequestError):
        logger.info("call refused for %s", ", ".join(v.field for v in error.violations[:MAX_VIOLATIONS]), extra=fields)
    elif isinstance(error, BatonError) and not isinstance(error, InternalError):
        logger.info("call refused or failed: %s", failure.message, extra=fields)
    else:
        logger.error("bug in a handler", exc_info=error, extra=fields)
    return failure

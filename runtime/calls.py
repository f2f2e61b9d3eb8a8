"""The calls that a server has under way: counted, traced, waited for by a drain, and ended by it.

Requests that share one gRPC call (`Prefill.Serve`, `Decode.Serve`) count as calls of their own, under a method name of
their own: that they share one is nothing that a drain, a metric or a trace has to know.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import grpc

from runtime.errors import BatonError, DrainingError, InternalError, InvalidRequestError
from runtime.intake import Seats
from runtime.log import bound_ids
from runtime.metrics import RpcMetrics
from runtime.status import MAX_VIOLATIONS, RpcFailure, failure_of
from runtime.tracing import UNTRACED, Metadata, Tracing

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class OpenCall:
    """One under way, from `CallLedger.begin` to `CallLedger.over`. `expelled`: what the server ended it with."""

    method: str
    task: "asyncio.Task[object]"
    expelled: BatonError | None = None

    def expel(self, error: BatonError) -> None:
        """End it with this error. Does nothing when its task has ended."""
        if not self.task.done():
            self.expelled = error
            self.task.cancel()


class CallLedger:
    """One per door of a server. Calls of `background` methods are streams without an end of their own: they neither
    hold up a drain nor are refused by it. `seats` bounds the others."""

    def __init__(self, seats: Seats, metrics: RpcMetrics, tracing: Tracing = UNTRACED,
                 background: frozenset[str] = frozenset()) -> None:
        self.seats = seats
        self._metrics = metrics
        self._tracing = tracing
        self._background = background
        self._calls: dict[OpenCall, None] = {}
        self._num_counted = 0  # of them, those that are not in the background
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._refusal = ""

    def refuse_new(self, reason: str) -> None:
        """From now on new streams end with UNAVAILABLE and this reason: they begin work. A call of one message ends
        some (`Abort`) or asks how it goes, which is wanted most while others wait for the drain."""
        self._refusal = reason
        self._metrics.draining.set(1)

    def check_open(self) -> None:
        """Raises DrainingError once new work is refused."""
        if self._refusal:
            raise DrainingError(self._refusal)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """For one that begins work. Raises CapacityError where there are too many, DrainingError as `check_open`."""
        with self.seats.taken():
            self.check_open()
            yield

    async def wait_quiet(self, *, timeout_s: float) -> bool:
        """Whether all calls that count are over within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    def hand_back(self, error: BatonError) -> None:
        """End the calls that count with this error, so that their callers go on elsewhere."""
        _expel([call for call in self._calls if call.method not in self._background], error)

    def expel(self) -> None:
        """End every call, the background ones too, with UNAVAILABLE."""
        _expel(self._calls, DrainingError("the server is stopping"))

    def begin(self, method: str) -> OpenCall:
        """In the task that serves it."""
        task = asyncio.current_task()
        assert task is not None
        call = OpenCall(method, task)
        self._calls[call] = None
        self._metrics.in_flight(method).inc()
        if method not in self._background:
            self._num_counted += 1
            self._quiet.clear()
        return call

    def over(self, call: OpenCall) -> None:
        """Its caller knows how it ended, or is gone. Idempotent."""
        if call not in self._calls:
            return
        del self._calls[call]
        self._metrics.in_flight(call.method).dec()
        if call.method not in self._background:
            self._num_counted -= 1
            if not self._num_counted:
                self._quiet.set()

    async def run(self, call: OpenCall, context: Metadata, serve: Callable[[], Awaitable[object]],
                  fail: Callable[[RpcFailure], Awaitable[None]]) -> object:
        """What `serve` gives; None where it was given up on. Its errors become statuses, of which `fail` sends one.
        `context` is the caller's trace context. No context manager: an error that goes through one stays in the frames
        of it, and the request in the error."""
        started, code = time.monotonic(), grpc.StatusCode.OK
        failure: RpcFailure | None = None
        tracing = UNTRACED if call.method in self._background else self._tracing
        with tracing.call(call.method, context) as span:
            try:
                return await serve()
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                if call.expelled is None:
                    raise
                failure = failure_of(call.expelled)
            except grpc.aio.AbortError:
                code = grpc.StatusCode.UNKNOWN
                raise
            except Exception as error:  # noqa: BLE001 (the process edge: every error becomes a status)
                failure = failed(call.method, error)
            finally:
                code = code if failure is None else failure.code
                self._metrics.ended(call.method, code.name, time.monotonic() - started)
                span.note(grpc_code=code.name)
            if failure is not None:
                span.fail(failure.code.name)
                await fail(failure)
            return None


def _expel(calls: Iterable[OpenCall], error: BatonError) -> None:
    for call in calls:
        call.expel(error)


def failed(method: str, error: Exception) -> RpcFailure:
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
    _let_go(error)
    return failure


def _let_go(error: BaseException | None) -> None:
    """The frames of a traceback hold the request, and cycles hold tracebacks until the garbage collector comes by. The
    frames themselves are left alone: calls that end for one reason share its error, and all their frames are in it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__

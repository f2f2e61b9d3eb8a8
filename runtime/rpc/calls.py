"""Open calls of a server: `CallTracker` counts, traces, drains and ends them.

Requests that share one gRPC call (`Prefill.Serve`, `Decode.Serve`) count as separate calls, each
under its own method name. So drains, metrics and traces treat shared and separate calls alike. Each
side of a shared call has a `SendQueue` of items to send. Items that are due together go into one
message, in order for each request, so a slow reader gets fewer and longer messages. What a request
may send limits its queued items, and the opener of requests limits their number.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc
from prometheus_client import Counter, Gauge, Histogram

from runtime.errors import BatonError, DrainingError, InternalError, InvalidRequestError
from runtime.observe.log import bound_ids
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.tracing import UNTRACED, Metadata, Tracing
from runtime.queue_reader import QueueReader
from runtime.rpc.read_limits import CallLimiter
from runtime.rpc.status import MAX_VIOLATIONS, RpcFailure, failure_of

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")


@dataclass
class _MethodMeter:
    """Instruments of one method, looked up once instead of for every call."""

    method: str
    requests: Counter
    seconds: Histogram
    running: Gauge
    _by_code: dict[str, Counter] = field(default_factory=dict)

    @classmethod
    def of(cls, metrics: RpcMetrics, method: str) -> "_MethodMeter":
        return cls(
            method, metrics.requests, metrics.seconds.labels(method), metrics.running.labels(method)
        )

    def ended(self, code: str, seconds: float) -> None:
        if code not in self._by_code:
            self._by_code[code] = self.requests.labels(self.method, code)
        self._by_code[code].inc()
        self.seconds.observe(seconds)


@dataclass(eq=False)
class OpenCall:
    """Call between `CallTracker.begin` and `CallTracker.over`.

    `expelled` is the error with which the server ended it.
    """

    method: str
    meter: _MethodMeter
    task: "asyncio.Task[object]"
    expelled: BatonError | None = None

    def expel(self, error: BatonError) -> None:
        """End the call with this error. Does nothing if its task has ended."""
        if not self.task.done():
            self.expelled = error
            self.task.cancel()


class CallTracker:
    """Tracker of the calls on one port of a server.

    Calls of `background` methods are endless streams: they neither delay a drain nor are rejected
    by it. `limiter` bounds the others.
    """

    def __init__(
        self,
        limiter: CallLimiter,
        metrics: RpcMetrics,
        tracing: Tracing = UNTRACED,
        background: frozenset[str] = frozenset(),
    ) -> None:
        self.limiter = limiter
        self._metrics = metrics
        self._tracing = tracing
        self._background = background
        self._meters: dict[str, _MethodMeter] = {}
        self._calls: dict[OpenCall, None] = {}
        self._num_counted = 0  # calls that are not in the background
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._refusal = ""

    def refuse_new(self, reason: str) -> None:
        """Reject new streams with UNAVAILABLE and this reason from now on.

        Streams begin work. Unary calls stay open: they end work (`Abort`) or query it, which
        matters most while a drain is in progress.
        """
        self._refusal = reason
        self._metrics.draining.set(1)

    def check_open(self) -> None:
        """Raise DrainingError if new work is rejected."""
        if self._refusal:
            raise DrainingError(self._refusal)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Reserve a place for a call that begins work.

        Raises CapacityError if there are too many calls, DrainingError as `check_open` does.
        """
        with self.limiter.taken():
            self.check_open()
            yield

    async def wait_quiet(self, *, timeout_s: float) -> bool:
        """Wait until all counted calls have ended; return whether they did within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    def hand_back(self, error: BatonError) -> None:
        """End the counted calls with this error, so that their callers continue elsewhere."""
        _expel([call for call in self._calls if call.method not in self._background], error)

    def expel(self) -> None:
        """End every call, including background calls, with UNAVAILABLE."""
        _expel(self._calls, DrainingError("the server is stopping"))

    def begin(self, method: str) -> OpenCall:
        """Register a call of the current task, which serves it."""
        task = asyncio.current_task()
        assert task is not None
        if (meter := self._meters.get(method)) is None:
            meter = self._meters[method] = _MethodMeter.of(self._metrics, method)
        call = OpenCall(method, meter, task)
        self._calls[call] = None
        meter.running.inc()
        if method not in self._background:
            self._num_counted += 1
            self._quiet.clear()
        return call

    def over(self, call: OpenCall) -> None:
        """Unregister a call once its caller has its status or is gone. Idempotent."""
        if call not in self._calls:
            return
        del self._calls[call]
        call.meter.running.dec()
        if call.method not in self._background:
            self._num_counted -= 1
            if not self._num_counted:
                self._quiet.set()

    async def run(
        self,
        call: OpenCall,
        context: Metadata,
        serve: Callable[[], Awaitable[object]],
        fail: Callable[[RpcFailure], Awaitable[None]],
    ) -> object:
        """Run `serve` and return its result, or None if the call failed.

        Errors become statuses, of which `fail` sends one. `context` is the caller's trace context.
        This is not a context manager: an error that passes through one stays referenced by its
        frames, and the request by the error.
        """
        started = time.monotonic()
        code = grpc.StatusCode.OK
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
                call.meter.ended(code.name, time.monotonic() - started)
                span.note(grpc_code=code.name)
            if failure is not None:
                span.fail(failure.code.name)
                await fail(failure)
            return None


def _expel(calls: Iterable[OpenCall], error: BatonError) -> None:
    for call in calls:
        call.expel(error)


def failed(method: str, error: Exception) -> RpcFailure:
    """Log a failure and return its status.

    A bug is logged with its traceback, any other failure as one line. An invalid request is for its
    client to correct, so its line is for debugging. Its description quotes the request, so the log
    has only the names of its fields.
    """
    failure = failure_of(error, bound_ids().get("request_id", ""))
    fields = {"method": method, "code": failure.code.name}
    if isinstance(error, InvalidRequestError):
        logger.debug(
            "call rejected for %s",
            ", ".join(v.field for v in error.violations[:MAX_VIOLATIONS]),
            extra=fields,
        )
    elif isinstance(error, BatonError) and not isinstance(error, InternalError):
        logger.info("call rejected or failed: %s", failure.message, extra=fields)
    else:
        logger.error("bug in a handler", exc_info=error, extra=fields)
    _drop_tracebacks(error)
    return failure


def _drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of its causes.

    The frames of a traceback hold the request, and reference cycles keep tracebacks until the
    garbage collector runs. The frames are not cleared: calls that end for one reason share its
    error, which holds the frames of all of them.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class MessageLimits:
    """Limits of one message.

    `max_items` is the number of items that its reader handles without a pause. `max_weight` is in
    units of the sender; a single item may exceed it.
    """

    max_items: int
    max_weight: int


class SendQueue(Generic[ItemT]):
    """Queue of items to send, grouped by request. Has one reader; belongs to the event loop."""

    def __init__(self, limits: MessageLimits) -> None:
        self._limits = limits
        # Items with their weights by key, ordered by each key's first item.
        self._waiting: dict[int, deque[tuple[ItemT, int]]] = {}
        self._reader = QueueReader()
        self._is_closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        """Return the number of requests with queued items."""
        return len(self._waiting)

    def put(self, key: int, item: ItemT, weight: int = 1) -> None:
        """Queue an item. Never waits."""
        items = self._waiting.get(key)
        if items is None:
            self._waiting[key] = items = deque()
        items.append((item, weight))
        self._reader.wake()

    def newest(self, key: int) -> ItemT | None:
        """Return the last queued item of this request, to which more may be added."""
        items = self._waiting.get(key)
        return items[-1][0] if items else None

    def drop(self, key: int) -> tuple[ItemT, ...]:
        """Remove and return the queued items of this request."""
        return tuple(item for item, _ in self._waiting.pop(key, ()))

    def close(self, error: Exception | None = None) -> None:
        """Accept no more items. With an error, also send no more items.

        Only the first call has an effect.
        """
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._reader.wake()

    async def take(self) -> list[ItemT]:
        """Return the items of the next message, or none if the queue is closed and empty.

        Raises the error with which the queue was closed.
        """
        while not self._waiting and not self._is_closed:
            await self._reader.wait()
            # Tasks that were woken at the same time also add their items.
            await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return self._message()

    def _message(self) -> list[ItemT]:
        taken = list[ItemT]()
        total = 0
        while self._waiting and len(taken) < self._limits.max_items:
            key, items = next(iter(self._waiting.items()))
            item, weight = items[0]
            total += weight
            if taken and total > self._limits.max_weight:
                break
            taken.append(item)
            items.popleft()
            if not items:
                del self._waiting[key]
        return taken

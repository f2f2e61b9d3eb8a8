"""The calls that a server has under way: counted, traced, waited for by a drain, and ended by it
(`CallTracker`).

Requests that share one gRPC call (`Prefill.Serve`, `Decode.Serve`) count as calls of their own,
under a method name of their own: that they share one is nothing that a drain, a metric or a trace
has to know. Each end of a call that is shared has a `SendQueue` of what waits to be sent: whatever
is due together goes into one message, in order for each request. An end that is read slowly sends
fewer and longer messages. What waits for a request is bounded by what the request may send, and how
many requests there are by whoever opens them.
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
from runtime.observe.metrics import RpcMetrics
from runtime.observe.tracing import UNTRACED, Metadata, Tracing
from runtime.rpc.read_limits import CallLimiter
from runtime.rpc.status import MAX_VIOLATIONS, RpcFailure, failure_of

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")


@dataclass
class _MethodMeter:
    """The instruments of one method: looked up once and not for every call."""

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
    """One under way, from `CallTracker.begin` to `CallTracker.over`. `expelled`: what the server
    ended it with."""

    method: str
    meter: _MethodMeter
    task: "asyncio.Task[object]"
    expelled: BatonError | None = None

    def expel(self, error: BatonError) -> None:
        """End it with this error. Does nothing when its task has ended."""
        if not self.task.done():
            self.expelled = error
            self.task.cancel()


class CallTracker:
    """One per door of a server. Calls of `background` methods are streams without an end of their
    own: they neither hold up a drain nor are refused by it. `limiter` bounds the others."""

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
        self._num_counted = 0  # of them, those that are not in the background
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._refusal = ""

    def refuse_new(self, reason: str) -> None:
        """From now on new streams end with UNAVAILABLE and this reason: they begin work. A call of
        one message ends some (`Abort`) or asks how it goes, which is wanted most while others wait
        for the drain."""
        self._refusal = reason
        self._metrics.draining.set(1)

    def check_open(self) -> None:
        """Raises DrainingError once new work is refused."""
        if self._refusal:
            raise DrainingError(self._refusal)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """For one that begins work. Raises CapacityError where there are too many, DrainingError as
        `check_open`."""
        with self.limiter.taken():
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
        """Its caller knows how it ended, or is gone. Idempotent."""
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
        """What `serve` gives; None where it was given up on. Its errors become statuses, of which
        `fail` sends one. `context` is the caller's trace context. No context manager: an error that
        goes through one stays in the frames of it, and the request in the error."""
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
    """Log a failure as what it is (a bug with its traceback, anything else as a line) and give its
    status. What is wrong with a request quotes it, so the log has only the names of its fields."""
    failure = failure_of(error, bound_ids().get("request_id", ""))
    fields = {"method": method, "code": failure.code.name}
    if isinstance(error, InvalidRequestError):
        logger.info(
            "call refused for %s",
            ", ".join(v.field for v in error.violations[:MAX_VIOLATIONS]),
            extra=fields,
        )
    elif isinstance(error, BatonError) and not isinstance(error, InternalError):
        logger.info("call refused or failed: %s", failure.message, extra=fields)
    else:
        logger.error("bug in a handler", exc_info=error, extra=fields)
    _let_go(error)
    return failure


def _let_go(error: BaseException | None) -> None:
    """The frames of a traceback hold the request, and cycles hold tracebacks until the garbage
    collector comes by. The frames themselves are left alone: calls that end for one reason share
    its error, and all their frames are in it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class MessageLimits:
    """Of one message: as many items as its reader handles without a pause, and no more weight, in
    whatever its sender counts, but for an item that has more by itself."""

    max_items: int
    max_weight: int


class SendQueue(Generic[ItemT]):
    """One reader, on the event loop's thread, as everybody else."""

    def __init__(self, limits: MessageLimits) -> None:
        self._limits = limits
        self._waiting: dict[
            int, deque[tuple[ItemT, int]]
        ] = {}  # with weights; by key, in order of their first items
        self._reader: asyncio.Future[None] | None = None  # that waits for an item
        self._is_closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        """Requests for which something waits."""
        return len(self._waiting)

    def put(self, key: int, item: ItemT, weight: int = 1) -> None:
        """Never waits."""
        items = self._waiting.get(key)
        if items is None:
            self._waiting[key] = items = deque()
        items.append((item, weight))
        self._wake()

    def newest(self, key: int) -> ItemT | None:
        """The last item that waits for this request: more may still be put into it."""
        items = self._waiting.get(key)
        return items[-1][0] if items else None

    def drop(self, key: int) -> tuple[ItemT, ...]:
        """Send none of what waits for this request; returns it."""
        return tuple(item for item, _ in self._waiting.pop(key, ()))

    def close(self, error: Exception | None = None) -> None:
        """Nothing more will be put; with an error, nothing more will be sent. Only the first call
        counts."""
        if not self._is_closed:
            self._is_closed, self._error = True, error
            self._wake()

    async def take(self) -> list[ItemT]:
        """The items of the next message; none when the queue is closed and all were taken. Raises
        the error that it was closed with."""
        while not self._waiting and not self._is_closed:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            await asyncio.sleep(
                0
            )  # whoever was woken together with this has something to send, too
        if self._error is not None:
            raise self._error
        return self._message()

    def _message(self) -> list[ItemT]:
        taken, total = list[ItemT](), 0
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

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

"""A request's streams to its workers: one call, and what the prefill stream and the decode stream have in common.

Messages go out without waiting, events come in through one queue. The stream's life is the request's life on that
worker: `close` cancels it at once, which aborts the request there; no message is needed. Nothing that a closed stream
still brings is delivered.

`PrefillStream` and `DecodeStream` each own one booking and one `WorkerStream` at a time, and move on to another worker.
Their events reach the flow through the inbox; a search that finds no worker in time raises in the flow's task group.
Where a pool gives the whole request up, `Migrations` finds another pair.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Self, TypeVar

import grpc
from grpc.aio import StreamStreamMultiCallable

from protos import decode_pb2, prefill_pb2, types_pb2
from router.workers.directory import Directory, WorkerPair
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import Booking, Worker
from runtime.errors import (
    BatonError,
    DeadlineError,
    DrainingError,
    HeldUpError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    RequestAborted,
    UnavailableError,
)
from runtime.metrics import RouterMetrics
from runtime.status import error_from_rpc, is_lost
from runtime.supervision import first_leaf
from runtime.tracing import outgoing

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")

RETRY_PAUSE_S = 0.05
MAX_MESSAGES = 64


@dataclass(frozen=True)
class Received(Generic[Response]):
    """A message of a worker."""

    stream: object
    message: Response


@dataclass(frozen=True)
class Ended:
    """A worker's stream is over; no error means it ended with OK."""

    stream: object
    error: BatonError | None


class WorkerStream(Generic[Request, Response]):
    """One bidirectional call. `deliver` may wait: a flow that does not read slows the worker down."""

    def __init__(self, worker: Worker, deliver: Callable[[Received[Response] | Ended], Awaitable[None]]) -> None:
        """`open` makes streams."""
        self._worker = worker
        self._deliver = deliver
        self.has_ended = False
        # At most a handful of messages by protocol, so it needs no bound of its own.
        self._outgoing: asyncio.Queue[Request | None] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall[Request, Response] | None = None
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, method: "StreamStreamMultiCallable[Request, Response]", worker: Worker,
             deliver: Callable[[Received[Response] | Ended], Awaitable[None]], group: asyncio.TaskGroup,
             time_limit_s: float) -> Self:
        """Call `method` of `worker`. Never fails: a worker that cannot be called was lost, which the inbox reports."""
        stream = cls(worker, deliver)
        stream._reader = group.create_task(stream._read(method, time_limit_s))
        worker.attach(stream)
        return stream

    def send(self, message: Request) -> None:
        """Never waits and never fails: the end of a dead stream comes through the inbox."""
        self._outgoing.put_nowait(message)

    def half_close(self) -> None:
        """Nothing more will be sent."""
        self._outgoing.put_nowait(None)

    def close(self) -> None:
        """End the call now. Every stream must be closed, also one that has ended."""
        self.has_ended = True
        if self._call is not None:
            self._call.cancel()
        self.half_close()  # ends the task in which gRPC waits for more requests
        if self._reader is not None:
            self._reader.cancel()
        self._worker.detach(self)

    async def _requests(self) -> AsyncIterator[Request]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _read(self, method: "StreamStreamMultiCallable[Request, Response]", time_limit_s: float) -> None:
        error: BatonError | None = None
        try:
            self._call = method(self._requests(), timeout=time_limit_s, metadata=outgoing())
            async for message in self._call:
                await self._deliver(Received(self, message))
        except grpc.aio.AioRpcError as rpc_error:
            error = _error_of(rpc_error, self._worker)
        except grpc.aio.UsageError as closed:  # the channel of a worker that is gone for good
            error = lost(self._worker, str(closed))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC cancels a call itself when sending on it fails before its status is known.
            error = lost(self._worker, "a message could not be sent")
        finally:
            self.has_ended = True
        await self._deliver(Ended(self, error))


def lost(worker: Worker, reason: str) -> PeerLostError:
    """For the client, who has no use for addresses of this cluster's inside; the log has them."""
    logger.info("stream lost", extra={"worker": worker.address, "reason": reason})
    return PeerLostError(f"the {worker.role} worker was lost")


def _error_of(error: grpc.aio.AioRpcError, worker: Worker) -> BatonError:
    """The worker's own error, or PeerLostError if it died before it sent one."""
    if is_lost(error):
        return lost(worker, error.details() or error.code().name)
    return error_from_rpc(error)


@dataclass(frozen=True)
class StepsOver:
    """Nothing more is to come by the steps of a pool: the request has finished, or handling what came went wrong."""

    error: Exception | None = None


Event = Received[prefill_pb2.RunResponse] | Received[decode_pb2.DecodeResponse] | Ended | StepsOver


class FlowInbox:
    """What happened to a request, in order, but for what comes by the steps of its pool."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_MESSAGES)

    async def deliver(self, event: Event) -> None:
        """Of a worker's stream. A message waits while `MAX_MESSAGES` are not handled: a flow that waits for its client
        slows its workers down."""
        if isinstance(event, Received):
            await self._room.acquire()
        self._events.put_nowait(event)

    def post(self, event: Event) -> None:
        """Anything but a message. Never waits."""
        self._events.put_nowait(event)

    async def get(self) -> Event:
        event = await self._events.get()
        if isinstance(event, Received):
            self._room.release()
        return event


@dataclass(frozen=True)
class FlowLimits:
    """How patient a request is. `peer_wait_s` leaves a client without an answer for less than five seconds, where
    workers start within that time."""

    prefill_attempts: int = 3
    peer_wait_s: float = 4.0  # for a lost worker to be replaced or to come back
    capacity_wait_s: float = 60.0  # for room in a decode pool, when all refused
    reserve_s: float = 4.0  # a decode stream opened to its destination terms
    commit_s: float = 30.0  # the last byte sent to its commit
    migrations: int = 3  # decode pools that may be lost under one request
    linger_s: float = 1.0  # the last message to the end of the workers' streams

    def comeback_s(self, directory: Directory) -> float:
        """For a lost worker, which may take as long as it took to start."""
        return max(self.peer_wait_s, directory.comeback_s)


@dataclass(frozen=True)
class FlowParts:
    """What both kinds of stream need; `ends_at` is the loop time at which the request's time is up."""

    request: types_pb2.EngineRequest
    prompt: RoutedPrompt
    directory: Directory
    limits: FlowLimits
    inbox: FlowInbox
    group: asyncio.TaskGroup
    ends_at: float

    @property
    def context_tokens(self) -> int:
        """What the request may come to, prompt plus completion."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    def time_left_s(self) -> float:
        return max(0.0, self.ends_at - asyncio.get_running_loop().time())


def may_retry(error: BatonError) -> bool:
    """Whether another worker could do better: not with a request that is wrong, a bug, or no time left."""
    return not isinstance(error, InvalidRequestError | InternalError | DeadlineError)


def cancel(task: asyncio.Task[None] | None) -> None:
    """End a search, unless the caller is that search."""
    if task is not None and task is not asyncio.current_task():
        task.cancel()


async def search(directory: Directory, attempt: Callable[[], Booking | None], wait_s: float,
                 error: BatonError) -> Booking:
    """A booking within `wait_s`, or the error that made it necessary."""
    try:
        async with asyncio.timeout(wait_s):
            return await directory.until(attempt)
    except TimeoutError:
        raise error from None


def suspect(booking: Booking, error: BatonError) -> None:
    """A worker whose stream broke gets nothing more until it reports again; one that was late for a request may."""
    if isinstance(error, UnavailableError) and not isinstance(error, HeldUpError):
        booking.lost(str(error))


class MoveReason(StrEnum):
    """Why a pool gave a request up, as metrics name it."""

    LOST = "lost"
    DRAINED = "drained"
    HELD_UP = "held_up"


def _move_reason(error: BatonError) -> MoveReason:
    if isinstance(error, DrainingError):
        return MoveReason.DRAINED
    return MoveReason.HELD_UP if isinstance(error, HeldUpError) else MoveReason.LOST


@dataclass
class Migrations:
    """The moves of one request to other pairs of workers: when it may go on there, and with which.

    The new pair runs the prompt again, and the new pool computes the tokens that the client has already without drawing
    them. Draws are keyed by seed and position, so what follows is what would have followed. A pair must serve the same
    weights in the same way: its compatibility digest fits that of the lost pool.

    A request that loses pool after pool may be what kills them, or holds them up, so losses are bounded;
    pools that drain hand requests back on purpose, and do not count.
    """

    directory: Directory
    limits: FlowLimits
    metrics: RouterMetrics
    num_lost: int = 0
    _under_way: MoveReason | None = None

    async def another_pair(self, lost: Booking, error: BatonError, prompt: RoutedPrompt,
                           context_tokens: int = 0) -> WorkerPair:
        """A pair in place of the one whose pool is gone, rather not with the same pool.

        Raises:
            BatonError: no other pair could do better, or no pair came up in time; PeerLostError if the pool is gone.
        """
        self.ended()
        if not isinstance(error, UnavailableError | RequestAborted):
            raise error
        self._under_way = _move_reason(error)
        self.num_lost += self._under_way is not MoveReason.DRAINED
        if self._under_way is not MoveReason.HELD_UP:
            lost.lost(str(error))  # it gets nothing until it reports again
        pair = None
        if self.num_lost <= self.limits.migrations:
            await asyncio.sleep(RETRY_PAUSE_S)
            pair = await self._search(lost, prompt, context_tokens)
        if pair is None:
            raise PeerLostError(str(error))
        return pair

    def resumed(self) -> None:
        """The new pool has everything it needs."""
        self._count("resumed")

    def ended(self) -> None:
        """The request is over, or moves once more. Idempotent."""
        self._count("failed")

    def _count(self, outcome: str) -> None:
        if self._under_way is not None:
            self.metrics.migrations.labels(self._under_way.value, outcome).inc()
        self._under_way = None

    async def _search(self, lost: Booking, prompt: RoutedPrompt, context_tokens: int) -> WorkerPair | None:
        """Longer while there is a pair that is only full."""
        loop, compatibility = asyncio.get_running_loop(), lost.compatibility
        began = loop.time()
        while True:
            pair = self.directory.place_again(prompt, compatibility, lost.worker.address, context_tokens)
            if pair is not None:
                return pair
            is_full = self.directory.has_pair(compatibility, context_tokens)
            patience_s = self.limits.capacity_wait_s if is_full else self.limits.comeback_s(self.directory)
            if loop.time() >= began + patience_s:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + patience_s):
                    await self.directory.changed()


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first BatonError comes out as itself instead of inside a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        known = failures.subgroup(BatonError)
        raise first_leaf(failures if known is None else known) from None

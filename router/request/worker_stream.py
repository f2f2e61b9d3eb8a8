"""What the prefill stream and the decode stream of a request have in common: their place on the call that all requests
to a worker share, what they know of the request, and the search for another worker.

Messages go out without waiting, and events are delivered as they arrive. The stream's life is the request's life on
that worker: `close` makes the worker give it up. Nothing that comes for a closed stream is delivered.

`PrefillStream` and `DecodeStream` (`router.request.streams`) each own one booking and one `WorkerStream` at a time, and
move on to another worker. A search that finds none in time raises in the flow's task group. Where a pool gives the
whole request up, `router.request.migrations` finds another pair.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from protos import decode_pb2, prefill_pb2, types_pb2
from router.request.flow_inbox import Ended, Received
from router.workers.directory import Directory
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import Booking, Worker
from router.workers.worker_call import WorkerCall
from runtime.errors import (
    BatonError,
    DeadlineError,
    HeldUpError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    UnavailableError,
)
from runtime.supervision import first_leaf
from runtime.tracing import Metadata

logger = logging.getLogger(__name__)

InputT = TypeVar("InputT", prefill_pb2.PrefillInput, decode_pb2.DecodeInput)
EventT = TypeVar("EventT", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)

RETRY_PAUSE_S = 0.05


class WorkerStream(Generic[InputT, EventT]):
    """One request on one worker. Satisfies `router.workers.worker_call.RequestReceiver`."""

    def __init__(self, worker: Worker, call: WorkerCall[InputT, EventT],
                 deliver: Callable[[Received | Ended], object]) -> None:
        """`open` makes streams."""
        self._worker = worker
        self._call: WorkerCall[InputT, EventT] = call
        self._deliver = deliver
        self._key = 0
        self._is_ending = False

    @classmethod
    def open(cls, worker: Worker, call: WorkerCall[InputT, EventT], opening: InputT,
             deliver: Callable[[Received | Ended], object]) -> Self:
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


def lost(worker: Worker, reason: str) -> PeerLostError:
    """For the client, who has no use for addresses of this cluster's inside; the log has them."""
    logger.info("stream lost", extra={"worker": worker.address, "reason": reason})
    return PeerLostError(f"the {worker.role} worker was lost")


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

    def comeback_s(self, directory: Directory) -> float:
        """For a lost worker, which may take as long as it took to start."""
        return max(self.peer_wait_s, directory.comeback_s)


@dataclass(frozen=True)
class FlowParts:
    """What both kinds of stream need; `ends_at` is the loop time at which the request's time is up, `trace` what its
    workers go on with. `deliver` gets what comes by the streams, `overdue` is called when an answer is."""

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


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first BatonError comes out as itself instead of inside a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        known = failures.subgroup(BatonError)
        raise first_leaf(failures if known is None else known) from None

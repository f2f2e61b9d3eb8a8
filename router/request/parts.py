"""What the two halves of a request in flight have in common: its run on a prefill worker, its stay in a decode pool.

Each of the two owns one booking and one stream at a time and knows how to move on to another worker. What it learns
goes to the flow through the inbox; a search that finds nobody in time raises in the flow's task group.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from protos import decode_pb2, prefill_pb2, types_pb2
from router.request.worker_stream import Ended, Received
from router.workers.directory import Directory
from router.workers.worker import Booking
from runtime.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)

Event = Received[prefill_pb2.RunResponse] | Received[decode_pb2.DecodeResponse] | Ended
Inbox = asyncio.Queue[Event]

RETRY_PAUSE_S = 0.05


@dataclass(frozen=True)
class FlowLimits:
    """How patient a request is. `peer_wait_s` leaves a client without an answer for less than five seconds."""

    prefill_attempts: int = 3
    peer_wait_s: float = 4.0  # for a lost worker to be replaced or to come back
    capacity_wait_s: float = 60.0  # for room in a decode pool, when all refused
    reserve_s: float = 4.0  # a decode stream opened to its destination terms
    commit_s: float = 30.0  # the last byte sent to its commit
    migrations: int = 3  # decode pools that may be lost under one request
    linger_s: float = 1.0  # the last message to the end of the workers' streams


@dataclass(frozen=True)
class FlowParts:
    """What both need; `ends_at` is the loop time at which the request's time is up."""

    request: types_pb2.EngineRequest
    directory: Directory
    limits: FlowLimits
    inbox: Inbox
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
    """End a search, unless it is the one that asks."""
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
    """A worker whose stream broke gets nothing more until it reports again."""
    if isinstance(error, UnavailableError):
        booking.lost(str(error))

"""A worker's stream as the request flow sees it: messages go out without waiting, events come in through one queue.

The stream's life is the request's life on that worker. `close` cancels it at once, which is an abort over there; no
message is needed. What arrives of a closed stream is never delivered.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import grpc
from grpc.aio import StreamStreamMultiCallable

from router.workers.worker import Worker
from runtime.errors import BatonError, PeerLostError
from runtime.status import DETAILS_KEY, error_from_rpc
from runtime.tracing import outgoing

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")

# What gRPC itself reports when a process dies under a call, as opposed to what its server answers. It also reports
# INTERNAL when a message is sent to a stream that the peer has just ended; the peer's status is lost then.
_TRANSPORT_CODES = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL,
                              grpc.StatusCode.CANCELLED})


@dataclass(frozen=True)
class Received(Generic[Response]):
    """A worker said something."""

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
        """Call `method` of `worker`. Never fails: a worker that cannot be called was lost, as the inbox will say."""
        stream = cls(worker, deliver)
        stream._reader = group.create_task(stream._read(method, time_limit_s))
        worker.attach(stream)
        return stream

    def send(self, message: Request) -> None:
        """Never waits and never fails: a dead stream says so through the inbox."""
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
            error = _lost(self._worker, str(closed))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC cancels a call itself when sending on it fails before its status is known.
            error = _lost(self._worker, "a message could not be sent")
        finally:
            self.has_ended = True
        await self._deliver(Ended(self, error))


def _lost(worker: Worker, reason: str) -> PeerLostError:
    """For the client, who has no use for addresses of this cluster's inside; the log has them."""
    logger.info("stream lost", extra={"worker": worker.address, "reason": reason})
    return PeerLostError(f"the {worker.role} worker was lost")


def _error_of(error: grpc.aio.AioRpcError, worker: Worker) -> BatonError:
    """The worker's own error, or PeerLostError if it did not live to say one."""
    answered = any(key == DETAILS_KEY for key, _ in error.trailing_metadata())
    if error.code() in _TRANSPORT_CODES and not answered:
        return _lost(worker, error.details() or error.code().name)
    return error_from_rpc(error)

"""The call to a worker that all of this router's requests there share, each under its key.

This is the router's end; `pool.request.router_call` is the pool's end. Messages of several requests
are sent together; an event is delivered to its request on arrival, whatever the others do. Requests
end one by one, each with its own status, and all with the call.
"""

import asyncio
import contextvars
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from runtime.errors import (
    BatonError,
    CapacityError,
    ConfigError,
    FieldViolation,
    InvalidRequestError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from runtime.rpc.calls import MessageLimits, SendQueue
from runtime.rpc.read_limits import WriteTimeout
from runtime.rpc.status import error_from_rpc, error_from_status, is_lost

logger = logging.getLogger(__name__)

InputT = TypeVar("InputT", prefill_pb2.PrefillInput, decode_pb2.DecodeInput)
EventT = TypeVar("EventT", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)

EventIn = TypeVar("EventIn", contravariant=True)
EventOut = TypeVar("EventOut", covariant=True)

# per message
MAX_INPUTS = 256
MAX_BYTES = 1 << 20
MAX_INPUT_BYTES = 15 << 20  # per input: workers accept messages of 16 MiB
WRITE_S = 30.0  # for a worker to accept a message
RETIRED_S = 30.0  # for a worker to end a call without requests


class RequestReceiver(Protocol[EventIn]):
    """A request on a worker. Methods return at once and raise nothing; called on the event loop's
    thread.
    """

    def received(self, event: EventIn) -> None:
        """Handle an event. Called in order."""
        ...

    def ended(self, error: BatonError | None) -> None:
        """Handle the end of the request; `error` is None on success. No event follows."""
        ...

    def call_lost(self, reason: str) -> None:
        """Handle the loss of the call: no further event will arrive."""
        ...


class EventBatch(Protocol[EventOut]):
    """A message from a worker."""

    @property
    def events(self) -> Iterable[EventOut]: ...


@dataclass(frozen=True)
class CallKind(Generic[InputT, EventT]):
    """Differences between the roles."""

    begin: Callable[[grpc.aio.Channel], "grpc.aio.StreamStreamCall[Any, Any]"]
    message_of: Callable[[list[InputT]], Message]
    cancelled: Callable[[int], InputT]


PREFILL_CALL: CallKind[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent] = CallKind(
    lambda channel: prefill_pb2_grpc.PrefillStub(channel).Serve(),
    lambda inputs: prefill_pb2.PrefillInputs(inputs=inputs),
    lambda key: prefill_pb2.PrefillInput(key=key, cancelled=types_pb2.RequestCancelled()),
)
DECODE_CALL: CallKind[decode_pb2.DecodeInput, decode_pb2.DecodeEvent] = CallKind(
    lambda channel: decode_pb2_grpc.DecodeStub(channel).Serve(),
    lambda inputs: decode_pb2.DecodeInputs(inputs=inputs),
    lambda key: decode_pb2.DecodeInput(key=key, cancelled=types_pb2.RequestCancelled()),
)


class WorkerCall(Generic[InputT, EventT]):
    """One call, from its start to its end. Build inside a running event loop."""

    def __init__(self, kind: CallKind[InputT, EventT], channel: grpc.aio.Channel) -> None:
        self._kind: CallKind[InputT, EventT] = kind
        self.has_ended = False
        self._keys = itertools.count(1)
        self._receivers: dict[int, RequestReceiver[EventT]] = {}
        self._queue: SendQueue[InputT] = SendQueue(MessageLimits(MAX_INPUTS, MAX_BYTES))
        self._is_retired = False
        self._reason = ""  # why the call ended, once known
        # A separate context: the call outlives the request that creates it and must not carry that
        # request's id and span.
        self.task = asyncio.get_running_loop().create_task(
            self._run(channel), context=contextvars.Context()
        )

    def open(self, receiver: RequestReceiver[EventT], opening: InputT) -> int:
        """Begin a request; return its key. The receiver gets events only afterwards."""
        key = next(self._keys)
        self._receivers[key] = receiver
        self.send(key, opening)
        return key

    def send(self, key: int, message: InputT) -> None:
        """Send a message without waiting; does nothing for a request that has ended."""
        receiver = self._receivers.get(key)
        if receiver is None or self.has_ended:
            return
        message.key = key
        num_bytes = message.ByteSize()
        if num_bytes <= MAX_INPUT_BYTES:
            self._queue.put(key, message, num_bytes)
            return
        self.leave(key, is_ending=message.HasField("open"))
        asyncio.get_running_loop().call_soon(
            receiver.ended,
            InvalidRequestError(
                FieldViolation(
                    "request",
                    f"a message to a worker may have at most {MAX_INPUT_BYTES} bytes, this has {num_bytes}",
                )
            ),
        )

    def unsent(self, key: int) -> InputT | None:
        """Return the last message of this request while it may still be changed, else None."""
        return self._queue.newest(key)

    def leave(self, key: int, *, is_ending: bool = False) -> None:
        """Drop further events of this request, and cancel it at the worker unless it `is_ending` by
        itself.

        Idempotent.
        """
        if self._receivers.pop(key, None) is None:
            return
        if not is_ending and not self.has_ended:
            unsent = self._queue.drop(key)
            if not any(message.HasField("open") for message in unsent):
                self._queue.put(key, self._kind.cancelled(key))
        self._end_if_over()

    def retire(self) -> None:
        """Stop opening requests: the call ends with the last open one."""
        self._is_retired = True
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._is_retired and not self._receivers:
            self._queue.close()

    async def _run(self, channel: grpc.aio.Channel) -> None:
        error: BatonError | None = None
        call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        writer: asyncio.Task[None] | None = None
        try:
            call = self._kind.begin(channel)
            writer = asyncio.get_running_loop().create_task(self._write(call))
            async for message in call:
                self._received(message)
        except grpc.aio.AioRpcError as rpc_error:
            self._reason = rpc_error.details() or rpc_error.code().name
            error = _error_of(rpc_error)
        except grpc.aio.UsageError as closed:  # the channel of a removed worker
            self._reason = str(closed)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC cancels a call when its connection is lost.
            self._reason = self._reason or "its connection is gone"
        finally:
            self.has_ended = True
            if writer is not None:
                writer.cancel()
            if call is not None:
                # After a bug in reading, an open call would keep its requests at the worker.
                call.cancel()
            self._lost(error)

    def _received(self, message: EventBatch[EventT]) -> None:
        for event in message.events:
            receiver = self._receivers.get(event.key)
            if receiver is None:
                continue  # the request was cancelled
            if event.HasField("ended"):
                del self._receivers[event.key]
                receiver.ended(
                    error_from_status(event.ended.SerializeToString()) if event.ended.code else None
                )
                self._end_if_over()
            else:
                receiver.received(event)

    async def _write(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        stall = WriteTimeout(WRITE_S)
        try:
            async with stall:
                while inputs := await self._queue.take():
                    stall.write_began()
                    await call.write(self._kind.message_of(inputs))
                    stall.write_ended()
            await call.done_writing()
            await asyncio.sleep(RETIRED_S)
            call.cancel()
        except TimeoutError:
            self._reason = f"the worker has read nothing for {WRITE_S:g} s"
            call.cancel()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            # The reader learns how the call ended.
            logger.debug("a message could not be sent: %s", error)

    def _lost(self, error: BatonError | None) -> None:
        receivers = self._receivers
        self._receivers = {}
        reason = self._reason or "the worker ended the call"
        if receivers:
            logger.info("a call ended with %d requests: %s", len(receivers), reason)
        for receiver in receivers.values():
            if error is None:
                receiver.call_lost(reason)
            else:
                receiver.ended(error.again())


def _error_of(error: grpc.aio.AioRpcError) -> BatonError | None:
    """Return the error for every request of the call; None if the worker died or it concerns the
    call alone.
    """
    if is_lost(error):
        return None
    said = error_from_rpc(error)
    meant = (
        CapacityError,
        UnavailableError,
        PermissionDeniedError,
        UnauthenticatedError,
        ConfigError,
    )
    return said if isinstance(said, meant) else None


class CallSlot(Generic[InputT, EventT]):
    """The current call to a worker, created by the first request and again after its end."""

    def __init__(
        self,
        kind: CallKind[InputT, EventT],
        channel: grpc.aio.Channel,
        identity: Callable[[], object] = lambda: None,
    ) -> None:
        """`identity` returns the credentials of a new call. When they change, later requests get a
        new call.
        """
        self._kind: CallKind[InputT, EventT] = kind
        self._channel = channel
        self._identity = identity
        self._shown: object = None
        self._call: WorkerCall[InputT, EventT] | None = None
        self._retired: set[WorkerCall[InputT, EventT]] = set()

    def current(self) -> WorkerCall[InputT, EventT]:
        call = self._call
        shown = self._identity()
        if call is not None and not call.has_ended and shown is self._shown:
            return call
        if call is not None and not call.has_ended:
            self._retire(call)
        made: WorkerCall[InputT, EventT] = WorkerCall(self._kind, self._channel)
        self._call = made
        self._shown = shown
        return made

    def _retire(self, call: WorkerCall[InputT, EventT]) -> None:
        self._retired.add(call)
        call.task.add_done_callback(lambda _: self._retired.discard(call))
        call.retire()

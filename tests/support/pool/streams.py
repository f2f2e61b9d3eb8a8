"""A router's end of its call to a worker, with the handler in this process and no gRPC between."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar, cast

from prometheus_client import CollectorRegistry

from protos import decode_pb2, prefill_pb2, types_pb2
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.calls import CallTracker
from runtime.rpc.read_limits import CallLimiter
from runtime.rpc.status import error_from_status

InputT = TypeVar("InputT", prefill_pb2.PrefillInput, decode_pb2.DecodeInput)
EventT = TypeVar("EventT", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)
Serve = Callable[[AsyncIterator[Any], Any], AsyncIterator[Any]]


def call_tracker(registry: CollectorRegistry | None = None) -> CallTracker:
    """Return the call tracker of a server."""
    return CallTracker(
        CallLimiter("calls", 2048, 1 << 20), RpcMetrics.create(registry or CollectorRegistry())
    )


class Stream(Generic[InputT, EventT]):
    """One request on a call. `events` are those not taken yet."""

    def __init__(self, call: "SharedCall[InputT, EventT]", key: int) -> None:
        self._call: SharedCall[InputT, EventT] = call
        self.key = key
        self.events: asyncio.Queue[EventT] = asyncio.Queue()
        self.end: asyncio.Future[types_pb2.RequestEnded] = (
            asyncio.get_running_loop().create_future()
        )

    def send(self, message: InputT) -> None:
        message.key = self.key
        self._call.send(message)

    async def next(self, timeout_s: float = 60) -> EventT:
        async with asyncio.timeout(timeout_s):
            return await self.events.get()

    async def ended(self, timeout_s: float = 60) -> None:
        """Wait for the end; raise the request's error."""
        async with asyncio.timeout(timeout_s):
            ended = await asyncio.shield(self.end)
        if (error := error_from_status(ended.SerializeToString())) is not None:
            raise error

    def arrived(self, event: EventT) -> None:
        if event.HasField("ended"):
            self.end.set_result(event.ended)
        else:
            self.events.put_nowait(event)


class SharedCall(Generic[InputT, EventT]):
    """Runs a `Serve` handler in a task of its own. `num_messages` came back so far."""

    def __init__(self, serve: Serve, message_of: Callable[[list[InputT]], Any]) -> None:
        self._message_of: Callable[[list[InputT]], Any] = message_of
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self.streams: dict[int, Stream[InputT, EventT]] = {}
        self.num_messages = 0
        self.handler = asyncio.create_task(self._run(serve))

    def open(self, opening: InputT) -> Stream[InputT, EventT]:
        stream: Stream[InputT, EventT] = Stream(self, len(self.streams) + 1)
        self.streams[stream.key] = stream
        stream.send(opening)
        return stream

    def send(self, *inputs: InputT) -> None:
        """Send all in one message."""
        self._messages.put_nowait(self._message_of(list(inputs)))

    def half_close(self) -> None:
        self._messages.put_nowait(None)

    async def drop(self) -> None:
        """Cancel the handler, as gRPC does if the router is lost."""
        self.handler.cancel()
        await asyncio.wait([self.handler])

    async def _run(self, serve: Serve) -> None:
        async with aclosing(
            cast("AsyncGenerator[Any, None]", serve(self._read(), None))
        ) as messages:
            async for message in messages:
                self.num_messages += 1
                for event in message.events:
                    self.streams[event.key].arrived(event)

    async def _read(self) -> AsyncIterator[Any]:
        while (message := await self._messages.get()) is not None:
            yield message


def prefill_call(serve: Serve) -> SharedCall[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent]:
    return SharedCall(serve, lambda inputs: prefill_pb2.PrefillInputs(inputs=inputs))


def decode_call(serve: Serve) -> SharedCall[decode_pb2.DecodeInput, decode_pb2.DecodeEvent]:
    return SharedCall(serve, lambda inputs: decode_pb2.DecodeInputs(inputs=inputs))

"""Calls between simulated processes: what `grpc.aio` channels give their callers, over nothing but virtual time.

A `Server` is one process, reached by its address. Messages arrive after the latency and in order, and none is lost: a
process that is cut off gets, and gives, what is under way when the cut has healed; one that dies ends all of its calls,
as the kernel of a killed process does.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc

from runtime.errors import BatonError, InternalError
from runtime.status import failure_of

Method = Callable[["SimulatedCall"], None]
"""Begins to serve a call: sets its listeners and returns."""


def _ignore(*_: object) -> None:
    """What a call does where nobody listens."""


@dataclass
class Server:
    """One process. `methods` by their paths; a process that does not run serves none of them."""

    address: str
    methods: Mapping[str, Method] = field(default_factory=dict)
    is_up: bool = True
    is_cut: bool = False
    calls: dict["SimulatedCall", None] = field(default_factory=dict)  # not over, the oldest first
    held: dict["SimulatedCall", None] = field(default_factory=dict)  # by a cut

    def die(self) -> None:
        """At once, with all of its calls."""
        self.is_up = False
        for call in tuple(self.calls):
            call.broken()

    def heal(self) -> None:
        """The cut is over."""
        self.is_cut = False
        held, self.held = self.held, {}
        for call in held:
            call.resume()


class SimulatedCall:
    """Both ends of one call. Its caller iterates and cancels; its server listens, sends and ends."""

    def __init__(self, server: Server, latency_s: float, request: Any = None) -> None:  # noqa: ANN401 (any message)
        self.request = request  # of a call with one
        self.on_message: Callable[[Any], None] = _ignore
        self.on_half_close: Callable[[], None] = _ignore
        self.on_gone: Callable[[], None] = _ignore  # its caller cancelled, or this process dies
        self._server = server
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[Callable[[], None]] = deque()
        self._num_held = 0  # of those, by a cut
        self._received: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._error: grpc.aio.AioRpcError | None = None
        self._is_over = False  # its server is done with it
        self._has_ended = False  # its caller knows how it ended

    def send(self, message: Any) -> None:  # noqa: ANN401
        """To the caller. Does nothing when the call is over."""
        if not self._is_over:
            self._later(partial(self._received.append, message))

    def end(self, error: BatonError | None = None) -> None:
        """With OK or with this error. Idempotent."""
        if not self._is_over:
            self._leave()
            self._later(partial(self._ended, None if error is None else _answered(error)))

    def broken(self) -> None:
        """Its server's process has died."""
        self._gone()
        self._later(partial(self._ended, _lost("the connection was closed")))

    def resume(self) -> None:
        """A cut has healed: what it held arrives."""
        while self._num_held:
            self._num_held -= 1
            self._under_way.popleft()()
            self._wake()

    def open(self, path: str, messages: AsyncIterator[Any] | None) -> Self:
        """By its caller."""
        self._server.calls[self] = None
        self._later(partial(self._begin, path))
        if messages is not None:
            self._pump = self._loop.create_task(self._forward(messages))
        return self

    def cancel(self) -> None:
        """By its caller. Idempotent."""
        if self._pump is not None:
            self._pump.cancel()
        if not self._is_over:
            self._later(self._gone)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401
        while not self._received:
            if self._has_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._received.popleft()

    def _begin(self, path: str) -> None:
        if self._is_over:
            return
        if not self._server.is_up:
            self._leave()
            self._ended(_lost("connection refused"))
            return
        self._server.methods[path](self)

    async def _forward(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            self._later(partial(self._deliver, message))
        self._later(self._half_closed)

    def _deliver(self, message: Any) -> None:  # noqa: ANN401
        if not self._is_over:
            self.on_message(message)

    def _half_closed(self) -> None:
        if not self._is_over:
            self.on_half_close()

    def _gone(self) -> None:
        if not self._is_over:
            self._leave()
            self.on_gone()

    def _leave(self) -> None:
        self._is_over = True
        self._server.calls.pop(self, None)

    def _ended(self, error: grpc.aio.AioRpcError | None) -> None:
        self._error, self._has_ended = error, True
        if self._pump is not None:
            self._pump.cancel()

    def _later(self, arrival: Callable[[], None]) -> None:
        self._under_way.append(arrival)
        self._loop.call_later(self._latency_s, self._arrive)

    def _arrive(self) -> None:
        if self._server.is_cut:
            self._num_held += 1
            self._server.held[self] = None
            return
        self._under_way.popleft()()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Channel(grpc.aio.Channel):
    """To one server. Of gRPC's kinds of calls those that routers make of workers."""

    def __init__(self, server: Server, latency_s: float) -> None:
        self._server = server
        self._latency_s = latency_s

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Any:  # noqa: ANN401 (gRPC's own)
        return partial(self._ask, method)

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        return partial(self._talk, method)

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        return partial(self._refuse, method)

    def stream_unary(self, method: str, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        return partial(self._refuse, method)

    async def close(self, grace: float | None = None) -> None:
        """There is nothing to close: calls end by themselves."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 (gRPC's)
        return grpc.ChannelConnectivity.READY if self._server.is_up else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        raise InternalError("the simulated network does not report states of channels")

    async def channel_ready(self) -> None:
        raise InternalError("the simulated network does not report states of channels")

    def _refuse(self, path: str, *_: Any, **__: Any) -> None:  # noqa: ANN401
        raise InternalError(f"the simulated network has no calls like {path}")

    def _ask(self, path: str, request: Any, **_: Any) -> SimulatedCall:  # noqa: ANN401
        return SimulatedCall(self._server, self._latency_s, request).open(path, None)

    def _talk(self, path: str, messages: AsyncIterator[Any], **_: Any) -> SimulatedCall:  # noqa: ANN401
        # A caller's deadline ends its calls itself; their time limit would only do it once more.
        return SimulatedCall(self._server, self._latency_s).open(path, messages)


def _lost(details: str) -> grpc.aio.AioRpcError:
    """What gRPC reports of a peer that does not answer."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=details)


def _answered(error: BatonError) -> grpc.aio.AioRpcError:
    """What a server's error is on the wire."""
    failure = failure_of(error)
    return grpc.aio.AioRpcError(failure.code, grpc.aio.Metadata(), grpc.aio.Metadata(*failure.trailing_metadata),
                                details=failure.message)

"""Calls between simulated processes: what `grpc.aio` channels give their callers, over nothing but
virtual time.

A `Server` is one process, reached by its address. Messages arrive after the latency and in order,
and none is lost: a process that is cut off gets, and gives, what is under way when the cut has
healed; one that dies ends all of its calls, as the kernel of a killed process does.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self

import grpc
from google.protobuf.message import Message

from runtime.errors import BatonError, InternalError
from runtime.rpc.status import failure_of

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
    """Both ends of one call. Its caller writes, iterates and cancels; its server listens, sends and
    ends."""

    def __init__(self, server: Server, latency_s: float) -> None:
        self.on_message: Callable[[Message], None] = _ignore
        self.on_gone: Callable[[], None] = _ignore  # its caller cancelled, or this process dies
        self._server = server
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[Callable[[], None]] = deque()
        self._num_held = 0  # of those, by a cut
        self._received: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: grpc.aio.AioRpcError | None = None
        self._is_over = False  # its server is done with it
        self._has_ended = False  # its caller knows how it ended

    def send(self, message: Message) -> None:
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

    def open(self, path: str) -> Self:
        """By its caller."""
        self._server.calls[self] = None
        self._later(partial(self._begin, path))
        return self

    async def write(self, message: Message) -> None:
        """By its caller. Never waits."""
        self._later(partial(self._deliver, message))

    def cancel(self) -> None:
        """By its caller. Idempotent."""
        if not self._is_over:
            self._later(self._gone)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
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

    def _deliver(self, message: Message) -> None:
        if not self._is_over:
            self.on_message(message)

    def _gone(self) -> None:
        if not self._is_over:
            self._leave()
            self.on_gone()

    def _leave(self) -> None:
        self._is_over = True
        self._server.calls.pop(self, None)

    def _ended(self, error: grpc.aio.AioRpcError | None) -> None:
        self._error, self._has_ended = error, True

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
    """To one server, for the calls that routers make of workers for requests. It has no connection:
    its state is not looked at, and nothing is left to close."""

    def __init__(self, server: Server, latency_s: float) -> None:
        self._server = server
        self._latency_s = latency_s

    def stream_stream(self, method: str, *_: object, **__: object) -> Any:  # noqa: ANN401
        """Makes what routers use of a `grpc.aio.StreamStreamCall`; they half-close only where
        certificates change."""
        return lambda: SimulatedCall(self._server, self._latency_s).open(method)

    async def close(self, grace: float | None = None) -> None:
        """Calls end by themselves."""

    def _has_no(self, *_: object, **__: object) -> NoReturn:
        raise InternalError("the simulated network has streams both ways and nothing else")

    unary_unary = unary_stream = stream_unary = _has_no
    get_state = wait_for_state_change = channel_ready = __aenter__ = __aexit__ = _has_no


def _lost(details: str) -> grpc.aio.AioRpcError:
    """What gRPC reports of a peer that does not answer."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=details)


def _answered(error: BatonError) -> grpc.aio.AioRpcError:
    """What a server's error is on the wire."""
    failure = failure_of(error)
    return grpc.aio.AioRpcError(
        failure.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*failure.trailing_metadata),
        details=failure.message,
    )

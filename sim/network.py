"""Calls between simulated processes: the interface of `grpc.aio` channels over virtual time.

A `Server` is one process, reached by its address. Messages arrive after the latency, in order, and
none is lost. Messages to and from a process that is cut off arrive when the cut has healed. A
process that dies ends all of its calls, like the kernel after a process was killed.
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
    """Ignore an event of a call without a listener."""


@dataclass
class Server:
    """One process. `methods` are by path; a process that is down serves none of them."""

    address: str
    methods: Mapping[str, Method] = field(default_factory=dict)
    is_up: bool = True
    is_cut: bool = False
    calls: dict["SimulatedCall", None] = field(default_factory=dict)  # open, oldest first
    held: dict["SimulatedCall", None] = field(default_factory=dict)  # with messages held by a cut

    def die(self) -> None:
        """End the process at once, with all of its calls."""
        self.is_up = False
        for call in tuple(self.calls):
            call.broken()

    def heal(self) -> None:
        """End the cut, and deliver held messages."""
        self.is_cut = False
        held = self.held
        self.held = {}
        for call in held:
            call.resume()


class SimulatedCall:
    """Both ends of one call. The caller writes, iterates and cancels; the server listens, sends and
    ends.
    """

    def __init__(self, server: Server, latency_s: float) -> None:
        self.on_message: Callable[[Message], None] = _ignore
        self.on_gone: Callable[[], None] = _ignore  # the caller cancelled, or this process died
        self._server = server
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[Callable[[], None]] = deque()
        self._num_held = 0  # messages under way that a cut holds
        self._received: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: grpc.aio.AioRpcError | None = None
        self._is_over = False  # the server has ended it
        self._has_ended = False  # the caller has received its end

    def send(self, message: Message) -> None:
        """Send a message to the caller. Does nothing after the end of the call."""
        if not self._is_over:
            self._later(partial(self._received.append, message))

    def end(self, error: BatonError | None = None) -> None:
        """End the call with OK or with `error`. Idempotent."""
        if not self._is_over:
            self._leave()
            self._later(partial(self._ended, None if error is None else _answered(error)))

    def broken(self) -> None:
        """End the call after its server's process has died."""
        self._gone()
        self._later(partial(self._ended, _lost("the connection was closed")))

    def resume(self) -> None:
        """Deliver the messages that a cut held."""
        while self._num_held:
            self._num_held -= 1
            self._under_way.popleft()()
            self._wake()

    def open(self, path: str) -> Self:
        """Open the call. Used by the caller."""
        self._server.calls[self] = None
        self._later(partial(self._begin, path))
        return self

    async def write(self, message: Message) -> None:
        """Send a message to the server without waiting. Used by the caller."""
        self._later(partial(self._deliver, message))

    def cancel(self) -> None:
        """Cancel the call. Used by the caller. Idempotent."""
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
        self._error = error
        self._has_ended = True

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
    """Channel to one server, for a router's calls with requests.

    It has no connection, so its state is not available and `close` has nothing to do.
    """

    def __init__(self, server: Server, latency_s: float) -> None:
        self._server = server
        self._latency_s = latency_s

    def stream_stream(self, method: str, *_: object, **__: object) -> Any:  # noqa: ANN401
        """Return a factory of calls with the part of `grpc.aio.StreamStreamCall` that routers use.

        Half-closing is not simulated: routers need it only when certificates change.
        """
        return lambda: SimulatedCall(self._server, self._latency_s).open(method)

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: calls end by themselves."""

    def _has_no(self, *_: object, **__: object) -> NoReturn:
        raise InternalError("the simulated network only has bidirectional streams")

    unary_unary = unary_stream = stream_unary = _has_no
    get_state = wait_for_state_change = channel_ready = __aenter__ = __aexit__ = _has_no


def _lost(details: str) -> grpc.aio.AioRpcError:
    """Return the error that gRPC reports for a peer that does not respond."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=details)


def _answered(error: BatonError) -> grpc.aio.AioRpcError:
    """Return the error that a caller receives for a server's error."""
    failure = failure_of(error)
    return grpc.aio.AioRpcError(
        failure.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*failure.trailing_metadata),
        details=failure.message,
    )

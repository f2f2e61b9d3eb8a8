"""Channels that reconnect when their certificate files change or a name must be resolved again.

gRPC fixes a channel's certificates at its creation, and resolves a name again only after pauses
that grow to two minutes. Here the next call gets a new channel if the files have changed. It also
gets one if the connection to a name is gone and the old channel has no other. Open calls keep their
connection, which is closed when the last of them has ended.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from runtime.clock import Clock, SystemClock
from runtime.security.access import ChannelSecurity
from runtime.security.certificates import Certificates

_UNTIL_CALLS_END_S = 30 * 86400.0
REDIAL_S = 1.0  # least interval between two channels of an unreachable name
CONNECTING_S = 5.0  # time for a channel of a name to find an address and connect
_LOOK_S = 0.05
_READY = grpc.ChannelConnectivity.READY

ChannelT = TypeVar("ChannelT")
Options = Sequence[tuple[str, Any]]
Dial = Callable[[grpc.ChannelCredentials | None], ChannelT]


class _Dialer(Generic[ChannelT]):
    """The current channel, and the reasons to replace it. Thread-safe."""

    def __init__(self, security: ChannelSecurity, dial: Dial[ChannelT], clock: Clock) -> None:
        self._security = security
        self._dial = dial
        self._clock = clock
        self._lock = threading.Lock()
        self._used: Certificates | None = None
        self._dialed: ChannelT | None = None
        self._is_given_up = False
        self._dialed_s = 0.0

    @property
    def present(self) -> ChannelT | None:
        """Return the channel of the last call, or None before the first."""
        return self._dialed

    @property
    def age_s(self) -> float:
        """Return the seconds since the current channel was created."""
        return self._clock.now() - self._dialed_s

    def give_up(self, channel: ChannelT) -> None:
        """Make the next call create a channel, unless `channel` was replaced already."""
        with self._lock:
            self._is_given_up = self._is_given_up or channel is self._dialed

    def current(self) -> tuple[ChannelT, ChannelT | None]:
        """Return the channel for the next call, and the one that it replaces or None."""
        store = self._security.certificates
        with self._lock:
            found = None if store is None else store.current()
            if self._dialed is not None and found is self._used and not self._is_given_up:
                return self._dialed, None
            replaced = self._dialed
            self._used = found
            self._dialed = self._dial(None if found is None else found.channel_credentials())
            self._dialed_s = self._clock.now()
            self._is_given_up = False
            return self._dialed, replaced

    def with_token(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call with the token in its metadata."""
        if self._security.token is None:
            return arguments
        return {
            **arguments,
            "metadata": (*(arguments.get("metadata") or ()), self._security.token.metadata()),
        }


class RedialingChannel(grpc.aio.Channel):
    """Asyncio channel that reconnects. `is_named`: the target's host is a name."""

    def __init__(
        self,
        security: ChannelSecurity,
        dial: Dial[grpc.aio.Channel],
        *,
        is_named: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._dialer = _Dialer(security, dial, self._clock)
        self._is_named = is_named
        self._called_s: float | None = None  # time of the last call on the current channel
        self._replaced: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._current()

    @property
    def is_named(self) -> bool:
        return self._is_named

    def renew(self) -> None:
        """Resolve the name again for the next call, even if the current connection works."""
        if (present := self._dialer.present) is not None:
            self._dialer.give_up(present)

    def _current(self) -> grpc.aio.Channel:
        present = self._dialer.present
        if present is not None and self._is_named and self._is_stale(present):
            self._dialer.give_up(present)
        channel, replaced = self._dialer.current()
        if replaced is not None:
            self._called_s = None
            task = asyncio.get_running_loop().create_task(replaced.close(_UNTIL_CALLS_END_S))
            self._replaced[task] = replaced
            task.add_done_callback(self._replaced.pop)
        return channel

    def _is_stale(self, channel: grpc.aio.Channel) -> bool:
        if self._called_s is None:
            return False
        match channel.get_state():
            # A connection is lost: before the first call the channel had none.
            case grpc.ChannelConnectivity.IDLE:
                return self._clock.now() - self._called_s >= REDIAL_S
            case grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return self._dialer.age_s >= REDIAL_S
            case grpc.ChannelConnectivity.CONNECTING:
                return self._dialer.age_s >= CONNECTING_S
        return False

    def _for_call(self) -> grpc.aio.Channel:
        channel = self._current()
        self._called_s = self._clock.now()
        return channel

    def _method(self, choose: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> Any:  # noqa: ANN401 (gRPC's own)
        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            return choose(self._for_call())(*arguments, **self._dialer.with_token(named))

        return call

    def unary_unary(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._method(lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._method(lambda channel: channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._method(lambda channel: channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._method(lambda channel: channel.stream_stream(*method, **options))

    async def close(self, grace: float | None = None) -> None:
        present = self._dialer.present
        assert present is not None
        await asyncio.gather(
            present.close(grace), *(old.close(grace) for old in self._replaced.values())
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 (gRPC's)
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        # Poll: a wait for a state change does not notice that the channel was replaced.
        while self._for_call().get_state(try_to_connect=True) is not _READY:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)


class RedialingSyncChannel(grpc.Channel):
    """Synchronous channel that reconnects.

    gRPC itself keeps a replaced channel until its last call has ended.
    """

    def __init__(
        self,
        security: ChannelSecurity,
        dial: Dial[grpc.Channel],
        *,
        is_named: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._dialer = _Dialer(security, dial, clock or SystemClock())
        self._is_named = is_named
        self._dialer.current()

    def unary_unary(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._method(lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._method(lambda channel: channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._method(lambda channel: channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._method(lambda channel: channel.stream_stream(*method, **options))

    def _method(self, choose: Callable[[grpc.Channel], Any]) -> "_SyncMethod":
        return _SyncMethod(self._dialer, choose, is_named=self._is_named)

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        self._dialer.current()[0].subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._dialer.current()[0].unsubscribe(callback)

    def close(self) -> None:
        if (present := self._dialer.present) is not None:
            present.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _SyncMethod:
    """One method on the current channel.

    A synchronous channel does not expose its state, so the end of calls shows that a name is
    unreachable.
    """

    def __init__(
        self,
        dialer: _Dialer[grpc.Channel],
        choose: Callable[[grpc.Channel], Any],
        *,
        is_named: bool,
    ) -> None:
        self._dialer = dialer
        self._choose = choose
        self._is_named = is_named

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        return self._begin(lambda method: method, arguments, named)

    def with_call(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        return self._begin(lambda method: method.with_call, arguments, named)

    def future(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        return self._begin(lambda method: method.future, arguments, named)

    def _begin(
        self,
        form: Callable[[Any], Callable[..., Any]],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        channel = self._dialer.current()[0]
        try:
            call = form(self._choose(channel))(*arguments, **self._dialer.with_token(named))
        except grpc.RpcError as error:  # of a blocking call
            if isinstance(error, grpc.Call):
                self._ended(channel, error)
            raise
        if self._is_named and isinstance(call, grpc.Call):
            call.add_callback(partial(self._ended, channel, call))
        return call

    def _ended(self, channel: grpc.Channel, call: grpc.Call) -> None:
        if (
            self._is_named
            and call.code() is grpc.StatusCode.UNAVAILABLE
            and self._dialer.age_s >= REDIAL_S
        ):
            self._dialer.give_up(channel)


def renew(channel: grpc.aio.Channel) -> bool:
    """Resolve the name of `channel` again for its next call.

    Returns False if its target is an address, which needs no resolution.
    """
    if not isinstance(channel, RedialingChannel) or not channel.is_named:
        return False
    channel.renew()
    return True

"""Channels whose certificates and token come from files that may be replaced while the channel lives.

gRPC fixes a channel's certificates when it is made. These make a new one for the next call when the files have changed;
calls under way keep the connection they have, and it is closed when the last of them has ended.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from runtime.certificates import Certificates
from runtime.security import ChannelSecurity

_UNTIL_CALLS_END_S = 30 * 86400.0

ChannelT = TypeVar("ChannelT")
Options = Sequence[tuple[str, Any]]


class _Dialler(Generic[ChannelT]):
    """Makes the channel anew when the files have changed."""

    def __init__(self, security: ChannelSecurity, dial: Callable[[grpc.ChannelCredentials | None], ChannelT]) -> None:
        self._security = security
        self._dial = dial
        self._lock = threading.Lock()
        self._used: Certificates | None = None
        self._dialled: ChannelT | None = None

    def current(self) -> tuple[ChannelT, ChannelT | None]:
        """The channel for the next call, and the one it replaces, if it does."""
        store = self._security.certificates
        with self._lock:
            found = None if store is None else store.current()
            if self._dialled is not None and found is self._used:
                return self._dialled, None
            replaced, self._used = self._dialled, found
            self._dialled = self._dial(None if found is None else found.channel_credentials())
            return self._dialled, replaced

    def with_token(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call, with the token in its metadata."""
        if self._security.token is None:
            return arguments
        return {**arguments, "metadata": (*(arguments.get("metadata") or ()), self._security.token.metadata())}


class SecureChannel(grpc.aio.Channel):
    """The same interface as any grpc.aio channel."""

    def __init__(self, security: ChannelSecurity,
                 dial: Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel]) -> None:
        self._dialler = _Dialler(security, dial)
        self._replaced: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._current()

    def _current(self) -> grpc.aio.Channel:
        channel, replaced = self._dialler.current()
        if replaced is not None:
            task = asyncio.get_running_loop().create_task(replaced.close(_UNTIL_CALLS_END_S))
            self._replaced[task] = replaced
            task.add_done_callback(self._replaced.pop)
        return channel

    def _method(self, choose: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> Any:  # noqa: ANN401 (gRPC's own)
        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            return choose(self._current())(*arguments, **self._dialler.with_token(named))

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
        channel = self._current()
        await asyncio.gather(channel.close(grace), *(old.close(grace) for old in self._replaced.values()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 (gRPC's)
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()


class SecureSyncChannel(grpc.Channel):
    """The same for threads. gRPC itself keeps a replaced channel until its last call has ended."""

    def __init__(self, security: ChannelSecurity,
                 dial: Callable[[grpc.ChannelCredentials | None], grpc.Channel]) -> None:
        self._dialler = _Dialler(security, dial)
        self._dialler.current()

    def unary_unary(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return _SyncMethod(self._dialler, lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return _SyncMethod(self._dialler, lambda channel: channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return _SyncMethod(self._dialler, lambda channel: channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Any:  # noqa: ANN401
        return _SyncMethod(self._dialler, lambda channel: channel.stream_stream(*method, **options))

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None],
                  try_to_connect: bool = False) -> None:  # noqa: FBT001, FBT002 (gRPC's)
        self._dialler.current()[0].subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._dialler.current()[0].unsubscribe(callback)

    def close(self) -> None:
        self._dialler.current()[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class _SyncMethod:
    """One method of whichever channel is the present one."""

    def __init__(self, dialler: _Dialler[grpc.Channel], choose: Callable[[grpc.Channel], Any]) -> None:
        self._dialler = dialler
        self._choose = choose

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        return self._method()(*arguments, **self._dialler.with_token(named))

    def with_call(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        return self._method().with_call(*arguments, **self._dialler.with_token(named))

    def future(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        return self._method().future(*arguments, **self._dialler.with_token(named))

    def _method(self) -> Any:  # noqa: ANN401
        return self._choose(self._dialler.current()[0])

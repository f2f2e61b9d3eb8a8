"""The Python client, with and without an event loop. Both are thin: `baton.wire` holds what they share.

    with BatonClient("127.0.0.1:7000") as client:
        for event in client.generate(Query("Once upon a time")): ...

    async with AsyncBatonClient("127.0.0.1:7000") as client:
        async for event in client.generate(Query("Once upon a time")): ...

    BatonClient("router.example.org:7000", security=client_security(tls_ca=Path("ca.pem"), token_file=Path("token")))

Every failure is a `runtime.errors.BatonError`: InvalidRequestError carries field violations, CapacityError and
UnavailableError when to come back. Closing an iterator early, or cancelling the task that awaits it, aborts the request
on the server.
"""

import contextlib
import math
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from types import TracebackType
from typing import Self

import grpc

from baton import wire
from baton.values import ClusterStatus, Completion, Event, Load, ModelInfo, Query
from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationStub
from runtime.client import open_channel, open_sync_channel
from runtime.errors import FieldViolation, InvalidRequestError
from runtime.security import PLAIN_CHANNEL, ChannelSecurity
from runtime.status import error_from_rpc

DEFAULT_TARGET = "127.0.0.1:7000"
CONTROL_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 1e9  # thirty years


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise
        raise error_from_rpc(error) from None


def _time_limit(timeout_s: float | None) -> float | None:
    """What gRPC is told. It takes a time it cannot add to now as one that has passed; one so long is no limit.

    Raises:
        InvalidRequestError: not a number.
    """
    if timeout_s is None or timeout_s > MAX_TIMEOUT_S:
        return None
    if math.isnan(timeout_s):
        raise InvalidRequestError(FieldViolation("timeout_s", "must be a number of seconds, got nan"))
    return timeout_s


def _metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    return (("traceparent", traceparent),) if traceparent else ()


class BatonClient:
    """For threads. One client may be shared by many."""

    def __init__(self, target: str = DEFAULT_TARGET, *, security: ChannelSecurity = PLAIN_CHANNEL) -> None:
        self.target = target
        self._channel = open_sync_channel(target, security=security)
        self._stub = GenerationStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, query: Query, *, timeout_s: float | None = None,
                 traceparent: str = "") -> Generator[Event, None, None]:
        """Chunks as they are drawn, then one Finish. `traceparent` is the caller's W3C trace context, if it has one."""
        request, limit_s = wire.request_of(query), _time_limit(timeout_s)
        with _typed_errors():
            call = self._stub.Generate(request, timeout=limit_s, metadata=_metadata(traceparent))
            try:
                for response in call:
                    yield wire.event_of(response)
            finally:
                call.cancel()

    def complete(self, query: Query, *, timeout_s: float | None = None) -> Completion:
        """The whole answer; of several choices the first."""
        return self.choices(query, timeout_s=timeout_s)[0]

    def choices(self, query: Query, *, timeout_s: float | None = None) -> tuple[Completion, ...]:
        """The whole answers, one per choice."""
        return wire.completions_of(self.generate(query, timeout_s=timeout_s))

    def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """End requests; returns those that were running."""
        with _typed_errors():
            response = self._stub.Abort(pb.AbortRequest(request_ids=request_ids), timeout=CONTROL_TIMEOUT_S)
            return tuple(response.aborted)

    def model_info(self) -> ModelInfo:
        with _typed_errors():
            return wire.model_info_of(self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CONTROL_TIMEOUT_S))

    def load(self) -> Load:
        with _typed_errors():
            return wire.load_of(self._stub.GetLoad(pb.GetLoadRequest(), timeout=CONTROL_TIMEOUT_S))

    def cluster_status(self) -> ClusterStatus:
        with _typed_errors():
            response = self._stub.GetClusterStatus(pb.GetClusterStatusRequest(), timeout=CONTROL_TIMEOUT_S)
            return wire.cluster_status_of(response)


class AsyncBatonClient:
    """For asyncio. Build it inside the running loop."""

    def __init__(self, target: str = DEFAULT_TARGET, *, security: ChannelSecurity = PLAIN_CHANNEL) -> None:
        self.target = target
        self._channel = open_channel(target, security=security)
        self._stub = GenerationStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(self, query: Query, *, timeout_s: float | None = None,
                       traceparent: str = "") -> AsyncGenerator[Event, None]:
        """Chunks as they are drawn, then one Finish. `traceparent` is the caller's W3C trace context, if it has one."""
        request, limit_s = wire.request_of(query), _time_limit(timeout_s)
        with _typed_errors():
            call = self._stub.Generate(request, timeout=limit_s, metadata=_metadata(traceparent))
            try:
                async for response in call:
                    yield wire.event_of(response)
            finally:
                call.cancel()

    async def complete(self, query: Query, *, timeout_s: float | None = None) -> Completion:
        """The whole answer; of several choices the first."""
        return (await self.choices(query, timeout_s=timeout_s))[0]

    async def choices(self, query: Query, *, timeout_s: float | None = None) -> tuple[Completion, ...]:
        """The whole answers, one per choice."""
        return wire.completions_of([event async for event in self.generate(query, timeout_s=timeout_s)])

    async def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """End requests; returns those that were running."""
        with _typed_errors():
            response = await self._stub.Abort(pb.AbortRequest(request_ids=request_ids), timeout=CONTROL_TIMEOUT_S)
            return tuple(response.aborted)

    async def model_info(self) -> ModelInfo:
        with _typed_errors():
            response = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CONTROL_TIMEOUT_S)
            return wire.model_info_of(response)

    async def load(self) -> Load:
        with _typed_errors():
            return wire.load_of(await self._stub.GetLoad(pb.GetLoadRequest(), timeout=CONTROL_TIMEOUT_S))

    async def cluster_status(self) -> ClusterStatus:
        with _typed_errors():
            response = await self._stub.GetClusterStatus(pb.GetClusterStatusRequest(), timeout=CONTROL_TIMEOUT_S)
            return wire.cluster_status_of(response)

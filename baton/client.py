"""The Python clients, synchronous and for asyncio.

    with BatonClient("127.0.0.1:7000") as client:
        for event in client.generate(Query("Once upon a time")): ...

    async with AsyncBatonClient("127.0.0.1:7000") as client:
        async for event in client.generate(Query("Once upon a time")): ...

    BatonClient("router.example.org:7000", security=client_security(tls_ca=Path("ca.pem"),
    token_file=Path("token")))
    BatonClient("a.example.org:7000", "b.example.org:7000")     # routers of the same workers

Calls rotate over the routers and skip those that failed recently. When a router rejects a request
for now or does not finish it, another router continues it within the deadline (`baton.retry`). Each
token of a response arrives once.

Every failure is a `runtime.errors.BatonError`. InvalidRequestError carries field violations;
CapacityError and UnavailableError carry a retry delay. Closing an iterator early, or cancelling the
task that awaits it, aborts the request on the server.

Both clients are thin: `baton.wire` holds what they share.
"""

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from baton import wire
from baton.retry import DEFAULT_RETRY, Attempts, Retry, Targets, checked_targets
from baton.values import ClusterStatus, Completion, Event, FlushedCache, Load, ModelInfo, Query
from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationStub
from runtime.clock import SystemClock
from runtime.errors import BatonError, UnavailableError
from runtime.rpc.client import open_channel, open_sync_channel
from runtime.rpc.interrupt_safe import uninterrupted, uninterrupted_stream
from runtime.rpc.status import error_from_rpc, is_lost
from runtime.rpc.unreachable import reach_problem
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity

if TYPE_CHECKING:  # used in annotations only: the type exists only in the stubs
    from protos.generation_pb2_grpc import GenerationAsyncStub

T = TypeVar("T")

DEFAULT_TARGET = "127.0.0.1:7000"
CONTROL_TIMEOUT_S = 10.0


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _error_of(error) from None
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise
        raise _error_of(error) from None


def _error_of(call: grpc.aio.AioRpcError | grpc.Call) -> BatonError:
    """Return the router's own error, or UnavailableError if the router failed first.

    A lost router gives no retry delay.
    """
    if (
        is_lost(call) and call.code() is grpc.StatusCode.CANCELLED
    ):  # gRPC on the router's side cancelled the call
        return UnavailableError(
            "the router cancelled the call before it responded: it is shutting down or gets too "
            "many calls"
        )
    if is_lost(call):
        return UnavailableError(
            f"cannot reach a router: {reach_problem(call.details() or call.code().name)}"
        )
    return error_from_rpc(call)


def _metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    return (("traceparent", traceparent),) if traceparent else ()


def _attempts(query: Query, timeout_s: float | None, retry: Retry, turns: Targets) -> Attempts:
    return Attempts(
        query,
        retry,
        turns,
        timeout_s=timeout_s,
        clock=SystemClock(),
        rng=random.Random(),
        new_seed=lambda: secrets.randbits(64),
    )


class BatonClient:
    """Synchronous client, safe to share between threads.

    A KeyboardInterrupt leaves it usable.
    """

    def __init__(
        self, *targets: str, security: ChannelSecurity = PLAIN_CHANNEL, retry: Retry = DEFAULT_RETRY
    ) -> None:
        """Connect to `targets`, HOST:PORT of routers that share their workers.

        Without targets, connect to the router of `baton up`.
        """
        self.targets = checked_targets(targets or (DEFAULT_TARGET,))
        self._channels = [open_sync_channel(target, security=security) for target in self.targets]
        self._stubs = [GenerationStub(channel) for channel in self._channels]
        self._retry = retry
        self._turns = Targets(len(self.targets), SystemClock(), random.Random())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            uninterrupted(channel.close)

    def generate(
        self, query: Query, *, timeout_s: float | None = None, traceparent: str = ""
    ) -> Generator[Event, None, None]:
        """Yield chunks as their tokens are generated, then one Finish per choice.

        `traceparent` is the W3C trace context of the caller, if it has one.
        """
        answer = _attempts(query, timeout_s, self._retry, self._turns)
        while True:
            turn, attempt, timeout_s = answer.begin()
            request = wire.request_of(attempt)
            try:
                with (
                    _typed_errors(),
                    contextlib.closing(
                        uninterrupted_stream(
                            partial(
                                self._stubs[turn].Generate,
                                request,
                                timeout=timeout_s,
                                metadata=_metadata(traceparent),
                            )
                        )
                    ) as responses,
                ):
                    for response in responses:
                        yield from answer.news(wire.event_of(response))
                return
            except BatonError as error:
                if answer.is_whole:
                    return
                pause_s = answer.pause_after(error)
            time.sleep(pause_s)

    def complete(self, query: Query, *, timeout_s: float | None = None) -> Completion:
        """Return the whole response; with several choices, the first."""
        return self.choices(query, timeout_s=timeout_s)[0]

    def choices(self, query: Query, *, timeout_s: float | None = None) -> tuple[Completion, ...]:
        """Return the whole responses, one per choice."""
        return wire.completions_of(self.generate(query, timeout_s=timeout_s))

    def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Abort requests on all routers; return the ids of those that were running."""
        request = pb.AbortRequest(request_ids=request_ids)
        aborted = dict[str, None]()
        failures = list[BatonError]()
        for stub in self._stubs:
            try:
                with _typed_errors():
                    answer = uninterrupted(partial(stub.Abort, request, timeout=CONTROL_TIMEOUT_S))
                    aborted |= dict.fromkeys(answer.aborted)
            except UnavailableError as error:
                failures.append(error)  # an unreachable router runs no requests
        if len(failures) == len(self._stubs):
            raise failures[0]
        return tuple(aborted)

    def model_info(self) -> ModelInfo:
        return wire.model_info_of(
            self._ask(
                lambda stub: stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CONTROL_TIMEOUT_S)
            )
        )

    def load(self) -> Load:
        return wire.load_of(
            self._ask(lambda stub: stub.GetLoad(pb.GetLoadRequest(), timeout=CONTROL_TIMEOUT_S))
        )

    def cluster_status(self) -> ClusterStatus:
        return wire.cluster_status_of(
            self._ask(
                lambda stub: stub.GetClusterStatus(
                    pb.GetClusterStatusRequest(), timeout=CONTROL_TIMEOUT_S
                )
            )
        )

    def flush_caches(self) -> tuple[FlushedCache, ...]:
        """Empty the prefix caches of all workers (for operators).

        Responses stay the same; the first ones after it are slower.
        """
        return wire.flushed_caches_of(
            self._ask(
                lambda stub: stub.FlushCaches(pb.FlushCachesRequest(), timeout=CONTROL_TIMEOUT_S)
            )
        )

    def _ask(self, question: Callable[[GenerationStub], T]) -> T:
        """Call one router after another until one responds."""
        failures: list[BatonError] = []
        while True:
            turn = self._turns.next()
            try:
                with _typed_errors():
                    return uninterrupted(partial(question, self._stubs[turn]))
            except UnavailableError as error:
                self._turns.failed(turn, error)
                failures.append(error)
                if len(failures) == len(self._stubs):
                    raise failures[0] from None


class AsyncBatonClient:
    """Client for asyncio; create it inside the running loop."""

    def __init__(
        self, *targets: str, security: ChannelSecurity = PLAIN_CHANNEL, retry: Retry = DEFAULT_RETRY
    ) -> None:
        """Connect to `targets`, HOST:PORT of routers that share their workers.

        Without targets, connect to the router of `baton up`.
        """
        self.targets = checked_targets(targets or (DEFAULT_TARGET,))
        self._channels = [open_channel(target, security=security) for target in self.targets]
        self._stubs = [GenerationStub(channel) for channel in self._channels]
        self._retry = retry
        self._turns = Targets(len(self.targets), SystemClock(), random.Random())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def generate(
        self, query: Query, *, timeout_s: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[Event, None]:
        """Yield chunks as their tokens are generated, then one Finish per choice.

        `traceparent` is the W3C trace context of the caller, if it has one.
        """
        answer = _attempts(query, timeout_s, self._retry, self._turns)
        while True:
            turn, attempt, timeout_s = answer.begin()
            request = wire.request_of(attempt)
            try:
                with _typed_errors():
                    call = self._stubs[turn].Generate(
                        request, timeout=timeout_s, metadata=_metadata(traceparent)
                    )
                    try:
                        async for response in call:
                            for event in answer.news(wire.event_of(response)):
                                yield event
                    finally:
                        call.cancel()
                return
            except BatonError as error:
                if answer.is_whole:
                    return
                pause_s = answer.pause_after(error)
            await asyncio.sleep(pause_s)

    async def complete(self, query: Query, *, timeout_s: float | None = None) -> Completion:
        """Return the whole response; with several choices, the first."""
        return (await self.choices(query, timeout_s=timeout_s))[0]

    async def choices(
        self, query: Query, *, timeout_s: float | None = None
    ) -> tuple[Completion, ...]:
        """Return the whole responses, one per choice."""
        return wire.completions_of(
            [event async for event in self.generate(query, timeout_s=timeout_s)]
        )

    async def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Abort requests on all routers; return the ids of those that were running."""
        request = pb.AbortRequest(request_ids=request_ids)
        aborted = dict[str, None]()
        failures = list[BatonError]()
        for stub in self._stubs:
            try:
                with _typed_errors():
                    aborted |= dict.fromkeys(
                        (await stub.Abort(request, timeout=CONTROL_TIMEOUT_S)).aborted
                    )
            except UnavailableError as error:
                failures.append(error)  # an unreachable router runs no requests
        if len(failures) == len(self._stubs):
            raise failures[0]
        return tuple(aborted)

    async def model_info(self) -> ModelInfo:
        return wire.model_info_of(
            await self._ask(
                lambda stub: stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CONTROL_TIMEOUT_S)
            )
        )

    async def load(self) -> Load:
        return wire.load_of(
            await self._ask(
                lambda stub: stub.GetLoad(pb.GetLoadRequest(), timeout=CONTROL_TIMEOUT_S)
            )
        )

    async def cluster_status(self) -> ClusterStatus:
        return wire.cluster_status_of(
            await self._ask(
                lambda stub: stub.GetClusterStatus(
                    pb.GetClusterStatusRequest(), timeout=CONTROL_TIMEOUT_S
                )
            )
        )

    async def flush_caches(self) -> tuple[FlushedCache, ...]:
        """Empty the prefix caches of all workers (for operators).

        Responses stay the same; the first ones after it are slower.
        """
        return wire.flushed_caches_of(
            await self._ask(
                lambda stub: stub.FlushCaches(pb.FlushCachesRequest(), timeout=CONTROL_TIMEOUT_S)
            )
        )

    async def _ask(self, question: "Callable[[GenerationAsyncStub], Awaitable[T]]") -> T:
        """Call one router after another until one responds."""
        failures: list[BatonError] = []
        while True:
            turn = self._turns.next()
            try:
                with _typed_errors():
                    return await question(self._stubs[turn])
            except UnavailableError as error:
                self._turns.failed(turn, error)
                failures.append(error)
                if len(failures) == len(self._stubs):
                    raise failures[0] from None

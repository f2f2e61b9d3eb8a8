"""The Python client, with and without an event loop. Both are thin: `baton.wire` holds what they
share.

    with BatonClient("127.0.0.1:7000") as client:
        for event in client.generate(Query("Once upon a time")): ...

    async with AsyncBatonClient("127.0.0.1:7000") as client:
        async for event in client.generate(Query("Once upon a time")): ...

    BatonClient("router.example.org:7000", security=client_security(tls_ca=Path("ca.pem"),
    token_file=Path("token")))
    BatonClient("a.example.org:7000", "b.example.org:7000")     # routers of the same workers

Routers take turns, those that failed lately are passed over, and what one refuses for now or leaves
unfinished another one goes on with, within the deadline (`baton.retry`); of an answer each token
arrives once.

Every failure is a `runtime.errors.BatonError`: InvalidRequestError carries field violations,
CapacityError and UnavailableError when to come back. Closing an iterator early, or cancelling the
task that awaits it, aborts the request on the server.
"""

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from baton import wire
from baton.retry import DEFAULT_RETRY, AnswerSoFar, Patience, Retry, Targets, checked_targets
from baton.values import ClusterStatus, Completion, Event, FlushedCache, Load, ModelInfo, Query
from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationStub
from runtime.clock import SystemClock
from runtime.errors import BatonError, FieldViolation, InvalidRequestError, UnavailableError
from runtime.rpc.client import open_channel, open_sync_channel
from runtime.rpc.interrupt_safe import uninterrupted, uninterrupted_stream
from runtime.rpc.status import error_from_rpc, is_lost
from runtime.rpc.unreachable import reach_problem
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity

if TYPE_CHECKING:  # in the type stubs only
    from protos.generation_pb2_grpc import GenerationAsyncStub

T = TypeVar("T")

DEFAULT_TARGET = "127.0.0.1:7000"
CONTROL_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 1e9  # thirty years


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
    """The router's own error, or the loss of a router that died first: then there is no time to
    come back after."""
    if (
        is_lost(call) and call.code() is grpc.StatusCode.CANCELLED
    ):  # by gRPC itself, on the router's side
        return UnavailableError(
            "a router gave the call up before it answered: it stops, or gets too many calls"
        )
    if is_lost(call):
        return UnavailableError(
            f"a router cannot be reached: {reach_problem(call.details() or call.code().name)}"
        )
    return error_from_rpc(call)


def _time_limit(timeout_s: float | None) -> float | None:
    """The time limit that gRPC gets. It takes a time it cannot add to now as one that has passed;
    one so long is no limit.

    Raises:
        InvalidRequestError: not a number.
    """
    if timeout_s is None or timeout_s > MAX_TIMEOUT_S:
        return None
    if math.isnan(timeout_s):
        raise InvalidRequestError(
            FieldViolation("timeout_s", "must be a number of seconds, got nan")
        )
    return timeout_s


def _metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    return (("traceparent", traceparent),) if traceparent else ()


class _Attempts:
    """One answer from its first attempt to its end: what both clients do but for the calls and the
    pauses."""

    def __init__(self, query: Query, timeout_s: float | None, retry: Retry, turns: Targets) -> None:
        """Raises InvalidRequestError for a time limit that is no number."""
        self._answer = AnswerSoFar(query, lambda: secrets.randbits(64))
        self._patience = Patience(
            retry, _time_limit(timeout_s), len(turns), SystemClock(), random.Random()
        )
        self._turns, self._turn = turns, 0

    @property
    def is_whole(self) -> bool:
        return self._answer.is_whole

    def begin(self) -> tuple[int, pb.GenerateRequest, float | None]:
        """The next attempt: the router to call, what to send, and the seconds that are left."""
        self._turn = self._turns.next()
        return self._turn, wire.request_of(self._answer.query()), self._patience.left_s()

    def news(self, response: pb.GenerateResponse) -> Iterator[Event]:
        """What had not come before."""
        self._turns.answered(self._turn)
        for event in self._answer.news(wire.event_of(response)):
            self._patience.progressed()
            yield event

    def pause_after(self, error: BatonError) -> float:
        """Seconds until the next attempt. Raises `error` where there is none."""
        self._turns.failed(self._turn, error)
        return self._patience.pause_after(error)


class BatonClient:
    """For threads. One client may be shared by many, and a KeyboardInterrupt leaves it as good as
    it was."""

    def __init__(
        self, *targets: str, security: ChannelSecurity = PLAIN_CHANNEL, retry: Retry = DEFAULT_RETRY
    ) -> None:
        """`targets`: HOST:PORT of routers of the same workers; without any, the one of `baton
        up`."""
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
        """Chunks as they are drawn, then one Finish. `traceparent` is the caller's W3C trace
        context, if it has one."""
        answer = _Attempts(query, timeout_s, self._retry, self._turns)
        while True:
            turn, request, left_s = answer.begin()
            try:
                with (
                    _typed_errors(),
                    contextlib.closing(
                        uninterrupted_stream(
                            partial(
                                self._stubs[turn].Generate,
                                request,
                                timeout=left_s,
                                metadata=_metadata(traceparent),
                            )
                        )
                    ) as responses,
                ):
                    for response in responses:
                        yield from answer.news(response)
                return
            except BatonError as error:
                if answer.is_whole:
                    return
                pause_s = answer.pause_after(error)
            time.sleep(pause_s)

    def complete(self, query: Query, *, timeout_s: float | None = None) -> Completion:
        """The whole answer; of several choices the first."""
        return self.choices(query, timeout_s=timeout_s)[0]

    def choices(self, query: Query, *, timeout_s: float | None = None) -> tuple[Completion, ...]:
        """The whole answers, one per choice."""
        return wire.completions_of(self.generate(query, timeout_s=timeout_s))

    def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """End requests, at whichever routers they run; returns those that were running."""
        request, aborted, failures = (
            pb.AbortRequest(request_ids=request_ids),
            dict[str, None](),
            list[BatonError](),
        )
        for stub in self._stubs:
            try:
                with _typed_errors():
                    answer = uninterrupted(partial(stub.Abort, request, timeout=CONTROL_TIMEOUT_S))
                    aborted |= dict.fromkeys(answer.aborted)
            except UnavailableError as error:
                failures.append(error)  # nothing runs where nobody is
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
        """Empty the prefix caches of all workers; for operators. Answers stay the same, only slower
        at first."""
        return wire.flushed_caches_of(
            self._ask(
                lambda stub: stub.FlushCaches(pb.FlushCachesRequest(), timeout=CONTROL_TIMEOUT_S)
            )
        )

    def _ask(self, question: Callable[[GenerationStub], T]) -> T:
        """One router after the other, until one answers."""
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
    """For asyncio. Build it inside the running loop."""

    def __init__(
        self, *targets: str, security: ChannelSecurity = PLAIN_CHANNEL, retry: Retry = DEFAULT_RETRY
    ) -> None:
        """`targets`: HOST:PORT of routers of the same workers; without any, the one of `baton
        up`."""
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
        """Chunks as they are drawn, then one Finish. `traceparent` is the caller's W3C trace
        context, if it has one."""
        answer = _Attempts(query, timeout_s, self._retry, self._turns)
        while True:
            turn, request, left_s = answer.begin()
            try:
                with _typed_errors():
                    call = self._stubs[turn].Generate(
                        request, timeout=left_s, metadata=_metadata(traceparent)
                    )
                    try:
                        async for response in call:
                            for event in answer.news(response):
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
        """The whole answer; of several choices the first."""
        return (await self.choices(query, timeout_s=timeout_s))[0]

    async def choices(
        self, query: Query, *, timeout_s: float | None = None
    ) -> tuple[Completion, ...]:
        """The whole answers, one per choice."""
        return wire.completions_of(
            [event async for event in self.generate(query, timeout_s=timeout_s)]
        )

    async def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """End requests, at whichever routers they run; returns those that were running."""
        request, aborted, failures = (
            pb.AbortRequest(request_ids=request_ids),
            dict[str, None](),
            list[BatonError](),
        )
        for stub in self._stubs:
            try:
                with _typed_errors():
                    aborted |= dict.fromkeys(
                        (await stub.Abort(request, timeout=CONTROL_TIMEOUT_S)).aborted
                    )
            except UnavailableError as error:
                failures.append(error)  # nothing runs where nobody is
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
        """Empty the prefix caches of all workers; for operators. Answers stay the same, only slower
        at first."""
        return wire.flushed_caches_of(
            await self._ask(
                lambda stub: stub.FlushCaches(pb.FlushCachesRequest(), timeout=CONTROL_TIMEOUT_S)
            )
        )

    async def _ask(self, question: "Callable[[GenerationAsyncStub], Awaitable[T]]") -> T:
        """One router after the other, until one answers."""
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

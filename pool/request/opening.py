"""How a request's stay on a pool begins and ends, the same for both roles: the stream's first message, the checks
before any work, and what is given back whatever became of it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from engine.core.request import Request
from pool.pipeline.grammars import GrammarCheck
from pool.pipeline.leader import Leader
from pool.request.conversion import check_grammar, request_from_proto
from pool.request.inbox import Inbox
from pool.request.reclaimer import MemoryReclaimer
from pool.stage.metrics import LeaderMeters
from pool.stage.stage import StagePlan
from protos import types_pb2
from runtime.errors import DeadlineError, FieldViolation, InvalidRequestError, UnavailableError
from runtime.log import bind
from runtime.server import first_message
from runtime.tracing import note

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT", bound=Message)
EventT = TypeVar("EventT")
ResponseT = TypeVar("ResponseT", covariant=True)

OPEN_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RequestParts:
    """What a request on a pool of either role works with."""

    leader: Leader
    plan: StagePlan
    reclaimer: MemoryReclaimer
    meters: LeaderMeters
    grammars: GrammarCheck | None = None
    stall_s: float = 120.0  # how long the caller may leave a response unread


class Stay(Protocol[ResponseT]):
    """A request's stay on a pool, from its place in the scheduler to its end."""

    def run(self) -> AsyncIterator[ResponseT]:
        """What the stream is sent. Raises BatonError for what ended the request before its time."""
        ...

    def end(self) -> None:
        """Close what is open and give the memory back once nothing can touch it. Event loop's thread; never waits."""
        ...


async def open_stream(parts: RequestParts, stream: AsyncIterator[MessageT], *, role: str, expected: str) -> MessageT:
    """The message that opens a stream, whose `input` must be the `expected` one.

    Raises:
        UnavailableError: the pool does not serve.
        InvalidRequestError: the stream opens with something else, or with nothing.
        DeadlineError: no message came in time.
    """
    if not parts.leader.serving:
        raise UnavailableError(f"the {role} pool does not serve: {parts.leader.reason}")
    opening = await first_message(stream, OPEN_TIMEOUT_S)
    if opening.WhichOneof("input") != expected:
        raise InvalidRequestError(FieldViolation("input", f"the first message must be {expected}"))
    return opening


def read_request(parts: RequestParts, message: types_pb2.EngineRequest) -> Request:
    """Raises InvalidRequestError naming every field that this pool could not serve."""
    request = request_from_proto(message, vocab_size=parts.plan.description.facts.vocab_size,
                                 max_context_tokens=parts.plan.max_context_tokens)
    note(request_id=request.request_id, prompt_tokens=len(request.prompt_token_ids))
    return request


@contextmanager
def _cancelled_after(stall_s: float) -> Iterator[None]:
    """The task of this block, if the block lasts for so long. Not `asyncio.timeout`: the block ends by being closed."""
    task = asyncio.current_task()
    assert task is not None
    stalled = asyncio.get_running_loop().call_later(stall_s, _cancel, task, stall_s)
    try:
        yield
    finally:
        stalled.cancel()


def _cancel(task: asyncio.Task[object], stall_s: float) -> None:
    logger.warning("a caller has read nothing for %g s: its request is ended", stall_s)
    task.cancel()


async def serve(parts: RequestParts, inbox: Inbox[MessageT, EventT], request: Request,
                begin: Callable[[], Awaitable[Stay[ResponseT]]]) -> AsyncGenerator[ResponseT, None]:
    """The responses of one request, whose stay `begin` takes a place for. Close it: it ends the stay.

    A caller that leaves a response unread for `stall_s` is gone, though its connection lives: its handler, which waits
    for it in gRPC, is cancelled, as if it had dropped the stream.

    Raises as `check_grammar`, `begin` and `Stay.run` do.
    """
    await check_grammar(request, parts.grammars)
    with bind(request_id=request.request_id), inbox:
        stay = await begin()
        try:
            async for response in stay.run():
                with _cancelled_after(parts.stall_s):
                    yield response
        except DeadlineError:
            parts.meters.handoff.leases_expired.inc()
            raise
        finally:
            stay.end()

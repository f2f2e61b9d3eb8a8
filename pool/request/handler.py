"""A request's stay on a pool, the same for both roles: how it begins, what happens to it, how it
ends.

`read_request` checks what is asked before any work; `EventPost` brings what the engine did to the
request's inbox (`pool.request.router_call`); `serve` runs the stay; `MemoryReclaimer` ends what it
leaves behind.
"""

import asyncio
import ctypes
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.core.request import Request
from engine.loop import EngineLoop
from pool.pipeline.grammars import GrammarCheck
from pool.pipeline.group import Session, SessionReports
from pool.pipeline.leader import Leader
from pool.request.conversion import check_grammar, request_from_proto
from pool.stage.metrics import LeaderMeters
from pool.stage.stage import StagePlan
from protos import types_pb2
from runtime.clock import HELD_UP_S
from runtime.digests import block_names
from runtime.errors import UnavailableError
from runtime.observe.log import rebind
from runtime.observe.tracing import note

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT")

DRAIN_TIMEOUT_S = 30.0
PACE_S = 0.006  # between two looks for what can wait
LET_IN_S = 0.004  # since the engine's thread last gave way; more often the kernel sees to it


class EventPost:
    """Takes the engine's events to the event loop, all that wait at a time.

    A call from another thread wakes the loop, and that costs more than the event, half as much as a
    step of a small model. So behind a delivery the loop looks again by a timer of its own, for as
    long as it finds something, and what can wait does so until then.

    Where both threads share a core, the loop's would wait until the engine's has used up its slice,
    3 ms on Linux. So the engine's lets it in, but not behind every one of many short steps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[tuple[Callable[..., object], object]] = deque()  # both threads'
        self._is_urgent = False
        self._is_due = (
            False  # the loop has been called, or looks again without; written by both threads
        )
        self._timer: asyncio.TimerHandle | None = None
        self._let_in_s = 0.0

    def put(
        self, receive: Callable[[EventT], object], event: EventT, *, can_wait: bool = False
    ) -> None:
        """`receive(event)` on the event loop's thread, in order, after `flush`; or up to PACE_S
        later, if it `can_wait`. Engine thread."""
        self._events.append((receive, event))
        self._is_urgent = self._is_urgent or not can_wait

    def flush(self) -> None:
        """Before every wait and every forward. Engine thread."""
        if not self._events:
            return
        if self._is_urgent or not self._is_due:
            self._is_urgent, self._is_due = False, True
            self._loop.call_soon_threadsafe(self._deliver)
        if time.monotonic() - self._let_in_s >= LET_IN_S:
            _give_way()
            self._let_in_s = time.monotonic()

    def _deliver(self) -> None:
        for _ in range(len(self._events)):
            receive, event = self._events.popleft()
            try:
                receive(event)
            except Exception as error:  # noqa: BLE001 - as of every callback of the loop; the others get theirs
                self._loop.call_exception_handler(
                    {"message": "an event of the engine was not taken", "exception": error}
                )
        if self._timer is None:
            self._timer = self._loop.call_later(PACE_S, self._look_again)

    def _look_again(self) -> None:
        """The engine's thread calls from here on, unless it has left something meanwhile."""
        self._timer, self._is_due = None, False
        if self._events:
            self._is_due = True
            self._deliver()


def _give_way() -> None:
    """To other threads on this core, of this process, too: unlike `os.sched_yield`, this keeps no
    lock of Python's."""
    _LIBRARY.sched_yield()


_LIBRARY = ctypes.CDLL(None)  # C's


class MemoryReclaimer:
    """Ends what a request leaves behind, after its stream is gone: closes its session everywhere,
    waits for the drain, and only then gives its memory back. Two lifetimes, request and transfer;
    memory is free when both have ended.

    Runs one short task per ended request. `unhealthy` is called for a session that will not drain:
    its memory stays leased, because a transfer may still write to it."""

    def __init__(
        self, reports: SessionReports, loop: EngineLoop, unhealthy: Callable[[str], None]
    ) -> None:
        self._reports = reports
        self._loop = loop
        self._unhealthy = unhealthy
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    def end(
        self,
        release: Callable[[], None],
        *,
        close: Callable[[], None] | None = None,
        session: Session | None = None,
    ) -> None:
        """`close` aborts or releases on every stage; `release` runs on the engine thread once
        `session` has drained. None: none was ever opened."""
        if close is not None:
            close()
        if session is None:
            self._loop.post(release)
            return
        drained = self._reports.drained(session)
        if drained.is_set():
            self._reports.forget(session.session_id, session.epoch)
            self._loop.post(release)
            return
        task = asyncio.create_task(
            self._finish(release, session.session_id, session.epoch, drained)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(
        self, release: Callable[[], None], session_id: str, epoch: int, drained: asyncio.Event
    ) -> None:
        if not await _in_time(drained):
            self._unhealthy(f"session {session_id} did not drain within {DRAIN_TIMEOUT_S} s")
            return
        self._reports.forget(session_id, epoch)
        self._loop.post(release)


async def _in_time(drained: asyncio.Event) -> bool:
    """Whether it is set within the time, for all of which this process must have listened: one that
    was stopped and goes on has to read first what was reported meanwhile."""
    loop = asyncio.get_running_loop()
    due_at = loop.time() + DRAIN_TIMEOUT_S
    while not drained.is_set():
        try:
            async with asyncio.timeout_at(due_at):
                await drained.wait()
        except TimeoutError:
            now = loop.time()
            if now - due_at < HELD_UP_S:
                break
            due_at = now + DRAIN_TIMEOUT_S
    return drained.is_set()


@dataclass(frozen=True, kw_only=True)
class RequestParts:
    """What a request on a pool of either role works with."""

    leader: Leader
    plan: StagePlan
    reclaimer: MemoryReclaimer
    meters: LeaderMeters
    post: EventPost
    grammars: GrammarCheck | None = None
    caches: bool = False  # whether the pool keeps what requests leave for later ones

    def blocks_of(self, request: Request, compatibility: str) -> tuple[bytes, ...]:
        """The names of its prompt's full pages, the same on every pool of this `compatibility`
        digest; none where the request declines the cache, or there is none."""
        if not self.caches or not request.uses_cache:
            return ()
        return block_names(
            request.prompt_token_ids,
            self.plan.geometry.page_size,
            salt=request.cache_salt,
            compatibility=compatibility,
        )


class RequestHandler(Protocol):
    """A request's stay on a pool, from its place in the scheduler to its end."""

    async def run(self) -> None:
        """To its end. Raises BatonError for what ended the request before its time."""
        ...

    def end(self) -> None:
        """Close what is open and give the memory back once nothing can touch it. Event loop's
        thread; never waits."""
        ...


def read_request(parts: RequestParts, message: types_pb2.EngineRequest, *, role: str) -> Request:
    """Raises UnavailableError where the pool does not serve, InvalidRequestError naming every field
    that it could not serve."""
    rebind(request_id=message.request_id)
    if not parts.leader.serving:
        raise UnavailableError(f"the {role} pool does not serve: {parts.leader.reason}")
    request = request_from_proto(
        message,
        vocab_size=parts.plan.description.facts.vocab_size,
        max_context_tokens=parts.plan.size.context_tokens,
    )
    note(request_id=request.request_id, prompt_tokens=len(request.prompt_token_ids))
    return request


async def serve(
    parts: RequestParts, request: Request, begin: Callable[[], Awaitable[RequestHandler]]
) -> None:
    """One request, whose stay `begin` takes a place for, to its end. Raises as `check_grammar`,
    `begin` and `RequestHandler.run` do."""
    await check_grammar(request, parts.grammars)
    handler = await begin()
    try:
        await handler.run()
    finally:
        handler.end()

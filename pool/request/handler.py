"""Lifecycle of a request on a pool, the same for both roles.

`read_request` validates the request before any work. `EventPost` delivers engine events to its
inbox (`pool.request.streams`). `serve` runs it. `MemoryReclaimer` releases its memory afterwards.
"""

import asyncio
import ctypes
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from engine.core.request import Request
from pool.pipeline.grammars import GrammarCheck
from pool.pipeline.leader import Leader
from pool.pipeline.reclaimer import MemoryReclaimer
from pool.prefix.cache import PrefixCache
from pool.pulls.puller import Puller
from pool.request.adapters import PoolAdapters
from pool.request.conversion import check_grammar, request_from_proto
from pool.request.role_switch import RoleSwitch
from pool.stage.metrics import LeaderMeters
from pool.stage.plan import StagePlan
from pool.tiers.block_store import Tier
from pool.tiers.block_tier import BlockTier
from protos import types_pb2
from runtime.digests import block_names
from runtime.errors import UnavailableError
from runtime.observe.log import rebind
from runtime.observe.tracing import note

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT")

PULLED = "pulled"  # from another worker
# Nothing is nearer than the own host, and no tier beyond it is nearer than a worker.
NEAREST = (Tier.HOST, PULLED, Tier.DISK, Tier.SERVER)
PACE_S = 0.006  # seconds between two polls for events that can wait
# Seconds after which the engine thread yields its core; more often the kernel does so itself.
LET_IN_S = 0.004


class EventPost:
    """Delivery of engine events to the event loop, in batches.

    A call from another thread wakes the loop and costs more than the event itself: half as much as
    a step of a small model. So after a delivery, the loop polls again by its own timer as long as
    it finds events. Events that can wait are left to that poll.

    If both threads share a core, the loop's thread waits until the engine's has used up its time
    slice, 3 ms on Linux. So the engine's thread yields the core, but not after each of many short
    steps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Appended by the engine thread, taken by the loop.
        self._events: deque[tuple[Callable[..., object], object]] = deque()
        self._is_urgent = False
        # Set if the loop has been called or will poll; written by both threads.
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._let_in_s = 0.0

    def put(
        self, receive: Callable[[EventT], object], event: EventT, *, can_wait: bool = False
    ) -> None:
        """Queue `receive(event)` for the event loop's thread, in order.

        Called on the engine thread. The event is delivered after `flush`, or up to PACE_S later if
        it `can_wait`.
        """
        self._events.append((receive, event))
        self._is_urgent = self._is_urgent or not can_wait

    def flush(self) -> None:
        """Deliver queued events; called on the engine thread before each wait and forward."""
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
            except Exception as error:  # noqa: BLE001 - the other events must be delivered
                self._loop.call_exception_handler(
                    {"message": "an engine event was not handled", "exception": error}
                )
        if self._timer is None:
            self._timer = self._loop.call_later(PACE_S, self._look_again)

    def _look_again(self) -> None:
        """Deliver events left meanwhile. Without any, the engine thread must call the loop."""
        self._timer, self._is_due = None, False
        if self._events:
            self._is_due = True
            self._deliver()


def _give_way() -> None:
    """Yield the core to other threads, also of this process.

    Unlike `os.sched_yield`, this call through ctypes releases Python's lock.
    """
    _LIBRARY.sched_yield()


_LIBRARY = ctypes.CDLL(None)  # the C library


@dataclass(frozen=True)
class Brought:
    """The first tokens of a prompt that a pool had in memory, or copied for it.

    Those up to `num_held` were in memory. After them, one place after another had those up to the
    end that `reached` gives for it. They are on `data_rank`, on any if it is None.
    """

    num_held: int = 0
    reached: Mapping[str, int] = field(default_factory=dict)
    data_rank: int | None = None

    def counts(self, num_cached: int) -> dict[str, int]:
        """Return how many of the first `num_cached` tokens came from each place.

        The keys are fields of the messages, like `disk_tokens`.
        """
        start = min(num_cached, self.num_held)
        counts = {}
        for place, reached in self.reached.items():
            end = min(num_cached, max(start, reached))
            counts[f"{place}_tokens"] = end - start
            start = end
        return counts


async def bring_from(
    places: Mapping[str, Callable[[], Awaitable[int]]],
    cache: PrefixCache,
    blocks: Sequence[bytes],
    page_size: int,
    data_rank: int = 0,
) -> Brought:
    """Have places bring the blocks of a prompt into a cache, the nearest first.

    Each returns up to which of the blocks it has brought them, 0 if it has brought none.
    """
    num_held = cache.num_resumable(blocks)
    reached = {name: await places[name]() for name in NEAREST if name in places}
    return Brought(
        page_size * num_held,
        {name: page_size * end for name, end in reached.items()},
        data_rank if any(reached.values()) else None,
    )


class RankChoice(Protocol):
    """The `pool.request.entry.DataRanks` of either role."""

    def preferred(self, request: Request, blocks: Sequence[bytes], expected: Sequence[int]) -> int:
        """Return the data rank that would admit a request, on the engine thread.

        `expected` are the tokens that each is going to have queued besides.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RequestParts:
    """The components that a request on a pool of either role uses."""

    leader: Leader
    plan: StagePlan
    reclaimer: MemoryReclaimer
    meters: LeaderMeters
    post: EventPost
    switch: RoleSwitch
    adapters: PoolAdapters
    ranks: RankChoice
    # By data rank; none if the pool has no prefix cache to copy blocks into.
    tiers: Sequence[Sequence[BlockTier]] = ()
    pullers: Sequence[Puller] = ()
    grammars: GrammarCheck | None = None
    caches: bool = False  # whether the pool has a prefix cache

    def blocks_of(self, request: Request, compatibility: str) -> tuple[bytes, ...]:
        """Return the names of the prompt's full pages for this `compatibility` digest.

        They are the same on every pool with that digest. Empty if the request declines the cache or
        the pool has none.
        """
        if not self.caches or not request.uses_cache:
            return ()
        return block_names(
            request.prompt_token_ids,
            self.plan.geometry.page_size,
            salt=request.cache_salt,
            adapter=request.adapter,
            compatibility=compatibility,
        )

    async def bring(
        self, request: Request, blocks: tuple[bytes, ...], holder: types_pb2.BlockHolder
    ) -> Brought:
        """Bring into the cache what the tiers, and the holder if one is named, have of a prompt.

        Raises:
            UnavailableError: the pool lost a stage meanwhile.
        """
        may_pull = bool(self.pullers and holder.address)
        if not may_pull and not any(self.tiers):
            return Brought()
        async with self._data_rank_for(request, blocks) as data_rank:
            places: dict[str, Callable[[], Awaitable[int]]] = {
                tier.tier: partial(tier.bring, request, blocks) for tier in self.tiers[data_rank]
            }
            puller = self.pullers[data_rank]
            if may_pull:
                places[PULLED] = partial(puller.bring, request, blocks, holder)
            brought = await bring_from(
                places, puller.cache, blocks, self.plan.geometry.page_size, data_rank
            )
        self.check(request)
        return brought

    @asynccontextmanager
    async def _data_rank_for(
        self, request: Request, blocks: Sequence[bytes]
    ) -> AsyncGenerator[int, None]:
        """Choose the data rank that copies blocks for a request; count its tokens there meanwhile."""
        pullers = self.pullers
        if len(pullers) < 2:
            yield 0
            return
        num_tokens, loop = len(request.prompt_token_ids), self.leader.loop
        page_size = self.plan.geometry.page_size

        def choose() -> int:
            expected = [
                puller.num_expected - page_size * sum(tier.num_more(blocks) for tier in tiers)
                for puller, tiers in zip(pullers, self.tiers, strict=True)
            ]
            data_rank = self.ranks.preferred(request, blocks, expected)
            pullers[data_rank].num_expected += num_tokens
            return data_rank

        def forget(data_rank: int) -> None:
            pullers[data_rank].num_expected -= num_tokens

        chosen = await loop.submit(choose, undo=forget)
        try:
            yield chosen
        finally:
            loop.post(lambda: forget(chosen))

    def check(self, request: Request) -> None:
        """Check that the stages can run a request that has waited before it was queued.

        The pool may have lost a stage since, or may have formed again with other adapters.

        Raises:
            UnavailableError: they cannot.
        """
        if not self.leader.serving:
            raise UnavailableError(f"the pool does not serve: {self.leader.reason}")
        if request.adapter:
            self.adapters.check_loaded(request.adapter)


class RequestHandler(Protocol):
    """A request on a pool, from its place in the scheduler to its end."""

    async def run(self) -> None:
        """Run the request to its end.

        Raises:
            BatonError: the reason that ended the request early.
        """
        ...

    def end(self) -> None:
        """Close open resources and release the memory once nothing can access it.

        Called on the event loop's thread; never waits.
        """
        ...


def read_request(parts: RequestParts, message: types_pb2.EngineRequest, *, role: str) -> Request:
    """Validate a request message and return the request.

    Raises:
        UnavailableError: the pool does not serve, or not this role, or not this adapter.
        InvalidRequestError: every field that the pool cannot serve.
    """
    rebind(request_id=message.request_id)
    if not parts.leader.serving:
        raise UnavailableError(f"the {role} pool does not serve: {parts.leader.reason}")
    parts.switch.check(role)
    request = request_from_proto(
        message,
        vocab_size=parts.plan.description.facts.vocab_size,
        max_context_tokens=parts.plan.size.context_tokens,
    )
    if request.adapter:
        parts.adapters.check(request.adapter)
    note(request_id=request.request_id, prompt_tokens=len(request.prompt_token_ids))
    return request


async def serve(
    parts: RequestParts, request: Request, begin: Callable[[], Awaitable[RequestHandler]]
) -> None:
    """Run one request to its end, after `begin` has taken a place in the scheduler for it.

    Raises:
        BatonError: as `check_grammar`, `PoolAdapters.leased`, `RequestParts.check`, `begin` and
            `RequestHandler.run` do.
    """
    await check_grammar(request, parts.grammars)
    async with parts.adapters.leased(request.adapter) if request.adapter else nullcontext():
        parts.check(request)
        handler = await begin()
        try:
            await handler.run()
        finally:
            handler.end()

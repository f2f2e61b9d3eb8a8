"""Sources of cached blocks for a simulated prefill worker: its own tiers, and other workers.

When a prompt reads from them is decided by the production code (`pool.prefix.block_reads`). A tier
reads one block after the other, and is written at once. A pull goes over the network interfaces.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry

from engine.core.request import Request
from engine.memory.leases import Lease
from pool.prefix.block_reads import BlockRead, BlockReads
from pool.prefix.cache import PrefixCache, Stored
from pool.prefix.journal import PointJournal
from pool.pulls.puller import LEAST_WAIT_S, OFFER_S
from pool.request.handler import PULLED, Brought, bring_from
from pool.tiers.block_store import Content, Tier
from pool.tiers.copies import ReportedCopies, TierCopies
from runtime.errors import UnavailableError
from runtime.observe.metrics.caches import TierMetrics
from sim.costs import Costs, TierCosts
from sim.links import Interface, Sending
from sim.network import Server

T = TypeVar("T")

_LENDER, _PULLS = "loans", "pulls"


@dataclass(frozen=True)
class DirectCalls:
    """The calls of an engine whose thread is the event loop's. Implements `EngineCalls`.

    `launch` looks for work after each of them, because it may have released memory.
    """

    launch: Callable[[], None]

    async def submit(
        self, call: Callable[[], T], *, undo: Callable[[T], object] = lambda result: None
    ) -> T:
        result = call()
        self.launch()
        return result

    def post(self, command: Callable[[], object]) -> None:
        command()
        self.launch()


class LendingWorker(Protocol):
    """A prefill worker that lends blocks."""

    interface: Interface
    server: Server

    @property
    def cache(self) -> PrefixCache: ...

    def launch(self) -> None:
        """Look for work, because memory may have been released."""
        ...


Lenders = Mapping[str, LendingWorker]
"""The prefill workers of a fleet by address."""


class SimulatedTier:
    """The blocks in one tier, by name. Implements `BlockSource`.

    States take no room: `num_pages` bounds the blocks.
    """

    def __init__(self, costs: TierCosts) -> None:
        self._costs = costs
        self._copies = ReportedCopies().of_tier()
        self._blocks = OrderedDict[bytes, bool]()  # whether with its state; the latest used last
        self._is_read = asyncio.Lock()  # one block after the other

    def begin(self, copies: TierCopies) -> None:
        """Belong to a new process, whose `copies` then have what is there."""
        self._copies = copies
        copies.found([name for name in self._blocks if self._is_point(name)])

    def store(self, stored: Stored) -> None:
        """Store what has entered the prefix cache. The first blocks are the last to go."""
        if stored.has_state or stored.last in self._blocks:
            self._put(stored.last, has_state=stored.has_state)
        for name in reversed(stored.names):
            self._put(name, has_state=False)
        while len(self._blocks) > self._costs.num_pages:
            oldest, _ = self._blocks.popitem(last=False)
            self._copies.removed(oldest, self._copies.content)

    @property
    def num_pages(self) -> int:
        """Return for how many blocks there is room."""
        return self._costs.num_pages

    def num_known(self, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, are there, with a state after them
        if the model has states.
        """
        count = next((at for at, name in enumerate(names) if name not in self._blocks), len(names))
        while count and not self._is_point(names[count - 1]):
            count -= 1
        return count

    async def read(self, names: Sequence[bytes]) -> int:
        """Return how many of these blocks were there, after the time to read them."""
        async with self._is_read:
            await asyncio.sleep(len(names) * self._costs.page_s)
        count = self.num_known(names)
        for name in reversed(names[:count]):
            self._blocks.move_to_end(name)
        return count

    @asynccontextmanager
    async def offer(
        self, names: Sequence[bytes], num_cached: int
    ) -> AsyncGenerator["_TierRead", None]:
        yield _TierRead(self, self.num_known(names[num_cached:]))

    def _is_point(self, name: bytes) -> bool:
        """Return whether prompts can resume after a block that is there."""
        return self._blocks[name] or self._copies.content is Content.PAGE

    def _put(self, name: bytes, *, has_state: bool) -> None:
        self._blocks[name] = has_state or self._blocks.get(name, False)
        self._blocks.move_to_end(name)
        content = Content.STATE if has_state else Content.PAGE
        self._copies.stored(name, content)


@dataclass(frozen=True)
class _TierRead:
    """Blocks in a tier. Implements `BlockOffer`."""

    tier: SimulatedTier
    num_blocks: int

    async def fill(self, read: BlockRead) -> int:
        return await self.tier.read(read.missing)


@dataclass(frozen=True)
class _LendingPool:
    """A worker that lends blocks to another. Implements `BlockSource`."""

    holder: LendingWorker
    borrower: Interface
    costs: Costs
    arrived: Callable[[float], object]  # gets the number of bytes

    @asynccontextmanager
    async def offer(self, names: Sequence[bytes], num_cached: int) -> AsyncGenerator["_Pull", None]:
        await asyncio.sleep(2 * self.costs.network.latency_s)
        if self.holder.server.is_cut:
            await asyncio.sleep(OFFER_S)
        if self.holder.server.is_cut or not self.holder.server.is_up:
            raise UnavailableError("the holder is away")
        cache = self.holder.cache
        assert cache.rule is not None
        num_tokens = cache.num_in_place(names) * cache.rule.block_tokens + 1
        found = cache.find(names, num_tokens)
        leases: list[Lease] = [cache.pages.alloc(0, owner=_LENDER, shared=found.page_ids)]
        if found.slot_id is not None:
            leases.append(cache.slots.share(found.slot_id, owner=_LENDER))
        try:
            yield _Pull(self, cache, max(0, len(found.page_ids) - num_cached))
        finally:
            for lease in leases:
                lease.end()
            self.holder.launch()


@dataclass(frozen=True)
class _Pull:
    """Blocks that a worker lends. Implements `BlockOffer`."""

    place: _LendingPool
    cache: PrefixCache
    num_blocks: int

    async def fill(self, read: BlockRead) -> int:
        place = self.place
        num_tokens = len(read.missing) * place.costs.model.page_size
        num_bytes = place.costs.handoff_bytes(num_tokens)
        is_over = asyncio.Event()
        sending = Sending(place.holder.interface, place.borrower, num_bytes, is_over.set)
        try:
            sending.release(num_bytes)
            await is_over.wait()
        finally:
            sending.cancel()  # no effect once it has arrived
        place.arrived(num_bytes)
        if place.holder.cache is not self.cache:
            raise UnavailableError("the holder was lost meanwhile")
        return len(read.missing)


@dataclass(eq=False)
class BlockSources:
    """All sources of blocks of one worker, from its start to its end.

    Attributes:
        tiers: its own, some of which may have blocks already.
        lenders: the workers of the fleet by address.
        likely_s: as in `BlockReads`.
        launch: looks for work of the worker.
        arrived: is called with the bytes of each pull.
    """

    cache: PrefixCache
    costs: Costs
    tiers: Mapping[Tier, SimulatedTier]
    lenders: Lenders
    interface: Interface
    likely_s: Callable[[int], float]
    launch: Callable[[], None]
    arrived: Callable[[float], object]
    _tier_reads: dict[Tier, BlockReads] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reported = ReportedCopies(has_states=self.cache.has_states)
        metrics = TierMetrics.create(CollectorRegistry())

        def reads(owner: str) -> BlockReads:
            return BlockReads(
                self.cache,
                DirectCalls(self.launch),
                owner,
                partial(metrics.blocks.labels, owner),
                metrics.read_s.labels(owner),
                self.likely_s,
            )

        for kind, tier in self.tiers.items():
            tier.begin(self._reported.of_tier())
            self._tier_reads[kind] = reads(kind.owner)
            self.cache.listeners.append(tier.store)
        self._pulls = reads(_PULLS)
        self.cache.holders |= {_LENDER}

    @property
    def copies(self) -> PointJournal:
        """Return the journal of what the tiers have."""
        return self._reported.journal

    @property
    def pull_cost(self) -> float:
        return self._pulls.cost

    @property
    def copy_cost(self) -> float:
        return max((reads.cost for reads in self._tier_reads.values()), default=0.0)

    def may_bring(self, holder: str) -> bool:
        """Return whether there is a tier or a holder with this address."""
        return bool(self.tiers) or holder in self.lenders

    async def bring(self, request: Request, blocks: tuple[bytes, ...], holder: str) -> Brought:
        """Bring into the cache what the tiers and the holder have of a prompt."""
        names = self.cache.names_to_resume(blocks, request)
        places: dict[str, Callable[[], Awaitable[int]]] = {}
        if names:
            for kind, tier in self.tiers.items():
                places[kind] = partial(self._tier_reads[kind].bring, names, tier)
            if holder in self.lenders:
                places[PULLED] = partial(self._pull, names, self.lenders[holder])
        return await bring_from(places, self.cache, blocks, self.costs.model.page_size)

    async def _pull(self, names: tuple[bytes, ...], holder: LendingWorker) -> int:
        num_missing = len(names) - self.cache.num_resumable(names)
        wait_s = max(LEAST_WAIT_S, self._pulls.computing_s(num_missing))
        source = _LendingPool(holder, self.interface, self.costs, self.arrived)
        try:
            async with asyncio.timeout(wait_s):
                return await self._pulls.bring(names, source, wait_s=wait_s)
        except TimeoutError:
            return 0

"""What the schedulers of both roles know about a request, whatever they do with it, what they keep
for the next, and which of a pool's data ranks it lives on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from engine.core.request import Request
from engine.memory.leases import PageAllocator, PageLease, SlotAllocator, SlotLease
from pool.prefix.journal import PointJournal
from pool.prefix.tree import Changed, Found, PrefixTree, ResumeRule
from pool.stage.metrics import PoolOccupancy, SchedulerLoad
from runtime.clock import Clock
from runtime.errors import BatonError, CapacityError
from runtime.observe.metrics import CacheMetrics

EventT = TypeVar("EventT")


@dataclass(frozen=True)
class Failed:
    """The engine runs the request no more; its owner releases it."""

    error: BatonError


@dataclass
class Entry(Generic[EventT]):
    """One request of a scheduler, from `submit` to `release`. Belongs to the engine thread.
    `blocks` are its pages' names in the cache, as far as they are full; none where it takes no
    part."""

    key: int
    request: Request
    emit: Callable[[EventT], object]
    pages: PageLease | None = None  # None while it waits
    slot: SlotLease | None = None
    in_flight: int = 0  # batches it takes part in
    ends_at_s: float = math.inf  # its deadline, in the clock's seconds
    released: bool = False
    has_failed: bool = (
        False  # its owner knows and will release it: what it computed is worth nothing
    )
    blocks: tuple[bytes, ...] = ()
    _computed: int = field(default=0, init=False)

    @property
    def owner(self) -> str:
        """In the ledgers of pages and slots."""
        return f"request {self.key}"

    @property
    def computed(self) -> int:
        """Tokens of the request whose cache entries exist or are in flight: batches keep their
        order, so what was launched is there for whatever is launched later. Nodes of a tree do not
        count."""
        return self._computed

    def advance(self, end: int) -> None:
        """The request's first `end` tokens count as computed. The only writer of `computed`."""
        self._computed = end

    def lease(
        self,
        pages: PageAllocator,
        slots: SlotAllocator,
        num_pages: int,
        *,
        shared: Sequence[int] = (),
    ) -> None:
        """Take a slot and pages, `num_pages` in all, of which the `shared` first ones are in a
        cache. Raises CapacityError, and then holds neither."""
        try:
            self.pages = pages.alloc(
                0, owner=self.owner, shared=shared
            )  # first, lest they be evicted for the others
            self.slot = slots.alloc(owner=self.owner)
            self.pages.extend(num_pages - len(shared))
        except CapacityError:
            self.free()
            raise

    def free(self) -> None:
        """Give slot and pages back, and with them what was computed."""
        for lease in (self.pages, self.slot):
            if lease is not None:
                lease.end()
        self.pages = self.slot = None
        self.advance(0)


@dataclass
class PrefixCache:
    """What a pool keeps of requests for later ones that begin alike: the tree knows which tokens a
    kept page or state is of, the ledgers who holds it. Without a `rule` nothing is kept."""

    rule: ResumeRule | None
    pages: PageAllocator
    slots: SlotAllocator
    clock: Clock
    metrics: CacheMetrics = field(default_factory=lambda: CacheMetrics.create(CollectorRegistry()))
    journal: PointJournal = field(default_factory=PointJournal)  # of the tree; data ranks share one
    _shown_size: tuple[int, int] = (
        0,
        0,
    )  # pages and snapshots, in the metrics, which they share, too

    def __post_init__(self) -> None:
        if self.rule is not None:
            self.pages.ledger.serve(self._evict_pages)
            self.slots.ledger.serve(self._evict_snapshots)

    def find(self, blocks: Sequence[bytes], num_tokens: int) -> Found:
        """What there is of `num_tokens` tokens with these blocks."""
        return Found() if self.rule is None else self._tree.find(blocks, num_tokens)

    def resume(self, blocks: Sequence[bytes], found: Found) -> None:
        """A request has leased what was found."""
        if self.rule is not None:
            self._tree.resumed(blocks, found.num_tokens)

    def insert(
        self, blocks: Sequence[bytes], page_ids: Sequence[int], slot_id: int | None = None
    ) -> None:
        """The entries of these blocks are final, in the first of `page_ids`, and so is the state in
        the slot."""
        if self.rule is None:
            return
        taken = self._tree.insert(blocks, page_ids[: len(blocks)], slot_id)
        self.pages.ledger.keep(taken.page_ids)
        self.slots.ledger.keep(taken.slot_ids)
        self._show_size()

    def clear(self) -> int:
        """Give up everything; what is under lease stays with its holders. Returns the number of
        pages."""
        if self.rule is None:
            return 0
        given = self._tree.clear()
        self.pages.ledger.let_go(given.page_ids)
        self.slots.ledger.let_go(given.slot_ids)
        self._gave_up(given, "flush")
        return len(given.page_ids)

    @cached_property
    def _tree(self) -> PrefixTree:
        assert self.rule is not None
        return PrefixTree(
            self.rule,
            self.clock,
            is_page_held=self.pages.ledger.is_leased,
            is_slot_held=self.slots.ledger.is_leased,
            journal=self.journal,
        )

    def _evict_pages(self, count: int) -> Sequence[int]:
        """For a lease that finds too few pages free."""
        given = self._tree.evict_pages(count)
        self.slots.ledger.let_go(given.slot_ids)
        self._gave_up(given, "pressure")
        return given.page_ids

    def _evict_snapshots(self, count: int) -> Sequence[int]:
        """For a lease that finds too few slots free."""
        given = self._tree.evict_snapshots(count)
        self.pages.ledger.let_go(given.page_ids)
        self._gave_up(given, "pressure")
        return given.slot_ids

    def _gave_up(self, given: Changed, cause: str) -> None:
        self.metrics.evicted.labels(cause).inc(len(given.page_ids))
        self._show_size()

    def _show_size(self) -> None:
        size = self._tree.num_pages, len(self.slots.ledger.kept_ids())
        for gauge, now, shown in zip(
            (self.metrics.pages, self.metrics.snapshots), size, self._shown_size, strict=True
        ):
            gauge.inc(now - shown)
        self._shown_size = size


class RankScheduler(Protocol):
    """The scheduler of one data rank, as its pool sees it."""

    @property
    def cache(self) -> PrefixCache: ...

    def holds(self, key: int) -> bool:
        """Whether the request of this key is its own."""
        ...

    def load(self) -> SchedulerLoad: ...

    def occupancy(self) -> PoolOccupancy: ...


SchedulerT = TypeVar("SchedulerT", bound=RankScheduler)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class DataRanks(Generic[SchedulerT]):
    """The schedulers of a pool, one of each data rank. A request lives on one of them, with all its
    memory. Belongs to the engine thread."""

    schedulers: tuple[SchedulerT, ...]

    def place(
        self, request: Request, blocks: Sequence[bytes], admit: Callable[[SchedulerT], ResultT]
    ) -> ResultT:
        """`admit` the request where it has to wait least and most room is left, or where there is
        any. `blocks`: the names of its prompt's full pages; what a rank has of them need not be
        computed or sent there.

        Raises what `admit` does on the first choice, where no other had room either.
        """

        def worth(scheduler: SchedulerT) -> tuple[int, int, int]:
            load, found = (
                scheduler.load(),
                scheduler.cache.find(blocks, len(request.prompt_token_ids)),
            )
            return (
                load.queued_tokens - found.num_tokens,
                -load.pages_free,
                load.queued_requests + load.running_requests,
            )

        if len(self.schedulers) == 1:
            return admit(self.schedulers[0])
        refusal: CapacityError | None = None
        for scheduler in sorted(self.schedulers, key=worth):
            try:
                return admit(scheduler)
            except CapacityError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def of(self, key: int) -> SchedulerT:
        """Whose request that is; of a request that is over, any."""
        return next(
            (scheduler for scheduler in self.schedulers if scheduler.holds(key)), self.schedulers[0]
        )

    def load(self) -> SchedulerLoad:
        """Of all together."""
        every = tuple(scheduler.load() for scheduler in self.schedulers)
        if len(every) == 1:
            return every[0]
        return SchedulerLoad(
            sum(each.queued_requests for each in every),
            sum(each.running_requests for each in every),
            sum(each.pages_free for each in every),
            sum(each.slots_free for each in every),
            sum(each.queued_tokens for each in every),
            every,
            max(each.local_rest_tokens for each in every),
        )

    def occupancy(self) -> PoolOccupancy:
        """Of all together; of what waits the oldest."""
        every = [scheduler.occupancy() for scheduler in self.schedulers]
        if len(every) == 1:
            return every[0]
        leases = {state: sum(each.leases[state] for each in every) for state in every[0].leases}
        return PoolOccupancy(
            leases, sum(each.num_pages_held for each in every), max(each.oldest_s for each in every)
        )

    def flush(self) -> int:
        """Empty the prefix caches; returns the number of pages given up."""
        return sum(scheduler.cache.clear() for scheduler in self.schedulers)

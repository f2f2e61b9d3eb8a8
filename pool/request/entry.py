"""The role-independent scheduling state of a request, the prefix cache, and the choice of a data
rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from engine.core.batch import ForwardBatch
from engine.core.request import Request
from engine.memory.leases import PageAllocator, PageLease, SlotAllocator, SlotLease
from pool.prefix.journal import PointJournal
from pool.prefix.tree import Changed, Found, PrefixTree, ResumeRule
from pool.stage.metrics import PoolOccupancy, SchedulerLoad
from runtime.clock import NO_DEADLINE, Clock, Deadline
from runtime.errors import BatonError, CapacityError
from runtime.observe.metrics import CacheMetrics

EventT = TypeVar("EventT")


@dataclass(frozen=True)
class Failed:
    """The event that the engine runs the request no more. Its owner releases it."""

    error: BatonError


@dataclass
class Entry(Generic[EventT]):
    """One request of a scheduler, from `submit` to `release`. Belongs to the engine thread.

    `blocks` are the cache names of its full pages, empty if it does not use the cache.
    """

    key: int
    request: Request
    emit: Callable[[EventT], object]
    pages: PageLease | None = None  # None while it waits
    slot: SlotLease | None = None
    in_flight: int = 0  # batches that contain it
    deadline: Deadline = NO_DEADLINE  # by the clock of its scheduler
    released: bool = False
    # Set when its owner is notified and will release it; its computed tokens are not valid.
    has_failed: bool = False
    blocks: tuple[bytes, ...] = ()
    _computed: int = field(default=0, init=False)

    @property
    def owner(self) -> str:
        """Return its name in the ledgers of pages and slots."""
        return f"request {self.key}"

    @property
    def computed(self) -> int:
        """Return how many tokens have cache entries, written or in flight. Tree nodes do not count.

        Batches keep their order, so entries in flight exist for every batch launched later.
        """
        return self._computed

    def advance(self, end: int) -> None:
        """Set `computed` to `end`; the only way to change it."""
        self._computed = end

    def lease(
        self,
        pages: PageAllocator,
        slots: SlotAllocator,
        num_pages: int,
        *,
        shared: Sequence[int] = (),
    ) -> None:
        """Take a slot and `num_pages` pages, of which the first are the cached pages `shared`.

        Raises:
            CapacityError: memory is short; then neither is held.
        """
        try:
            # Shared first, so that they are not evicted to make room for the others.
            self.pages = pages.alloc(0, owner=self.owner, shared=shared)
            self.slot = slots.alloc(owner=self.owner)
            self.pages.extend(num_pages - len(shared))
        except CapacityError:
            self.free()
            raise

    def free(self) -> None:
        """Release slot and pages, and with them the computed tokens."""
        for lease in (self.pages, self.slot):
            if lease is not None:
                lease.end()
        self.pages = self.slot = None
        self.advance(0)


@dataclass
class PrefixCache:
    """Pages and states kept for later requests with the same prefix.

    The tree knows the tokens of a kept page or state, and the ledgers know its holders. Without a
    `rule` nothing is kept.
    """

    rule: ResumeRule | None
    pages: PageAllocator
    slots: SlotAllocator
    clock: Clock
    metrics: CacheMetrics = field(default_factory=lambda: CacheMetrics.create(CollectorRegistry()))
    # Journal of the tree, shared by the data ranks.
    journal: PointJournal = field(default_factory=PointJournal)
    # Pages and snapshots already counted in the metrics, which the data ranks share.
    _shown_size: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.rule is not None:
            self.pages.ledger.serve(self._evict_pages)
            self.slots.ledger.serve(self._evict_snapshots)

    def find(self, blocks: Sequence[bytes], num_tokens: int) -> Found:
        """Return the cached part of a prompt of `num_tokens` tokens with these blocks."""
        return Found() if self.rule is None else self._tree.find(blocks, num_tokens)

    def resume(self, blocks: Sequence[bytes], found: Found) -> None:
        """Note that a request has leased what was found."""
        if self.rule is not None:
            self._tree.resumed(blocks, found.num_tokens)

    def insert(
        self, blocks: Sequence[bytes], page_ids: Sequence[int], slot_id: int | None = None
    ) -> None:
        """Cache the final entries of blocks, in the first `page_ids`, and the state in the slot."""
        if self.rule is None:
            return
        taken = self._tree.insert(blocks, page_ids[: len(blocks)], slot_id)
        self.pages.ledger.keep(taken.page_ids)
        self.slots.ledger.keep(taken.slot_ids)
        self._show_size()

    def clear(self) -> int:
        """Evict everything; return the number of pages. Leased memory stays with its holders."""
        if self.rule is None:
            return 0
        given = self._tree.clear()
        self.pages.ledger.release(given.page_ids)
        self.slots.ledger.release(given.slot_ids)
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
        """Evict pages for a lease that finds too few free."""
        given = self._tree.evict_pages(count)
        self.slots.ledger.release(given.slot_ids)
        self._gave_up(given, "pressure")
        return given.page_ids

    def _evict_snapshots(self, count: int) -> Sequence[int]:
        """Evict snapshots for a lease that finds too few slots free."""
        given = self._tree.evict_snapshots(count)
        self.pages.ledger.release(given.page_ids)
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


EntryT = TypeVar("EntryT", bound=Entry[Any])


class EntryOwner(ABC, Generic[EntryT]):
    """The part of a scheduler that ends its requests, the same for both roles.

    Belongs to the engine thread.
    """

    _entries: dict[int, EntryT]  # by key

    @property
    @abstractmethod
    def cache(self) -> PrefixCache: ...

    @abstractmethod
    def _unschedule(self, entry: EntryT) -> None:
        """Prepare no further step of an entry."""

    def _release_in_flight(self, entry: EntryT) -> None:
        """Prepare no further step of an entry that is forgotten when its steps are over."""
        self._unschedule(entry)

    @abstractmethod
    def _forget(self, entry: EntryT) -> None:
        """Release an entry's memory, which nothing writes any more, and drop it."""

    def holds(self, key: int) -> bool:
        return key in self._entries

    def release(self, key: int) -> None:
        """Release the request's memory once no batch in flight uses it. Idempotent."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.released = True
        if entry.in_flight:
            self._release_in_flight(entry)
        else:
            self._forget(entry)

    def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
        self.cache.clear()  # a replaced stage comes with empty memory
        for entry in list(self._entries.values()):
            entry.in_flight = 0
            if entry.released:
                self._forget(entry)
            else:
                self._fail(entry, error)

    def _fail(self, entry: EntryT, error: BatonError) -> None:
        """Notify the owner of the failure, and schedule no more of the request.

        The owner releases it once nothing writes its memory any more, since bytes may still be
        landing.
        """
        entry.has_failed = True
        self._unschedule(entry)
        entry.emit(Failed(error))


class RankScheduler(Protocol):
    """The part of a data rank's scheduler that its pool uses."""

    @property
    def cache(self) -> PrefixCache: ...

    def holds(self, key: int) -> bool:
        """Return whether this scheduler has the request of this key."""
        ...

    def load(self) -> SchedulerLoad: ...

    def occupancy(self) -> PoolOccupancy: ...


SchedulerT = TypeVar("SchedulerT", bound=RankScheduler)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class DataRanks(Generic[SchedulerT]):
    """The schedulers of a pool, one per data rank. Belongs to the engine thread.

    A request is placed on one of them with all its memory.
    """

    schedulers: tuple[SchedulerT, ...]

    def place(
        self, request: Request, blocks: Sequence[bytes], admit: Callable[[SchedulerT], ResultT]
    ) -> ResultT:
        """Admit the request on the least loaded data rank with room; return `admit`'s result.

        Ranks are ordered by queued tokens less cached tokens, then by free pages, then by requests.
        `blocks` are the names of its prompt's full pages; cached ones need not be computed or sent.

        Raises:
            CapacityError: no rank had room; the error is that of the first choice.
        """

        def worth(scheduler: SchedulerT) -> tuple[int, int, int]:
            load = scheduler.load()
            found = scheduler.cache.find(blocks, len(request.prompt_token_ids))
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
        """Return the scheduler that has this request, or any if the request is over."""
        return next(
            (scheduler for scheduler in self.schedulers if scheduler.holds(key)), self.schedulers[0]
        )

    def load(self) -> SchedulerLoad:
        """Return the summed load of all data ranks."""
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
        """Return the summed occupancy of all data ranks, with the greatest of their ages."""
        every = [scheduler.occupancy() for scheduler in self.schedulers]
        if len(every) == 1:
            return every[0]
        leases = {state: sum(each.leases[state] for each in every) for state in every[0].leases}
        return PoolOccupancy(
            leases, sum(each.num_pages_held for each in every), max(each.oldest_s for each in every)
        )

    def flush(self) -> int:
        """Empty the prefix caches; return the number of evicted pages."""
        return sum(scheduler.cache.clear() for scheduler in self.schedulers)

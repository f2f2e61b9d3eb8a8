"""What the schedulers of both roles know about a request, whatever they do with it, and what they keep for the next."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry

from engine.core.request import Request
from engine.memory.leases import PageAllocator, PageLease, SlotAllocator, SlotLease
from pool.prefix.journal import PointJournal
from pool.prefix.tree import Changed, Found, PrefixTree, ResumeRule
from runtime.clock import Clock
from runtime.errors import BatonError, CapacityError
from runtime.metrics import CacheMetrics

EventT = TypeVar("EventT")


@dataclass(frozen=True)
class Failed:
    """The engine runs the request no more; its owner releases it."""

    error: BatonError


@dataclass
class Entry(Generic[EventT]):
    """One request of a scheduler, from `submit` to `release`. Belongs to the engine thread. `blocks` are its pages'
    names in the cache, as far as they are full; none where it takes no part."""

    key: int
    request: Request
    emit: Callable[[EventT], object]
    pages: PageLease | None = None  # None while it waits
    slot: SlotLease | None = None
    in_flight: int = 0  # batches it takes part in
    ends_at_s: float = math.inf  # its deadline, in the clock's seconds
    released: bool = False
    has_failed: bool = False  # its owner knows and will release it: what it computed is worth nothing
    blocks: tuple[bytes, ...] = ()
    _computed: int = field(default=0, init=False)

    @property
    def owner(self) -> str:
        """In the ledgers of pages and slots."""
        return f"request {self.key}"

    @property
    def computed(self) -> int:
        """Tokens of the request whose cache entries exist or are in flight: batches keep their order, so what was
        launched is there for whatever is launched later. Nodes of a tree do not count."""
        return self._computed

    def advance(self, end: int) -> None:
        """The request's first `end` tokens count as computed. The only writer of `computed`."""
        self._computed = end

    def lease(self, pages: PageAllocator, slots: SlotAllocator, num_pages: int, *, shared: Sequence[int] = ()) -> None:
        """Take a slot and pages, `num_pages` in all, of which the `shared` first ones are in a cache. Raises
        CapacityError, and then holds neither."""
        try:
            self.pages = pages.alloc(0, owner=self.owner, shared=shared)  # first, lest they be evicted for the others
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
    """What a pool keeps of requests for later ones that begin alike: the tree knows which tokens a kept page or state
    is of, the ledgers who holds it. Without a `rule` nothing is kept."""

    rule: ResumeRule | None
    pages: PageAllocator
    slots: SlotAllocator
    clock: Clock
    metrics: CacheMetrics = field(default_factory=lambda: CacheMetrics.create(CollectorRegistry()))

    def __post_init__(self) -> None:
        if self.rule is not None:
            self.pages.ledger.serve(self._evict_pages)
            self.slots.ledger.serve(self._evict_snapshots)

    @cached_property
    def journal(self) -> PointJournal:
        """Of the tree; an empty one where nothing is kept."""
        return PointJournal() if self.rule is None else self._tree.journal

    def find(self, blocks: Sequence[bytes], num_tokens: int) -> Found:
        """What there is of `num_tokens` tokens with these blocks."""
        return Found() if self.rule is None else self._tree.find(blocks, num_tokens)

    def resume(self, blocks: Sequence[bytes], found: Found) -> None:
        """A request has leased what was found."""
        if self.rule is not None:
            self._tree.resumed(blocks, found.num_tokens)

    def insert(self, blocks: Sequence[bytes], page_ids: Sequence[int], slot_id: int | None = None) -> None:
        """The entries of these blocks are final, in the first of `page_ids`, and so is the state in the slot."""
        if self.rule is None:
            return
        taken = self._tree.insert(blocks, page_ids[:len(blocks)], slot_id)
        self.pages.ledger.keep(taken.page_ids)
        self.slots.ledger.keep(taken.slot_ids)
        self._show_size()

    def clear(self) -> int:
        """Give up everything; what is under lease stays with its holders. Returns the number of pages."""
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
        return PrefixTree(self.rule, self.clock, is_page_held=self.pages.ledger.is_leased,
                          is_slot_held=self.slots.ledger.is_leased)

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
        self.metrics.pages.set(self._tree.num_pages)
        self.metrics.snapshots.set(len(self.slots.ledger.kept_ids()))

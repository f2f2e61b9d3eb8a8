"""The prefix cache of a scheduler: the tree of names, and the ledgers of pages and slots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from prometheus_client import CollectorRegistry

from engine.core.request import CacheSession, Request
from engine.memory.leases import PageAllocator, SlotAllocator
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from pool.prefix.tree import Changed, Found, PrefixTree
from runtime.clock import Clock
from runtime.observe.metrics.caches import CacheMetrics


@dataclass(frozen=True)
class Stored:
    """The blocks and the state that have entered a cache together.

    Attributes:
        names: of the new blocks.
        start: the number of blocks before them.
        last: the name of the last block, new or not.
        has_state: whether the state after it is new.
        source: where they were copied from; empty if they were computed.
    """

    names: tuple[bytes, ...]
    start: int
    last: bytes
    has_state: bool
    source: str = ""


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
    # Called when anything has entered it.
    listeners: list[Callable[[Stored], object]] = field(default_factory=list)
    # Owners of leases that are not those of requests.
    holders: frozenset[str] = frozenset()
    epoch: int = 0  # number of times that everything was evicted
    # What is already counted in the metrics, which the data ranks share.
    _shown_size: tuple[int, ...] = (0, 0, 0, 0)

    def __post_init__(self) -> None:
        if self.rule is not None:
            self.pages.ledger.serve(self._evict_pages)
            self.slots.ledger.serve(self._evict_snapshots)

    @property
    def has_states(self) -> bool:
        """Return whether pages are kept only with the recurrent state after them."""
        return self.rule is not None and self.rule.has_states

    def find(self, blocks: Sequence[bytes], num_tokens: int) -> Found:
        """Return the cached part of a prompt of `num_tokens` tokens with these blocks."""
        return Found() if self.rule is None else self._tree.find(blocks, num_tokens)

    def num_resumable(self, blocks: Sequence[bytes]) -> int:
        """Return how many of the blocks a prompt need not compute; a hint, for any thread."""
        return 0 if self.rule is None else self._tree.num_resumable(blocks)

    def num_in_place(self, names: Sequence[bytes]) -> int:
        """Return how many of the first names, which need not be a prompt's, are those of blocks that
        are cached at these depths.
        """
        return 0 if self.rule is None else self._tree.num_in_place(names)

    def pages_of(self, names: Sequence[bytes], start: int) -> tuple[int, ...]:
        """Return the pages of the first of these names that are of blocks cached at their depths.

        The first one is after `start` blocks.
        """
        return () if self.rule is None else tuple(self._tree.pages_of(names, start))

    def slot_of(self, name: bytes) -> int | None:
        """Return the slot of the state after this block, if it is cached."""
        return None if self.rule is None else self._tree.slot_of(name)

    def names_to_resume(self, blocks: tuple[bytes, ...], request: Request) -> tuple[bytes, ...]:
        """Return the blocks that a prompt need not compute if they are cached.

        None if the logprobs of the prompt are wanted, because those need every token.
        """
        if not blocks or self.rule is None or request.num_prompt_logprobs is not None:
            return ()
        return blocks[: self.rule.last_point(len(request.prompt_token_ids))]

    def resume(
        self, blocks: Sequence[bytes], found: Found, session: CacheSession | None = None
    ) -> None:
        """Note that a request, of a session or of none, has leased what was found."""
        if self.rule is not None:
            self._tree.resumed(blocks, found.num_tokens, session)

    def insert(
        self,
        blocks: Sequence[bytes],
        page_ids: Sequence[int],
        slot_id: int | None = None,
        *,
        session: CacheSession | None = None,
        source: str = "",
    ) -> None:
        """Cache the final entries of blocks, in the first `page_ids`, and the state in the slot.

        The session, if there is one, resumes after the last block. The `listeners` learn what is
        new, and its `source`.
        """
        if self.rule is None:
            return
        taken = self._tree.insert(blocks, page_ids[: len(blocks)], slot_id, session)
        self.pages.ledger.keep(taken.page_ids)
        self.slots.ledger.keep(taken.slot_ids)
        self._show_size()
        if self.listeners and (taken.page_ids or taken.slot_ids):
            first = len(blocks) - len(taken.page_ids)
            stored = Stored(tuple(blocks[first:]), first, blocks[-1], bool(taken.slot_ids), source)
            for listener in self.listeners:
                listener(stored)

    def clear(self) -> int:
        """Evict everything; return the number of pages. Leased memory stays with its holders."""
        if self.rule is None:
            return 0
        self.epoch += 1
        given = self._tree.clear()
        self.pages.ledger.release(given.page_ids)
        self.slots.ledger.release(given.slot_ids)
        self._gave_up(given, "flush")
        return len(given.page_ids)

    @property
    def num_sessions(self) -> int:
        """Return the number of sessions of which the cache has a point."""
        return 0 if self.rule is None else len(self._tree.retained.sessions)

    @property
    def num_retained(self) -> int:
        """Return the number of pages that it keeps longer for sessions."""
        return 0 if self.rule is None else self._tree.retained.num_retained

    def idle_pages(self) -> list[tuple[float, int]]:
        """Return what `PrefixTree.idle_pages` does."""
        return [] if self.rule is None else self._tree.idle_pages()

    @cached_property
    def _tree(self) -> PrefixTree:
        assert self.rule is not None
        return PrefixTree(
            self.rule,
            self.clock,
            is_page_held=self.pages.ledger.is_leased,
            is_slot_held=self.slots.ledger.is_leased,
            journal=self.journal,
            num_pages=self.pages.num_total,
            num_slots=self.slots.num_total,
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
        size = (
            self._tree.num_pages,
            len(self.slots.ledger.kept_ids()),
            self.num_sessions,
            self.num_retained,
        )
        metrics = self.metrics
        gauges = metrics.pages, metrics.snapshots, metrics.sessions, metrics.retained
        for gauge, now, shown in zip(gauges, size, self._shown_size, strict=True):
            if now != shown:
                gauge.inc(now - shown)
        self._shown_size = size

"""Prompts that this pool has read, kept page by page for those that begin alike, and who is reading what now.

Only what stage 0 has the result of is kept: full pages, of which every batch succeeded. The tree knows which tokens a
kept page is of, the ledger who holds it. Belongs to the engine thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from prometheus_client import CollectorRegistry

from engine.memory.leases import PageAllocator
from pool.prefix.journal import PointJournal
from pool.prefix.tree import Found, PrefixTree
from prefill.entry import PrefillEntry
from runtime.metrics import CacheMetrics


@dataclass
class PromptCache:
    """Without a `tree` nothing is kept."""

    tree: PrefixTree | None
    pages: PageAllocator
    page_size: int
    metrics: CacheMetrics = field(default_factory=lambda: CacheMetrics.create(CollectorRegistry()))
    _coming: dict[bytes, PrefillEntry] = field(default_factory=dict)  # block, and who computes it

    def __post_init__(self) -> None:
        self.pages.ledger.serve(self._evict)

    @cached_property
    def journal(self) -> PointJournal:
        """Of the tree; an empty one where nothing is kept."""
        return PointJournal() if self.tree is None else self.tree.journal

    def is_coming(self, entry: PrefillEntry) -> bool:
        """Whether a prompt that is no less urgent computes some of this one right now."""
        if entry.awaited not in self._coming:
            entry.awaited = next((block for block in entry.wanted_blocks if block in self._coming), b"")
        writer = self._coming.get(entry.awaited)
        return writer is not None and writer.request.priority <= entry.request.priority

    def find(self, entry: PrefillEntry) -> Found:
        """What there is of a prompt."""
        if self.tree is None:
            return Found()
        return self.tree.find(entry.wanted_blocks, len(entry.request.prompt_token_ids))

    def begin(self, entry: PrefillEntry, found: Found) -> None:
        """A prompt has leased what was found of it, and computes the rest."""
        if self.tree is None or not entry.blocks:
            return
        self.tree.resumed(entry.blocks, found.num_tokens)
        self.metrics.queried.inc(len(entry.request.prompt_token_ids))
        self.metrics.matched.inc(found.num_tokens)
        self.metrics.reused.inc(found.num_tokens)
        for block in entry.blocks[len(found.page_ids):]:
            self._coming.setdefault(block, entry)

    def keep(self, entry: PrefillEntry, page_ids: Sequence[int], num_tokens: int) -> None:
        """So many tokens of the prompt, and no fewer than before, are computed."""
        count = min(num_tokens // self.page_size, len(entry.blocks))
        if self.tree is None or not count:
            return
        self.pages.ledger.keep(self.tree.insert(entry.blocks[:count], page_ids[:count]).page_ids)
        self.metrics.pages.set(self.tree.num_pages)
        for block in entry.blocks[:count]:
            self._coming.pop(block, None)

    def end(self, entry: PrefillEntry) -> None:
        """It computes no more: who waits for it has to do so."""
        for block in entry.blocks:
            if self._coming.get(block) is entry:
                del self._coming[block]

    def clear(self) -> int:
        """Give up everything; what is under lease stays with its holders. Returns the number of pages."""
        if self.tree is None:
            return 0
        given = self.tree.clear().page_ids
        self.pages.ledger.let_go(given)
        self._gave_up(given, "flush")
        return len(given)

    def _evict(self, count: int) -> Sequence[int]:
        """For a lease that finds too few pages free."""
        given = [] if self.tree is None else self.tree.evict_pages(count).page_ids
        self._gave_up(given, "pressure")
        return given

    def _gave_up(self, page_ids: Sequence[int], cause: str) -> None:
        self.metrics.evicted.labels(cause).inc(len(page_ids))
        self.metrics.pages.set(0 if self.tree is None else self.tree.num_pages)

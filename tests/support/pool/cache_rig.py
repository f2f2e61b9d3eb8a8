"""A scheduler with a prefix cache over a memory that remembers tokens, and random histories of
it."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry

from decode.scheduler import DecodeScheduler
from engine.core.batch import ForwardBatch
from engine.memory.integrity import read_books
from engine.pipeline.results import StepFailed
from prefill.scheduler import PrefillScheduler
from runtime.observe.metrics.caches import CacheMetrics
from tests.support.pool.token_memory import TokenMemory
from worker.scheduler import AggregatedScheduler

SchedulerT = TypeVar("SchedulerT", PrefillScheduler, DecodeScheduler, AggregatedScheduler)


class CacheRig(Generic[SchedulerT]):
    """`memory` has the tokens whose entries each page holds: a batch reads and writes there as a
    model does, and what it reads must be its own request's."""

    def __init__(self, scheduler: SchedulerT, page_size: int) -> None:
        self.scheduler: SchedulerT = scheduler
        self.registry = CollectorRegistry()
        scheduler.cache.metrics = CacheMetrics.create(self.registry)
        self.memory = TokenMemory(page_size)

    def count(self, name: str, **labels: str) -> float:
        """Return a counter of the cache."""
        return self.registry.get_sample_value(f"baton_cache_{name}_total", labels) or 0

    def tokens_of(self, key: int) -> Sequence[int]:
        """Return the tokens that a request must have in its pages."""
        raise NotImplementedError

    def on_row(self, key: int, context: int, count: int, *, samples: bool) -> None:
        """Handle a computed row."""

    def answer(self, batch: ForwardBatch, error: StepFailed | None = None) -> None:
        """Give the scheduler the result of a batch."""
        raise NotImplementedError

    def end(self) -> None:
        """Release every remaining request."""
        raise NotImplementedError

    @property
    def kept(self) -> set[int]:
        """Return the pages of the cache."""
        return self.scheduler.pages.ledger.kept_ids()

    def launch(self) -> ForwardBatch | None:
        """Launch and run the next batch: read the entries before its tokens and write theirs."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        for row, (key, context, count) in enumerate(
            zip(batch.request_keys, batch.context_lens, batch.query_lens, strict=True)
        ):
            pages, tokens = batch.page_tables[row].tolist(), self.tokens_of(key)
            self.memory.read(pages, tokens[:context])
            self.memory.write(pages, context, tokens[context : context + count], kept=self.kept)
            self.on_row(key, context, count, samples=batch.sampling[row] is not None)
        return batch

    def spoil(self, batch: ForwardBatch) -> None:
        """Invalidate everything the batch wrote."""
        for row, (context, count) in enumerate(
            zip(batch.context_lens, batch.query_lens, strict=True)
        ):
            self.memory.spoil(batch.page_tables[row].tolist(), context, context + count)

    def check(self) -> None:
        """Check that every page is free, cached or leased, and that every lease has an owner."""
        for ledger in (self.scheduler.pages.ledger, self.scheduler.slots.ledger):
            books = read_books(ledger)
            assert not books.faults, str(books)
            assert books.num_free + books.num_cached + books.num_leased == books.num_total
        self.scheduler.on_idle()


class CacheMachine(RuleBasedStateMachine):
    """Events of any scheduler: batches are launched, `depth` at a time, and fail; the cache is
    flushed. The initial rule sets `rig`."""

    rig: CacheRig[Any]
    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: list[ForwardBatch] = []

    @rule()
    def launch(self) -> None:
        if len(self.in_flight) < self.depth and (batch := self.rig.launch()) is not None:
            self.in_flight.append(batch)

    @rule(fails=st.sampled_from((False, False, False, True)))
    def answer(self, *, fails: bool) -> None:
        if self.in_flight:
            self.rig.answer(self.in_flight.pop(0), StepFailed("no") if fails else None)

    @rule()
    def flush(self) -> None:
        self.rig.scheduler.cache.clear()

    @invariant()
    def holds(self) -> None:
        self.rig.check()

    def teardown(self) -> None:
        for batch in self.in_flight:
            self.rig.answer(batch)
        self.rig.end()
        self.rig.check()
        for pool in (self.rig.scheduler.pages, self.rig.scheduler.slots):
            assert pool.num_available == pool.num_total

"""Prompt scheduling: chunks packed over requests, by priority, share of the client, and arrival.

    queued ─▶ started (memory leased) ─▶ chunks in flight ─▶ first token sampled ─▶ held for the
    handoff ─▶ released

A prompt longer than a chunk would delay all others of its priority until its end. So one in
`SHORT_SHARE` tokens goes to prompts that are short compared with it, wherever they are in the
queue. Chunks end on the model's grid in any order, so the order changes no bit of the results.

A request's memory is leased when it starts, not while it is queued. It is held until `release`,
because the sender reads it. Cached pages of its prompt are leased with it and not computed again.
If another prompt is computing pages that this one can reuse, this one waits for them. A prompt that
cannot finish by its deadline, even at the best recent rate, fails before its next chunk. Belongs to
the engine thread.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import NO_TREE, TokenTree, Verified
from engine.core.request import Request, SampledToken
from engine.core.rows import BuildBatch, Row, build_batch, chunk_end
from engine.memory.integrity import check_integrity
from engine.memory.leases import PageAllocator, SlotAllocator, pages_for_tokens
from engine.pipeline.results import StepResult
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import EntryOwner, EntryTable
from pool.request.entry_state import FAILED_STATES, RELEASED_STATES, EntryStep
from pool.stage.metrics import PoolOccupancy, SchedulerLoad
from prefill.chunks import chunk_of, chunk_row
from prefill.fair_order import FairOrder
from prefill.prompts import (
    FirstToken,
    PrefillEmitter,
    PrefillEntry,
    PrefillLimits,
    PromptCache,
    PromptMemory,
    Scored,
    Started,
)
from runtime.clock import NO_DEADLINE, Clock, Deadline
from runtime.errors import CapacityError, DeadlineError, FieldViolation, InvalidRequestError
from runtime.pace import PrefillRateEstimate

SHORT_SHARE = 4  # one token in four goes to prompts that are short next to a long one ...
SHORT_RATIO = 4  # ... which has at least four times as many tokens left
NOT_VERIFIED = Verified()


@dataclass
class PrefillScheduler(EntryOwner[PrefillEntry]):
    """Scheduler of one data rank of a prefill pool. Implements `engine.loop.Scheduler`."""

    pages: PageAllocator
    slots: SlotAllocator
    limits: PrefillLimits
    clock: Clock
    # Positions at which a prompt can resume from the cache; None disables the cache.
    cache_rule: ResumeRule | None = None
    build: BuildBatch = build_batch
    data_rank: int = 0
    # Request keys, shared by the data ranks of a pool.
    keys: Iterator[int] = field(default_factory=lambda: count(1))
    journal: PointJournal = field(default_factory=PointJournal)  # also shared
    # Returns the most tokens of the next chunk, given `limits.chunk_tokens`.
    budget_tokens: Callable[[int], int] = lambda most: most
    # Whether another prompt may take memory now.
    may_start: Callable[[], bool] = lambda: True
    _entries: EntryTable[PrefillEntry] = field(default_factory=EntryTable)
    _queue: list[tuple[int, float, int]] = field(default_factory=list)  # `turn`s, in order
    _order: FairOrder = field(default_factory=FairOrder)
    _running: list[PrefillEntry] = field(default_factory=list)  # started, prompt not finished
    _num_held: int = 0  # requests that hold memory: started and not released
    _saved: int = 0  # unused tokens of the share for short prompts, at most one chunk

    def __post_init__(self) -> None:
        self.best_pace = PrefillRateEstimate(self.clock)

    def submit(
        self,
        request: Request,
        emit: PrefillEmitter,
        *,
        blocks: tuple[bytes, ...] = (),
        deadline: Deadline = NO_DEADLINE,
    ) -> int:
        """Queue a request with a deadline; return the key that identifies it in batches.

        `blocks` are the names of its prompt's full pages (`runtime.digests`). Without them the
        request does not use the cache.

        Raises:
            CapacityError: the queue is full.
            InvalidRequestError: the prompt is longer than this pool could ever hold.
        """
        needed = pages_for_tokens(len(request.prompt_token_ids), self.limits.page_size)
        if needed > self.pages.num_total:
            raise InvalidRequestError(
                FieldViolation(
                    "prompt",
                    f"{len(request.prompt_token_ids)} tokens need {needed} pages, the prefill pool has "
                    f"{self.pages.num_total}",
                )
            )
        if len(self._queue) >= self.limits.max_queued:
            raise CapacityError(
                f"{len(self._queue)} prompts are queued, the limit is {self.limits.max_queued}",
                resource="prefill queue",
            )
        key = next(self.keys)
        entry = PrefillEntry(
            key, request, emit, blocks=blocks, deadline=deadline, arrived_s=self.clock.now()
        )
        self._entries.add(entry)
        self._order.enter(entry)
        insort(self._queue, entry.turn)
        return key

    def load(self) -> SchedulerLoad:
        tokens = sum(entry.remaining for entry in (*self._queued, *self._running))
        return SchedulerLoad(
            len(self._queue),
            self._num_held,
            self.pages.num_available,
            self.slots.num_available,
            queued_tokens=tokens,
        )

    def occupancy(self) -> PoolOccupancy:
        """Return how many requests hold memory, computing or in handoff, and the queue's age."""
        started = [entry for entry in self._entries if entry.pages is not None]
        handing = [entry for entry in started if not entry.remaining and not entry.in_flight]
        queued = [entry.arrived_s for entry in self._entries if entry.pages is None]
        return PoolOccupancy(
            {"computing": len(started) - len(handing), "handoff": len(handing)},
            sum(entry.pages.num_pages for entry in handing if entry.pages is not None),
            self.clock.now() - min(queued) if queued else 0.0,
        )

    def next_batch(self) -> ForwardBatch | None:
        self._drop_late()
        rows: list[Row] = []
        self._saved = min(
            self._saved + self.limits.chunk_tokens // SHORT_SHARE, self.limits.chunk_tokens
        )
        budget = self.budget_tokens(self.limits.chunk_tokens)
        budget -= self._add_short(rows, budget)
        taken = {row.key for row in rows}
        waiting = [entry for entry in self._running if entry.key not in taken]
        running = deque(sorted(waiting, key=lambda each: each.turn))
        may_start = self.may_start()
        while budget > 0:
            started = None
            if may_start and (not running or self._is_queued_before(running[0])):
                started = self._start_next(budget)
                may_start = started is not None
            if started is None and not running:
                break
            budget -= self._add_chunk(rows, started or running.popleft(), budget)
        return self.build(ForwardMode.PREFILL, rows) if rows else None

    def on_result(self, batch: ForwardBatch, result: StepResult) -> None:
        tokens = iter(result.tokens)
        scores = iter(result.scores)
        verified = iter(result.verified)
        for row, (key, sampling) in enumerate(zip(batch.request_keys, batch.sampling, strict=True)):
            entry = self._entries[key]
            entry.in_flight -= 1
            had_failed = entry.state in FAILED_STATES
            if result.error is not None:
                # Also for a released entry: nothing computed after the failure is cached.
                entry.step(EntryStep.FAIL)
            if result.error is None:
                self._keep(entry, batch.context_lens[row] + batch.query_lens[row])
            scored = next(scores, ()) if batch.scoring and batch.scoring[row] is not None else ()
            token, draft = None, NO_TREE
            if sampling is not None and result.error is None:
                token, draft = next(tokens), next(verified, NOT_VERIFIED).draft
            if entry.state in RELEASED_STATES:
                self.release(key)
                continue
            if had_failed:
                continue  # already failed; this batch read pages of a failed batch
            if result.error is not None:
                self._fail(entry, result.error)
            if scored:
                entry.emit(Scored(batch.context_lens[row] + 1, scored))
            if token is not None:
                self._on_first_token(entry, token, draft)

    def _on_first_token(self, entry: PrefillEntry, token: SampledToken, draft: TokenTree) -> None:
        if token.error is not None:
            self._fail(entry, token.error)
            return
        entry.draft, entry.has_first_token = draft, True
        prefill_s = self.clock.now() - entry.started_s
        num_computed = len(entry.request.prompt_token_ids) - entry.num_cached
        self.best_pace.observe(num_computed, prefill_s)
        entry.emit(FirstToken(token, prefill_s))

    @cached_property
    def cache(self) -> PromptCache:
        """Return the cache of computed prompts."""
        return PromptCache(
            self.cache_rule, self.pages, self.slots, self.clock, journal=self.journal
        )

    def on_idle(self) -> None:
        if not self._queue:
            self._order.forget()
        check_integrity(
            [self.pages.ledger, self.slots.ledger],
            live_owners=self._entries.owners | self.cache.holders,
        )

    def hand_over(self, key: int) -> PromptMemory:
        """End a computed prompt; return its memory, which the caller releases.

        Raises:
            HandoffError: the prompt failed, or its owner has given it up.
        """
        entry = self._entries[key]
        memory = entry.take_memory()
        self._num_held -= 1
        self.release(key)
        return memory

    def _add_short(self, rows: list[Row], budget: int) -> int:
        """Append chunks of short prompts, within their share; return the number of tokens.

        Appends nothing if the prompt that is next leaves room for others, or is itself short.
        """
        head = self._head()
        lead = min(
            self._running if head is None else [*self._running, head],
            key=lambda each: each.turn,
            default=None,
        )
        if lead is None or lead.remaining <= self.limits.chunk_tokens:
            return 0
        short = [
            entry
            for entry in (*self._running, *self._queued)
            if entry.request.priority == lead.request.priority
            and entry.remaining * SHORT_RATIO <= lead.remaining
        ]
        share = min(self._saved, budget) // self.limits.grid * self.limits.grid
        taken = 0
        may_start = share > 0 and self.may_start()
        for entry in sorted(short, key=lambda each: (each.remaining, each.key)):
            if entry.pages is None:
                if not may_start or self.cache.is_coming(entry):
                    continue
                # If this one does not fit, longer ones do not either.
                may_start = self._start_early(entry, share - taken)
            taken += self._add_chunk(rows, entry, share - taken)
        # The long prompt's chunk becomes shorter by this number of tokens.
        self._saved -= -(-taken // self.limits.grid) * self.limits.grid
        return taken

    def _drop_late(self) -> None:
        now_s = self.clock.now()  # once for all entries, of the clock that deadlines are by
        for entry in (*self._running, *self._queued):
            if now_s + self.best_pace.least_s(entry.remaining) <= entry.deadline.at_s:
                continue
            if now_s + self.best_pace.least_s(self.cache.least_tokens(entry)) > entry.deadline.at_s:
                self._fail(
                    entry,
                    DeadlineError(
                        f"{entry.remaining} tokens of the prompt cannot be computed within the "
                        f"{entry.deadline.remaining_s():.2g} s that its deadline leaves"
                    ),
                )

    @property
    def _queued(self) -> Iterator[PrefillEntry]:
        """Return the queued requests in order."""
        return (self._entries[key] for _, _, key in self._queue)

    def _head(self) -> PrefillEntry | None:
        """Return the first queued request that waits for no block of another prompt."""
        return next((entry for entry in self._queued if not self.cache.is_coming(entry)), None)

    def _is_queued_before(self, entry: PrefillEntry) -> bool:
        head = self._head()
        return head is not None and head.turn < entry.turn

    def _start_next(self, budget: int) -> PrefillEntry | None:
        """Lease memory for the next queued request.

        Return None when no request is queued, its memory does not fit yet, or `budget` tokens allow
        it no chunk.
        """
        head = self._head()
        return head if head is not None and self._start(head, budget) else None

    def _start_early(self, entry: PrefillEntry, budget: int) -> bool:
        """Start a queued request before its turn; return whether it has started.

        The memory that the next request in order needs is left free.
        """
        head = self._head()
        if head is None or head is entry:
            return self._start(entry, budget)
        has_slot = self.slots.num_total == 0 or self.slots.num_available >= 2
        has_pages = self._num_pages(entry) + self._num_pages(head) <= self.pages.num_available
        return (
            has_slot
            and has_pages
            and self._num_held + 2 <= self.limits.max_running
            and self._start(entry, budget)
        )

    def _num_pages(self, entry: PrefillEntry) -> int:
        return pages_for_tokens(len(entry.request.prompt_token_ids), self.limits.page_size)

    def _start(self, entry: PrefillEntry, budget: int) -> bool:
        """Lease memory for a queued request; return whether it fits and `budget` allows a chunk.

        Decode reserves memory for a request that has started, so it must then make progress.
        """
        found = self.cache.found_of(entry)
        total = len(entry.request.prompt_token_ids)
        if (
            self._num_held >= self.limits.max_running
            or chunk_end(found.num_tokens, total, budget, self.limits.grid) == found.num_tokens
        ):
            return False
        if found.slot_id is not None:
            # Shared first, so that it is not evicted to make room for the rest.
            entry.resumed = self.slots.share(found.slot_id, owner=entry.owner)
        try:
            entry.lease(self.pages, self.slots, self._num_pages(entry), shared=found.page_ids)
        except CapacityError:
            return False
        self._num_held += 1
        self._queue.remove(entry.turn)
        self._order.begin(entry, found.num_tokens)
        self.cache.begin(entry, found)
        entry.advance(found.num_tokens)
        entry.started_s = self.clock.now()
        entry.step(EntryStep.RUN)
        self._running.append(entry)
        assert entry.pages is not None
        assert entry.slot is not None
        entry.emit(
            Started(
                tuple(entry.pages.page_ids),
                entry.slot.slot_id,
                entry.started_s - entry.arrived_s,
                found.num_tokens,
                self.data_rank,
            )
        )
        return True

    def _keep(self, entry: PrefillEntry, num_tokens: int) -> None:
        """Cache the first `num_tokens` of the prompt for other prompts.

        Caches nothing after a failed batch, because later tokens were computed from its pages.
        """
        if entry.pages is not None and entry.state not in FAILED_STATES:
            self.cache.keep(entry, entry.pages.page_ids, num_tokens)

    def _add_chunk(self, rows: list[Row], entry: PrefillEntry, budget: int) -> int:
        """Append the entry's next chunk if `budget` allows one; return the number of its tokens."""
        end = chunk_of(entry, self.limits, budget)
        if end == entry.computed or entry.pages is None:
            return 0
        # One slot stays reserved for each request that may still start.
        num_spare = self.slots.num_available - (self.limits.max_running - self._num_held)
        rows.append(chunk_row(entry, end, self.limits, self.cache, num_spare=num_spare))
        taken = end - entry.computed
        entry.advance(end)
        entry.in_flight += 1
        if entry.remaining == 0:
            entry.step(EntryStep.COMPUTE)
            self._running.remove(entry)
        return taken

    def _unschedule(self, entry: PrefillEntry) -> None:
        """Remove a queued or running entry. Its batches in flight complete by themselves."""
        if entry in self._running:
            self._running.remove(entry)
        if entry.turn in self._queue:
            self._queue.remove(entry.turn)
            self._order.leave(entry)
        self.cache.end(entry)

    def _on_forget(self, entry: PrefillEntry) -> None:
        self._num_held -= entry.pages is not None

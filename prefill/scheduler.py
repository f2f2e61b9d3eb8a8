"""Which prompt tokens run next: chunked, packed over requests, most urgent and then oldest first.

    queued ─▶ started (memory leased) ─▶ chunks in flight ─▶ first token drawn ─▶ held for the handoff ─▶ released

A prompt that is longer than a chunk would keep all others of its priority waiting until its end. So `SHORT_SHARE` of
the tokens are for prompts that are short beside it, wherever they stand in the queue. Chunks end on the model's grid
whatever the order is, so it changes no bit.

A request's memory is leased when it starts, not while it queues, and lives until `release`: the sender reads it. What
cannot be computed by its deadline any more, at the best pace of late, fails before anything more of it is. Belongs to
the engine thread.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecRow
from engine.core.request import DrawnToken, Request
from engine.core.rows import Row, build_batch, chunk_end, sampling_row, scoring_row
from engine.memory.integrity import check_integrity
from engine.memory.leases import PageAllocator, SlotAllocator, pages_for_tokens
from engine.pipeline.stages import StepResult
from engine.sampling.sampler import Scores
from pool.request.entry import Entry, Failed
from pool.stage.metrics import PoolOccupancy, SchedulerLoad
from runtime.clock import Clock
from runtime.errors import BatonError, CapacityError, DeadlineError, FieldViolation, InvalidRequestError
from runtime.pace import PrefillRateEstimate

# Scoring takes a row of logits per token: 80 MB for these at a vocabulary of 150,000.
SCORED_TOKENS = 128
SHORT_SHARE = 4  # one token in four goes to prompts that are short beside a long one ...
SHORT_RATIO = 4  # ... which has at least four times as many tokens left


@dataclass(frozen=True)
class Started:
    """The request's turn has come; this is the memory its prompt will fill."""

    page_ids: tuple[int, ...]
    slot_id: int
    queue_s: float


@dataclass(frozen=True)
class Scored:
    """What the model made of one chunk's tokens, the first of which stands at `first_position` of the prompt."""

    first_position: int
    tokens: Scores


@dataclass(frozen=True)
class FirstToken:
    token: DrawnToken
    prefill_s: float


Event = Started | Scored | FirstToken | Failed
Emit = Callable[[Event], object]


@dataclass
class PrefillEntry(Entry[Event]):
    """One prompt."""

    arrived_s: float = 0.0
    started_s: float = 0.0

    @property
    def remaining(self) -> int:
        return len(self.request.prompt_token_ids) - self.computed

    @property
    def turn(self) -> tuple[int, int]:
        """Less is sooner: keys grow with arrival."""
        return self.request.priority, self.key


@dataclass(frozen=True)
class PrefillLimits:
    """`chunk_tokens` bounds the tokens of one batch; `grid` is the model's (chunks end on its multiples). With
    `drafts` a draft on the last stage reads the prompts too."""

    page_size: int
    chunk_tokens: int
    grid: int
    max_running: int
    max_queued: int
    drafts: bool = False


@dataclass
class PrefillScheduler:
    """Implements `engine.loop.Scheduler`."""

    pages: PageAllocator
    slots: SlotAllocator
    limits: PrefillLimits
    clock: Clock
    _entries: dict[int, PrefillEntry] = field(default_factory=dict)
    _queue: list[tuple[int, int]] = field(default_factory=list)  # heap of (priority, key)
    _running: list[PrefillEntry] = field(default_factory=list)  # started, prompt not finished
    _next_key: int = 1
    _saved: int = 0  # tokens of the share for short prompts that none has taken yet, at most a chunk

    def __post_init__(self) -> None:
        self._best_pace = PrefillRateEstimate(self.clock)

    def submit(self, request: Request, emit: Emit, *, ends_at_s: float = math.inf) -> int:
        """Queue a request with a deadline; returns the key that names it in batches.

        Raises:
            CapacityError: the queue is full.
            InvalidRequestError: the prompt is longer than this pool could ever hold.
        """
        needed = pages_for_tokens(len(request.prompt_token_ids), self.limits.page_size)
        if needed > self.pages.num_total:
            raise InvalidRequestError(FieldViolation(
                "prompt", f"{len(request.prompt_token_ids)} tokens need {needed} pages, the prefill pool has "
                          f"{self.pages.num_total}"))
        if len(self._queue) >= self.limits.max_queued:
            raise CapacityError(f"{len(self._queue)} prompts are queued, the limit is {self.limits.max_queued}",
                                resource="prefill queue")
        key = self._next_key
        self._next_key += 1
        self._entries[key] = PrefillEntry(key, request, emit, ends_at_s=ends_at_s, arrived_s=self.clock.now())
        heapq.heappush(self._queue, (request.priority, key))
        return key

    def release(self, key: int) -> None:
        """The request is over and nothing reads its memory any more. Idempotent."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.released = True
        if entry.in_flight == 0:
            self._forget(entry)
        elif entry in self._running:
            self._running.remove(entry)

    def load(self) -> SchedulerLoad:
        queued = self._queued
        tokens = sum(entry.remaining for entry in [*queued, *self._running])
        return SchedulerLoad(len(queued), len(self._entries) - len(queued), self.pages.num_free, self.slots.num_free,
                             queued_tokens=tokens)

    def occupancy(self) -> PoolOccupancy:
        """Who holds memory, for computing a prompt or for its handoff, and how old the queue is."""
        started = [entry for entry in self._entries.values() if entry.pages is not None]
        handing = [entry for entry in started if not entry.remaining and not entry.in_flight]
        queued = [entry.arrived_s for entry in self._entries.values() if entry.pages is None]
        return PoolOccupancy({"computing": len(started) - len(handing), "handoff": len(handing)},
                             sum(entry.pages.num_pages for entry in handing if entry.pages is not None),
                             self.clock.now() - min(queued) if queued else 0.0)

    def next_batch(self) -> ForwardBatch | None:
        self._drop_late()
        rows: list[Row] = []
        self._saved = min(self._saved + self.limits.chunk_tokens // SHORT_SHARE, self.limits.chunk_tokens)
        budget = self.limits.chunk_tokens - self._add_short(rows)
        taken = {row.key for row in rows}
        waiting = [entry for entry in self._running if entry.key not in taken]
        running = deque(sorted(waiting, key=lambda each: each.turn))
        may_start = True
        while budget > 0:
            started = None
            if may_start and (not running or self._is_queued_before(running[0])):
                started = self._start_next(budget)
                may_start = started is not None
            if started is None and not running:
                break
            budget -= self._add_chunk(rows, started or running.popleft(), budget)
        return build_batch(ForwardMode.PREFILL, rows) if rows else None

    def on_result(self, batch: ForwardBatch, result: StepResult) -> None:
        drawn, scores = iter(result.tokens), iter(result.scores)
        for row, (key, sampling) in enumerate(zip(batch.request_keys, batch.sampling, strict=True)):
            entry = self._entries[key]
            entry.in_flight -= 1
            scored = next(scores, ()) if batch.scoring and batch.scoring[row] is not None else ()
            token = next(drawn) if sampling is not None and result.error is None else None
            if entry.released:
                if entry.in_flight == 0:
                    self._forget(entry)
                continue
            if result.error is not None:
                self._fail(entry, result.error)
            if scored:
                entry.emit(Scored(batch.context_lens[row] + 1, scored))
            if token is not None and token.error is not None:
                self._fail(entry, token.error)
            elif token is not None:
                prefill_s = self.clock.now() - entry.started_s
                self._best_pace.observe(len(entry.request.prompt_token_ids), prefill_s)
                entry.emit(FirstToken(token, prefill_s))

    def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
        for entry in list(self._entries.values()):
            entry.in_flight = 0
            if entry.released:
                self._forget(entry)
            else:
                self._fail(entry, error)

    def on_idle(self) -> None:
        check_integrity([self.pages.ledger, self.slots.ledger],
                        live_owners={entry.owner for entry in self._entries.values()})

    def _add_short(self, rows: list[Row]) -> int:
        """Append chunks of what is short beside the prompt whose turn it is, as far as their share goes; returns their
        tokens. Nothing when that prompt leaves room for others anyway, or is itself among the short ones."""
        head = self._head()
        lead = min(self._running if head is None else [*self._running, head], key=lambda each: each.turn, default=None)
        if lead is None or lead.remaining <= self.limits.chunk_tokens:
            return 0
        short = [entry for entry in [*self._running, *self._queued] if entry.request.priority == lead.request.priority
                 and entry.remaining * SHORT_RATIO <= lead.remaining]
        share, taken = self._saved // self.limits.grid * self.limits.grid, 0
        for entry in sorted(short, key=lambda each: (each.remaining, each.key)):
            if entry.pages is not None or self._start_early(entry, share - taken):
                taken += self._add_chunk(rows, entry, share - taken)
        self._saved -= -(-taken // self.limits.grid) * self.limits.grid  # what the long prompt's chunk ends earlier by
        return taken

    def _drop_late(self) -> None:
        now_s = self.clock.now()
        for entry in [*self._running, *self._queued]:
            if now_s + self._best_pace.least_s(entry.remaining) > entry.ends_at_s:
                self._fail(entry, DeadlineError(f"{entry.remaining} tokens of the prompt cannot be computed within the "
                                                f"{max(entry.ends_at_s - now_s, 0.0):.2g} s that its deadline leaves"))

    @property
    def _queued(self) -> list[PrefillEntry]:
        return [self._entries[key] for _, key in self._queue if key in self._entries]

    def _head(self) -> PrefillEntry | None:
        """The queued request whose turn it is."""
        while self._queue and self._queue[0][1] not in self._entries:
            heapq.heappop(self._queue)  # released while it waited
        return self._entries[self._queue[0][1]] if self._queue else None

    def _is_queued_before(self, entry: PrefillEntry) -> bool:
        head = self._head()
        return head is not None and head.turn < entry.turn

    def _start_next(self, budget: int) -> PrefillEntry | None:
        """Lease memory for the queued request whose turn it is; None when nothing waits, it does not fit yet, or
        `budget` tokens allow it no chunk."""
        head = self._head()
        return head if head is not None and self._start(head, budget) else None

    def _start_early(self, entry: PrefillEntry, budget: int) -> bool:
        """Whether a queued request has started, before its turn: only beside the one whose turn it is."""
        head = self._head()
        if head is None or head is entry:
            return self._start(entry, budget)
        has_slot = self.slots.num_total == 0 or self.slots.num_free >= 2
        has_pages = self._num_pages(entry) + self._num_pages(head) <= self.pages.num_free
        return has_slot and has_pages and self._num_held + 2 <= self.limits.max_running and self._start(entry, budget)

    @property
    def _num_held(self) -> int:
        """Requests that have started and are not released."""
        return len(self._entries) - len(self._queue)

    def _num_pages(self, entry: PrefillEntry) -> int:
        return pages_for_tokens(len(entry.request.prompt_token_ids), self.limits.page_size)

    def _start(self, entry: PrefillEntry, budget: int) -> bool:
        """Lease memory for a queued request. Not when there is none, nor when `budget` tokens allow it no chunk: decode
        reserves for what has started, so that must be running."""
        if self._num_held >= self.limits.max_running or chunk_end(0, entry.remaining, budget, self.limits.grid) == 0:
            return False
        try:
            entry.lease(self.pages, self.slots, self._num_pages(entry))
        except CapacityError:
            return False
        self._queue.remove(entry.turn)
        heapq.heapify(self._queue)
        entry.started_s = self.clock.now()
        self._running.append(entry)
        assert entry.pages is not None
        assert entry.slot is not None
        entry.emit(Started(tuple(entry.pages.page_ids), entry.slot.slot_id, entry.started_s - entry.arrived_s))
        return True

    def _add_chunk(self, rows: list[Row], entry: PrefillEntry, budget: int) -> int:
        """Append the entry's next chunk if `budget` tokens allow one; returns its tokens."""
        prompt = entry.request.prompt_token_ids
        if entry.request.num_prompt_logprobs is not None:
            budget = min(budget, max(SCORED_TOKENS // self.limits.grid, 1) * self.limits.grid)
        end = chunk_end(entry.computed, len(prompt), budget, self.limits.grid)
        if end == entry.computed or entry.pages is None or entry.slot is None:
            return 0
        sampling = sampling_row(entry.request, (), key=entry.key) if end == len(prompt) else None
        spec = None
        if self.limits.drafts:
            spec = SpecRow(next_token_id=prompt[end] if end < len(prompt) else None, num_draft_tokens=1)
        rows.append(Row(entry.key, prompt[entry.computed:end], entry.computed, entry.pages.page_ids,
                        entry.slot.slot_id, sampling, spec, scoring_row(entry.request, entry.computed, end)))
        taken = end - entry.computed
        entry.advance(end)
        entry.in_flight += 1
        if end == len(prompt):
            self._running.remove(entry)
        return taken

    def _fail(self, entry: PrefillEntry, error: BatonError) -> None:
        """Notify the owner, which releases it; run no more of it."""
        if entry in self._running:
            self._running.remove(entry)
        self._queue = [item for item in self._queue if item[1] != entry.key]
        heapq.heapify(self._queue)
        entry.emit(Failed(error))

    def _forget(self, entry: PrefillEntry) -> None:
        if entry in self._running:
            self._running.remove(entry)
        if entry.pages is None:
            self._queue = [item for item in self._queue if item[1] != entry.key]
            heapq.heapify(self._queue)
        entry.free()
        del self._entries[entry.key]

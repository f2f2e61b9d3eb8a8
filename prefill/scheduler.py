"""Which prompt tokens run next: chunked, packed over requests, oldest and most urgent first.

    queued ─▶ started (memory leased) ─▶ chunks in flight ─▶ first token drawn ─▶ held for the handoff ─▶ released

A request's memory is leased when it starts, not while it queues, and lives until `release`: the sender reads it.
Belongs to the engine thread.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecRow
from engine.core.request import DrawnToken, Request
from engine.core.rows import Row, build_batch, chunk_end, sampling_row, scoring_row
from engine.memory.integrity import check_integrity
from engine.memory.pages import PageAllocator, PageLease, pages_for_tokens
from engine.memory.slots import SlotAllocator, SlotLease
from engine.pipeline.stages import StepResult
from engine.sampling.scoring import Scores
from pool.stage.metrics import PoolOccupancy
from runtime.clock import Clock
from runtime.errors import BatonError, CapacityError, FieldViolation, InvalidRequestError

# Scoring takes a row of logits per token: 80 MB for these at a vocabulary of 150,000.
SCORED_TOKENS = 128


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


@dataclass(frozen=True)
class Failed:
    error: BatonError


Event = Started | Scored | FirstToken | Failed
Emit = Callable[[Event], object]


@dataclass
class _Entry:
    key: int
    request: Request
    emit: Emit
    arrived_s: float
    started_s: float = 0.0
    pages: PageLease | None = None
    slot: SlotLease | None = None
    launched: int = 0  # prompt tokens in batches launched so far
    in_flight: int = 0  # batches
    released: bool = False

    @property
    def remaining(self) -> int:
        return len(self.request.prompt_token_ids) - self.launched

    def free(self) -> None:
        for lease in (self.pages, self.slot):
            if lease is not None:
                lease.end()


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


@dataclass(frozen=True)
class PrefillLoad:
    queued_requests: int
    queued_tokens: int
    running_requests: int
    pages_free: int
    slots_free: int


@dataclass
class PrefillScheduler:
    """Implements `engine.loop.Scheduler`."""

    pages: PageAllocator
    slots: SlotAllocator
    limits: PrefillLimits
    clock: Clock
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _queue: list[tuple[int, int]] = field(default_factory=list)  # heap of (priority, key); keys grow with arrival
    _running: list[_Entry] = field(default_factory=list)  # started, prompt not finished, oldest first
    _next_key: int = 1

    def submit(self, request: Request, emit: Emit) -> int:
        """Queue a request; returns the key that names it in batches.

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
        self._entries[key] = _Entry(key, request, emit, self.clock.now())
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

    def load(self) -> PrefillLoad:
        queued = [self._entries[key] for _, key in self._queue if key in self._entries]
        tokens = sum(entry.remaining for entry in [*queued, *self._running])
        return PrefillLoad(len(queued), tokens, len(self._entries) - len(queued), self.pages.num_free,
                           self.slots.num_free)

    def occupancy(self) -> PoolOccupancy:
        """Who holds memory, for computing a prompt or for its handoff, and how old the queue is."""
        started = [entry for entry in self._entries.values() if entry.pages is not None]
        handing = [entry for entry in started if not entry.remaining and not entry.in_flight]
        queued = [entry.arrived_s for entry in self._entries.values() if entry.pages is None]
        return PoolOccupancy({"computing": len(started) - len(handing), "handoff": len(handing)},
                          sum(entry.pages.num_pages for entry in handing if entry.pages is not None),
                          self.clock.now() - min(queued) if queued else 0.0)

    def next_batch(self) -> ForwardBatch | None:
        rows: list[Row] = []
        budget = self.limits.chunk_tokens
        for entry in list(self._running):
            budget -= self._add_chunk(rows, entry, budget)
        while budget > 0 and (started := self._start_next(budget)) is not None:
            budget -= self._add_chunk(rows, started, budget)
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
                entry.emit(FirstToken(token, self.clock.now() - entry.started_s))

    def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
        for entry in list(self._entries.values()):
            entry.in_flight = 0
            if entry.released:
                self._forget(entry)
            else:
                self._fail(entry, error)

    def on_idle(self) -> None:
        check_integrity([self.pages.ledger, self.slots.ledger],
                        live_owners={_owner(entry.key) for entry in self._entries.values()})

    def _start_next(self, budget: int) -> _Entry | None:
        """Lease memory for the most urgent queued request; None when nothing waits, it does not fit yet, or `budget`
        tokens allow it no chunk: decode reserves for what has started, so that must be running."""
        while self._queue and self._queue[0][1] not in self._entries:
            heapq.heappop(self._queue)  # released while it waited
        held = len(self._entries) - len(self._queue)
        if not self._queue or held >= self.limits.max_running:
            return None
        entry = self._entries[self._queue[0][1]]
        if chunk_end(0, entry.remaining, budget, self.limits.grid) == 0:
            return None
        try:
            entry.slot = self.slots.alloc(owner=_owner(entry.key))
            needed = pages_for_tokens(len(entry.request.prompt_token_ids), self.limits.page_size)
            entry.pages = self.pages.alloc(needed, owner=_owner(entry.key))
        except CapacityError:
            entry.free()
            return None
        heapq.heappop(self._queue)
        entry.started_s = self.clock.now()
        self._running.append(entry)
        entry.emit(Started(tuple(entry.pages.page_ids), entry.slot.slot_id, entry.started_s - entry.arrived_s))
        return entry

    def _add_chunk(self, rows: list[Row], entry: _Entry, budget: int) -> int:
        """Append the entry's next chunk if `budget` tokens allow one; returns its tokens."""
        prompt = entry.request.prompt_token_ids
        if entry.request.num_prompt_logprobs is not None:
            budget = min(budget, max(SCORED_TOKENS // self.limits.grid, 1) * self.limits.grid)
        end = chunk_end(entry.launched, len(prompt), budget, self.limits.grid)
        if end == entry.launched or entry.pages is None or entry.slot is None:
            return 0
        sampling = sampling_row(entry.request, (), key=entry.key) if end == len(prompt) else None
        spec = None
        if self.limits.drafts:
            spec = SpecRow(next_token_id=prompt[end] if end < len(prompt) else None, num_draft_tokens=1)
        rows.append(Row(entry.key, prompt[entry.launched:end], entry.launched, entry.pages.page_ids,
                        entry.slot.slot_id, sampling, spec, scoring_row(entry.request, entry.launched, end)))
        taken, entry.launched = end - entry.launched, end
        entry.in_flight += 1
        if end == len(prompt):
            self._running.remove(entry)
        return taken

    def _fail(self, entry: _Entry, error: BatonError) -> None:
        """Tell the owner, who releases it; run no more of it."""
        if entry in self._running:
            self._running.remove(entry)
        self._queue = [item for item in self._queue if item[1] != entry.key]
        heapq.heapify(self._queue)
        entry.emit(Failed(error))

    def _forget(self, entry: _Entry) -> None:
        if entry in self._running:
            self._running.remove(entry)
        if entry.pages is None:
            self._queue = [item for item in self._queue if item[1] != entry.key]
            heapq.heapify(self._queue)
        entry.free()
        del self._entries[entry.key]


def _owner(key: int) -> str:
    return f"request {key}"

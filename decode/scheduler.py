"""Decode scheduling: continuous batching with one micro-batch in flight per stage.

    reserved (pages, slot; receives posted) ─▶ running ─▶ finished
                                                │   ▲
                              out of pages ─▶ waiting (memory released; replayed later)

Pages can run out while requests run. Then the least urgent, youngest request releases its memory
and waits. It resumes before any new request is admitted, and it is replayed without sampling. With
attention layers only, prompt and output are replayed in prefill chunks, because a token has the
same bits whether it is prefilled or decoded. GatedDeltaNet layers lack this property, so there only
the prompt is prefilled; the output takes the form of decoding, many tokens per step (`REPLAY`).
Either way the stream continues with the same bits, and preemption never ends it with an error.

A request that moves here from another pool joins with the tokens sampled there and is replayed in
the same way. A request past its deadline fails before its next step or its replay. Belongs to the
engine thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count, islice

from decode.entry import DecodeEmitter, DecodeEntry, DecodeLimits, Generated
from decode.local_prompts import ComputedPrompt, PromptReader
from decode.request_memory import RequestMemory, Reservation, occupancy_of
from decode.speculation import MAX_DRAFT_TOKENS, DraftLength, VerifiedListener
from decode.step_builder import StepBuilder
from decode.step_meter import StepMeter
from decode.turns import DecodeTurns
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import Verified
from engine.core.request import Request, SampledToken
from engine.memory.integrity import check_integrity
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepResult
from pool.prefix.cache import PrefixCache
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import EntryOwner, EntryTable
from pool.request.entry_state import FAILED_STATES, RELEASED_STATES, EntryState
from pool.stage.metrics import PoolOccupancy, SchedulerLoad
from runtime.clock import NO_DEADLINE, Clock, Deadline
from runtime.errors import CapacityError, DeadlineError

MAX_ENDED_KEYS = 1024  # per batch


@dataclass
class DecodeScheduler(EntryOwner[DecodeEntry]):
    """Scheduler of one data rank of a decode pool. Implements `engine.loop.Scheduler`."""

    pages: PageAllocator
    slots: SlotAllocator
    limits: DecodeLimits
    clock: Clock
    # Positions at which a request can resume from the cache; None disables the cache.
    cache_rule: ResumeRule | None = None
    scratch: SlotAllocator = field(default_factory=lambda: SlotAllocator(0, name="states of trees"))
    draft_length: DraftLength = lambda num_running: MAX_DRAFT_TOKENS
    on_verified: VerifiedListener = lambda step, num_running: None
    data_rank: int = 0
    # Request keys, shared by the data ranks of a pool.
    keys: Iterator[int] = field(default_factory=lambda: count(1))
    journal: PointJournal = field(default_factory=PointJournal)  # also shared
    on_preempted: Callable[[], None] = lambda: None
    prompts: PromptReader | None = None  # on a pool that also prefills, with the cache of both
    shared_cache: PrefixCache | None = None
    _entries: EntryTable[DecodeEntry] = field(default_factory=EntryTable)
    _ended: dict[int, None] = field(default_factory=dict)  # outputs that the last stage has to drop

    def reserve(
        self,
        request: Request,
        emit: DecodeEmitter,
        *,
        replayed: Sequence[int] = (),
        blocks: tuple[bytes, ...] = (),
        compatibility: str = "",
        deadline: Deadline = NO_DEADLINE,
    ) -> Reservation:
        """Reserve memory for the prompt and some growth, at once or not at all.

        `replayed` are output tokens after the first that another pool has already sampled. This
        pool computes them again, as after a preemption, and samples the next ones. `blocks` are the
        names of the prompt's full pages (`runtime.digests`) under the digest `compatibility`.
        Without a digest the request does not use the cache.

        Raises:
            CapacityError: no memory is free, or a preempted request waits for it first.
            InvalidRequestError: the request could never fit.
        """
        entry = DecodeEntry(
            0,
            request,
            emit,
            deadline=deadline,
            blocks=blocks,
            compatibility=compatibility,
            outputs=list(replayed),
        )
        self._admit(entry, self._memory.lease)
        return self._memory.reservation(entry)

    def read_rest(
        self,
        request: Request,
        emit: DecodeEmitter,
        *,
        blocks: tuple[bytes, ...],
        compatibility: str,
        deadline: Deadline = NO_DEADLINE,
    ) -> Reservation:
        """Generate without a handoff if the cache has nearly all of the prompt.

        A pool that also prefills takes every prompt, and reserves no memory for it yet. The
        arguments are those of `reserve`.

        Raises:
            CapacityError: as for `reserve`, or too many tokens of the prompt are missing.
            InvalidRequestError: the request could never fit.
        """
        if self.prompts is not None:
            self.check_room(request)
            return self.prompts.read(
                request, emit, blocks=blocks, compatibility=compatibility, deadline=deadline
            )
        entry = DecodeEntry(
            0, request, emit, deadline=deadline, blocks=blocks, compatibility=compatibility
        )
        self._admit(entry, partial(self._memory.lease_for_rest, most=self._longest_rest))
        self._run(entry)
        return self._memory.reservation(entry)

    def unshare(self, key: int) -> Reservation:
        """Replace shared pages so that a whole prompt can land; return the new reservation.

        Raises:
            CapacityError: too few pages are free.
        """
        entry = self._entries[key]
        assert entry.pages is not None
        entry.pages.unshare()
        return self._memory.reservation(entry)

    def join(self, key: int, first_token: int, *, with_draft: bool = False) -> None:
        """Run a request whose prompt has landed, with or without the draft model's state.

        It joins the running batch without a forward, or ends if the first token ended it. Ignored
        are keys released meanwhile and requests that have failed: a lost stage loses its landed
        pages.
        """
        entry = self._entries.get(key)
        if entry is None or entry.state is not EntryState.PENDING:
            return
        self._memory.keep_landed(entry, with_draft=with_draft)
        entry.outputs.insert(0, first_token)
        entry.advance(len(entry.request.prompt_token_ids))
        entry.draft.followed = with_draft
        # After a replay, drafting starts at its end.
        entry.draft.has_prompt_state = with_draft and len(entry.outputs) == 1
        self._run(entry)
        self._finish_if_done(entry)

    def adopt(self, prompt: ComputedPrompt) -> None:
        """Run a request in the memory in which this pool has computed its prompt."""
        entry = prompt.entry()
        self._entries.add(entry)
        self._run(entry)
        if not self._memory.hold_known(entry):
            self._turns.preempt(entry)
        self._append(entry, [] if prompt.first_token is None else [prompt.first_token])

    @property
    def has_preempted(self) -> bool:
        return bool(self._turns.waiting)

    @property
    def is_stepping(self) -> bool:
        """Return whether requests wait for their next token."""
        return len(self._turns) > 0

    def holds(self, key: int) -> bool:
        return super().holds(key) or (self.prompts is not None and self.prompts.holds(key))

    def release(self, key: int) -> None:
        """Release the request's memory once no batch in flight uses it. Idempotent."""
        super().release(key)
        if self.prompts is not None:
            self.prompts.release(key)

    def submit_local(self, request: Request, emit: DecodeEmitter) -> int:
        """Generate without a handoff and without the cache: this pool prefills the prompt.

        Used for warm-up, and as the reference for every topology.

        Raises:
            CapacityError: as for `reserve`.
            InvalidRequestError: the request could never fit.
        """
        entry = DecodeEntry(0, request, emit)
        self._admit(entry, self._memory.lease_to_read)
        self._run(entry)
        return entry.key

    def load(self) -> SchedulerLoad:
        return SchedulerLoad(
            len(self._turns.waiting),
            self._num_requests - len(self._turns.waiting),
            self.pages.num_available,
            self.slots.num_available,
            local_rest_tokens=self._longest_rest,
        )

    def occupancy(self) -> PoolOccupancy:
        """Return how many requests hold memory, landing or running, and the longest preemption."""
        return occupancy_of(self._entries, self._turns.waiting, self.clock.now())

    def next_batch(self) -> ForwardBatch | None:
        self._drop_late()
        if not any(entry.in_flight for entry in self._entries):
            self._meter.begin()
        elif self.limits.steps_ahead:
            return self._next_ahead()
        self._turns.readmit()
        ready = self._turns.ready()
        for entry in ready:
            entry.lease_scratch(self.scratch)
        batch = self._steps.next(ready, self._turns.stepping)
        return None if batch is None else self._launched(batch)

    def on_result(self, batch: ForwardBatch, result: StepResult) -> None:
        if result.error is None:  # a failed batch may not have reached the last stage
            for key in batch.ended_keys:
                self._ended.pop(key, None)
        self._meter.measure(batch, result, len(self._turns), self.on_verified)
        generated = iter(result.tokens)
        verified = iter(result.verified)
        for row, (key, sampling) in enumerate(zip(batch.request_keys, batch.sampling, strict=True)):
            entry = self._entries[key]
            entry.in_flight -= 1
            entry.num_due -= sampling is not None
            outcome = Verified()
            tokens = []
            if result.error is None and (
                sampling is not None or batch.mode is ForwardMode.PREBUILT
            ):
                outcome = next(verified) if self.limits.speculates else outcome
                tokens = [next(generated) for _ in outcome.accepted]
            if entry.state in RELEASED_STATES:
                self.release(key)
            elif entry.state in FAILED_STATES:
                continue  # already failed; this step was prepared before
            elif result.error is not None:
                self._fail(entry, result.error)
            else:
                entry.draft.tree, entry.draft.is_forced = outcome.draft, outcome.is_forced
                if tokens:
                    if self.limits.speculates:
                        entry.settle(batch.mode, batch.context_lens[row], outcome.accepted)
                    self._append(entry, tokens)

    def on_idle(self) -> None:
        check_integrity(
            [self.pages.ledger, self.slots.ledger, self.scratch.ledger],
            live_owners=self._entries.owners | self.cache.holders,
        )

    @cached_property
    def cache(self) -> PrefixCache:
        """Return the cache of request tokens, without states: these come with each prompt."""
        return self.shared_cache or PrefixCache(
            self.cache_rule, self.pages, self.slots, self.clock, journal=self.journal
        )

    @cached_property
    def _meter(self) -> StepMeter:
        return StepMeter(self.limits, self.clock, self._entries)

    @property
    def _longest_rest(self) -> int:
        """Return how many missing prompt tokens this pool computes by itself at this load."""
        return self._meter.rests.tokens(has_streams=bool(self._turns))

    @cached_property
    def _memory(self) -> RequestMemory:
        return RequestMemory(self.limits, self.pages, self.slots, self.cache, self.data_rank)

    @cached_property
    def _turns(self) -> DecodeTurns:
        return DecodeTurns(self.limits, self._memory, self.clock, lambda: self.on_preempted())

    @cached_property
    def _steps(self) -> StepBuilder:
        return StepBuilder(self.limits, self.pages, self._num_draft_tokens, self._meter.costs)

    def _num_draft_tokens(self, entry: DecodeEntry) -> int | None:
        length = self.draft_length(len(self._turns)) if entry.request.speculates else None
        if length is None:
            return None
        # A request without a scratch record takes plain steps and keeps its draft for when it gets
        # one.
        return 0 if entry.scratch is None else min(self.limits.num_draft_tokens, length)

    def _admit(self, entry: DecodeEntry, lease: Callable[[DecodeEntry], None]) -> None:
        """Give the entry a key, and memory by `lease`.

        Raises:
            CapacityError: preempted requests wait, or too many requests hold memory.
        """
        self.check_room(entry.request)
        entry.key, entry.joined_s = next(self.keys), self.clock.now()
        lease(entry)
        self._entries.add(entry)

    @property
    def _num_requests(self) -> int:
        return len(self._entries) + (0 if self.prompts is None else self.prompts.num_prompts)

    def check_room(self, request: Request, *, num_computed: int = 0) -> None:
        """Check that the pool takes another request.

        One of `num_computed` that hold memory already comes before preempted requests.

        Raises:
            CapacityError: preempted requests wait, or too many requests hold memory.
            InvalidRequestError: the request could never fit.
        """
        self._memory.check_fits(request)
        if self._turns.waiting and not num_computed:
            message = f"{len(self._turns.waiting)} preempted requests wait for pages first"
            raise CapacityError(message, resource="pages")
        limit = (self.limits.max_held or self.limits.max_running) + num_computed
        if self._num_requests >= limit:
            raise CapacityError(
                f"{self._num_requests} requests hold memory, the limit is {limit}",
                resource="held requests",
            )

    def _run(self, entry: DecodeEntry) -> None:
        entry.joined_s = self.clock.now()
        self._turns.add(entry)

    def _drop_late(self) -> None:
        """Fail requests past their deadline, before the owner's cancellation arrives."""
        now_s = self.clock.now()  # once for all rows, of the clock that deadlines are by
        for entry in [*self._turns.ready(), *self._turns.waiting]:
            if now_s > entry.deadline.at_s:
                self._fail(entry, DeadlineError("the request's deadline has passed"))

    def _next_ahead(self) -> ForwardBatch | None:
        """Return the step after the one in flight, or None if it must wait for that one's result."""
        stepping = self._turns.stepping_ahead(self.pages)
        return self._turned(self._steps.decode(stepping)) if stepping else None

    def _launched(self, batch: ForwardBatch) -> ForwardBatch:
        """Mark the requests of a batch as in flight; they have nothing else in flight."""
        for key in batch.request_keys:
            self._entries[key].in_flight = 1
        return self._turned(batch)

    def _turned(self, batch: ForwardBatch) -> ForwardBatch:
        """Move the batch's requests to the end of the turn order."""
        batch.ended_keys = tuple(islice(self._ended, MAX_ENDED_KEYS))
        self._turns.move_to_end(batch.request_keys)
        return batch

    def _append(self, entry: DecodeEntry, tokens: list[SampledToken]) -> None:
        """Publish the tokens of a step up to the one that ends the request."""
        taken, problem = entry.take(tokens, self.limits.max_context_tokens)
        if taken:
            entry.emit(Generated(tuple(taken)))
        if problem is not None:
            self._fail(entry, problem)
        else:
            self._finish_if_done(entry)

    def _finish_if_done(self, entry: DecodeEntry) -> None:
        """Notify the owner and drop the entry if its last token is there.

        Nothing can write its memory after that, so it is released before the owner does. With a
        step ahead in flight, the result of that step releases it. `_fail` leaves the release to the
        owner.
        """
        finished = entry.finished(self.limits.max_context_tokens, self.clock.now())
        if finished is None:
            return
        self._memory.keep_generated(entry)
        self.release(entry.key)
        entry.emit(finished)

    def _unschedule(self, entry: DecodeEntry) -> None:
        self._turns.remove(entry)

    def _release_in_flight(self, entry: DecodeEntry) -> None:
        self._turns.skip(entry)

    def _on_forget(self, entry: DecodeEntry) -> None:
        if entry.num_kept is not None:
            self._ended[entry.key] = None

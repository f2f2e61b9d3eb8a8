"""Scheduling of a pool that prefills and decodes: one loop, one pool of pages, one cache.

    prompt of its own ─▶ prefill scheduler ─▶ computed ─▶ decode scheduler, in the same memory
    prompt for a pool ─▶ prefill scheduler ─▶ handoff
    handoff of others ─────────────────────────────────▶ decode scheduler

Steps of the two schedulers alternate. A chunk of a prompt delays the running requests, so
`ChunkBudget` bounds it. A computed prompt changes its scheduler with its pages, its slot and its
key: nothing is copied. Belongs to the engine thread.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from decode.entry import DECODING, DecodeEmitter
from decode.local_prompts import ComputedPrompt
from decode.request_memory import Reservation
from decode.scheduler import DecodeScheduler
from decode.speculation import DraftState
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import NO_TREE
from engine.core.request import Request, SampledToken
from engine.loop import Scheduler
from engine.memory.integrity import check_integrity
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepResult
from pool.request.entry import Failed
from pool.stage.metrics import PoolOccupancy, SchedulerLoad
from prefill.prompts import FirstToken, PrefillEntryEvent, PromptCache
from prefill.scheduler import PrefillScheduler
from runtime.clock import Clock, Deadline
from runtime.errors import BatonError, HandoffError, IncompatiblePeerError
from worker.chunk_budget import ChunkBudget


@dataclass(eq=False)
class _OwnPrompt:
    """A request whose prompt is computed here, for this pool."""

    request: Request
    emit: DecodeEmitter
    blocks: tuple[bytes, ...]
    compatibility: str
    deadline: Deadline
    key: int = 0  # of the prefill scheduler
    replayed: tuple[int, ...] = ()  # output tokens after the first that the client has already


@dataclass
class OwnPrompts:
    """The prompts that a pool prefills for itself. Implements `decode.local_prompts.PromptReader`.

    Computed ones go to `decode`.
    """

    prefill: PrefillScheduler
    decode: DecodeScheduler
    _prompts: dict[int, _OwnPrompt] = field(default_factory=dict)  # by key
    _expected: set[int] = field(default_factory=set)  # of them, those that came from a router

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def read(
        self,
        request: Request,
        emit: DecodeEmitter,
        *,
        blocks: tuple[bytes, ...],
        compatibility: str,
        deadline: Deadline,
    ) -> Reservation:
        """Implement `PromptReader.read`."""
        found = self.prefill.cache.find(blocks, len(request.prompt_token_ids))
        prompt = _OwnPrompt(request, emit, blocks, compatibility, deadline)
        prompt.key = self.prefill.submit(
            request, partial(self._on_event, prompt), blocks=blocks, deadline=deadline
        )
        self._prompts[prompt.key] = prompt
        return Reservation(prompt.key, (), 0, found.num_tokens, self.prefill.data_rank)

    def expect(
        self,
        key: int,
        request: Request,
        emit: DecodeEmitter,
        *,
        replayed: Sequence[int],
        blocks: tuple[bytes, ...],
        compatibility: str,
        deadline: Deadline,
    ) -> None:
        """Implement `PromptReader.expect`."""
        # If it were refused, it would keep its place and its pages from the prompts that came before,
        # and from preempted requests.
        self.decode.check_room(request, num_computed=self.prefill.limits.max_running)
        given = self.prefill.request_of(key)
        if given is None or key in self._prompts:
            raise HandoffError("the prompt is not in this pool's memory any more")
        if (given.prompt_token_ids, given.cache_salt, given.adapter) != (
            request.prompt_token_ids,
            request.cache_salt,
            request.adapter,
        ):
            raise IncompatiblePeerError(
                f"source.request_key: {key} is the prompt of another request"
            )
        self._prompts[key] = _OwnPrompt(
            request, emit, blocks, compatibility, deadline, key, tuple(replayed)
        )
        self._expected.add(key)

    def join(self, key: int, first_token: int) -> None:
        """Implement `PromptReader.join`."""
        if key in self._expected:
            self._expected.discard(key)
            prompt = self._prompts.pop(key)
            if not self.prefill.holds(key):
                raise HandoffError("the prompt is not in this pool's memory any more")
            self._hand_over(prompt, None, first_token)

    def holds(self, key: int) -> bool:
        return key in self._prompts

    def release(self, key: int) -> None:
        """Implement `PromptReader.release`."""
        if self._prompts.pop(key, None) is not None and key not in self._expected:
            self.prefill.release(key)
        self._expected.discard(key)

    def _on_event(self, prompt: _OwnPrompt, event: PrefillEntryEvent) -> None:
        if prompt.key not in self._prompts:
            return
        if isinstance(event, Failed):
            prompt.emit(event)
        elif isinstance(event, FirstToken):
            del self._prompts[prompt.key]
            self._hand_over(prompt, event.token)

    def _hand_over(self, prompt: _OwnPrompt, first_token: SampledToken | None, *known: int) -> None:
        """Give a computed prompt with its memory to the decode scheduler.

        `known` is the first token if the client has it already.
        """
        memory, limits = self.prefill.hand_over(prompt.key), self.prefill.limits
        self.decode.adopt(
            ComputedPrompt(
                prompt.key,
                prompt.request,
                prompt.emit,
                prompt.deadline,
                prompt.blocks,
                prompt.compatibility,
                memory.pages,
                memory.slot,
                first_token,
                DraftState(
                    # After a replay, drafting starts at its end.
                    tree=NO_TREE if prompt.replayed else memory.draft,
                    start=0 if limits.caches_drafts else memory.num_cached,
                    followed=limits.drafts,
                    has_prompt_state=limits.drafts and limits.caches_drafts and not prompt.replayed,
                ),
                (*known, *prompt.replayed),
            )
        )


@dataclass
class AggregatedScheduler:
    """Scheduler of one data rank of a pool that prefills and decodes.

    Implements `engine.loop.Scheduler` and `pool.request.entry.RankScheduler`. The two schedulers
    share their allocators, their keys and their cache.
    """

    prefill: PrefillScheduler
    decode: DecodeScheduler
    budget: ChunkBudget
    clock: Clock
    # The scheduler of each step in flight and the time of its launch, in order.
    _launched: deque[tuple[Scheduler, float]] = field(default_factory=deque)
    _collected_s: float = 0.0  # time of the latest result
    _latest: Scheduler | None = None  # the one that launched last

    def __post_init__(self) -> None:
        self.decode.shared_cache = self.prefill.cache
        self.decode.prompts = self.own_prompts
        self.prefill.budget_tokens = self._budget_tokens
        # Preempted requests resume before another prompt takes memory.
        self.prefill.may_start = lambda: not self.decode.has_preempted

    @property
    def pages(self) -> PageAllocator:
        return self.prefill.pages

    @property
    def slots(self) -> SlotAllocator:
        return self.prefill.slots

    @property
    def cache(self) -> PromptCache:
        return self.prefill.cache

    @cached_property
    def own_prompts(self) -> OwnPrompts:
        return OwnPrompts(self.prefill, self.decode)

    def holds(self, key: int) -> bool:
        return self.prefill.holds(key) or self.decode.holds(key)

    def has_adapter(self, adapter: str) -> bool:
        return self.prefill.has_adapter(adapter) or self.decode.has_adapter(adapter)

    def load(self) -> SchedulerLoad:
        """Return the work and the free memory of both schedulers."""
        prompts, running = self.prefill.load(), self.decode.load()
        return SchedulerLoad(
            prompts.queued_requests + running.queued_requests,
            prompts.running_requests + running.running_requests,
            running.pages_free,
            running.slots_free,
            queued_tokens=prompts.queued_tokens,
            local_rest_tokens=running.local_rest_tokens,
        )

    def occupancy(self) -> PoolOccupancy:
        prompts, running = self.prefill.occupancy(), self.decode.occupancy()
        return PoolOccupancy(
            {**prompts.leases, **running.leases},
            prompts.num_pages_held + running.num_pages_held,
            max(prompts.oldest_s, running.oldest_s),
        )

    def next_batch(self) -> ForwardBatch | None:
        turns: tuple[Scheduler, Scheduler] = (
            (self.decode, self.prefill)
            if self._latest is self.prefill
            else (self.prefill, self.decode)
        )
        for scheduler in turns:
            if (batch := scheduler.next_batch()) is not None:
                self._latest = scheduler
                self._launched.append((scheduler, self.clock.now()))
                return batch
        return None

    def on_result(self, batch: ForwardBatch, result: StepResult) -> None:
        scheduler, launched_s = self._launched.popleft()
        now_s = self.clock.now()
        seconds = now_s - max(launched_s, self._collected_s)
        self._collected_s = now_s
        if scheduler is self.decode:
            if batch.mode in DECODING:
                self.budget.stepped(seconds)
        elif self.decode.is_stepping:
            self.budget.computed(batch.num_tokens, seconds)
        scheduler.on_result(batch, result)

    def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
        self._launched.clear()
        for scheduler in (self.prefill, self.decode):
            scheduler.on_pipeline_lost(in_flight, error)

    def on_idle(self) -> None:
        check_integrity(
            [self.prefill.pages.ledger, self.prefill.slots.ledger, self.decode.scratch.ledger],
            live_owners=self.prefill.owners | self.decode.owners | self.cache.holders,
        )

    def _budget_tokens(self, most: int) -> int:
        return min(most, self.budget.tokens) if self.decode.is_stepping else most

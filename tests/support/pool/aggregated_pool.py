"""A whole pool that prefills and decodes, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from decode.entry import DecodeLimits
from decode.scheduler import DecodeScheduler
from engine.core.request import Request
from engine.loop import EngineLoop
from engine.memory.leases import PageAllocator, SlotAllocator
from models.loader import ModelDescription
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from prefill.prompts import PrefillLimits
from prefill.scheduler import PrefillScheduler
from runtime.clock import SystemClock
from runtime.digests import block_names
from tests.support.pool.local_pool import Answer, Speculation, call, pipeline, running
from worker.chunk_budget import ChunkBudget
from worker.scheduler import AggregatedScheduler

COMPATIBILITY = "c"


@dataclass
class AggregatedPool:
    loop: EngineLoop
    schedulers: tuple[AggregatedScheduler, ...]  # one of each data rank
    page_size: int

    @property
    def scheduler(self) -> AggregatedScheduler:
        return self.schedulers[0]

    def generate(
        self, requests: list[Request], *, caches: bool = True, timeout_s: float = 240
    ) -> list[Answer]:
        """Submit all at once, to the data ranks in turn, and wait for every output."""
        answers = [Answer() for _ in requests]
        keys: list[tuple[AggregatedScheduler, int]] = []

        def submit() -> None:
            for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                scheduler = self.schedulers[index % len(self.schedulers)]
                blocks: tuple[bytes, ...] = ()
                if caches:
                    blocks = block_names(
                        request.prompt_token_ids,
                        self.page_size,
                        compatibility=COMPATIBILITY,
                        salt=request.cache_salt,
                    )
                taken = scheduler.decode.read_rest(
                    request,
                    answer.emit,
                    blocks=blocks,
                    compatibility=COMPATIBILITY if caches else "",
                )
                keys.append((scheduler, taken.key))

        call(self.loop, submit)
        for answer in answers:
            assert answer.done.wait(timeout_s), "a request did not end"

        def release() -> None:
            for scheduler, key in keys:
                scheduler.decode.release(key)

        call(self.loop, release)
        return answers

    def check_empty(self) -> None:
        """Check that no request holds memory."""
        for scheduler in self.schedulers:
            call(self.loop, scheduler.on_idle)
            assert not scheduler.prefill.owners | scheduler.decode.owners
            for ledger in (scheduler.prefill.pages.ledger, scheduler.prefill.slots.ledger):
                assert ledger.num_free + len(ledger.kept_ids()) == ledger.num_total


@contextmanager
def aggregated_pool(
    description: ModelDescription,
    size: int = 1,
    *,
    page_size: int = 16,
    num_pages: int = 64,
    max_running: int = 8,
    chunk_tokens: int = 128,
    speculation: Speculation | None = None,
    tp: int = 1,
    dp: int = 1,
    num_snapshots: int = 8,
    max_step_s: float = 0.0,
) -> Iterator[AggregatedPool]:
    """Run a pool of both roles."""
    facts = description.facts
    has_states = any(spec.kind.is_state for spec in description.cache_specs(page_size))
    needs_slots = any(not spec.kind.is_paged for spec in description.cache_specs(page_size))
    num_slots = 2 * max_running + num_snapshots + 1 if needs_slots else 0
    num_scratch = max_running + 1 if needs_slots and speculation is not None else 0
    num_draft_tokens = 0 if speculation is None else speculation.num_draft_tokens
    keys, journal = count(1), PointJournal()
    schedulers = []
    for rank in range(dp):
        pages, slots = PageAllocator(num_pages), SlotAllocator(num_slots)
        prefill = PrefillScheduler(
            pages=pages,
            slots=slots,
            limits=PrefillLimits(
                page_size,
                chunk_tokens,
                facts.chunk_grid,
                max_running,
                64,
                drafts=speculation is not None,
                num_draft_tokens=num_draft_tokens,
                caches_drafts=False,
            ),
            clock=SystemClock(),
            cache_rule=ResumeRule(page_size, facts.chunk_grid, has_states),
            data_rank=rank,
            keys=keys,
            journal=journal,
        )
        decode = DecodeScheduler(
            pages=pages,
            slots=slots,
            scratch=SlotAllocator(num_scratch, name="states of trees"),
            limits=DecodeLimits(
                page_size=page_size,
                grid=facts.chunk_grid,
                depth=size,
                max_running=max_running,
                max_held=3 * max_running,
                chunk_tokens=chunk_tokens,
                max_context_tokens=min(facts.max_context_tokens, (num_pages - 1) * page_size),
                growth_tokens=page_size,
                has_states=needs_slots,
                replay_tokens=5,
                num_draft_tokens=num_draft_tokens,
            ),
            clock=SystemClock(),
            data_rank=rank,
            keys=keys,
            journal=journal,
        )
        if speculation is not None:
            decode.draft_length = speculation.draft_length
        budget = ChunkBudget(chunk_tokens, facts.chunk_grid, max_step_s)
        schedulers.append(AggregatedScheduler(prefill, decode, budget, SystemClock()))
    with (
        pipeline(
            description,
            size,
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
            num_scratch=num_scratch,
            speculation=speculation,
            tp=tp,
            dp=dp,
        ) as (stages, _),
        running(stages, *schedulers) as loop,
    ):
        yield AggregatedPool(loop, tuple(schedulers), page_size)

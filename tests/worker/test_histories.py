"""Random histories of a pool of both roles, on the real schedulers with a memory that records
tokens: prompts of its own and for other pools, handoffs of others, prompts that go on in place,
cancellations, failures, and pages that run out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from decode.entry import DecodeLimits, Finished, Generated
from decode.scheduler import DecodeScheduler
from engine.core.batch import ForwardBatch
from engine.core.request import Request, SampledToken, SamplingParams
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepFailed, StepResult
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import Failed
from prefill.prompts import FirstToken, PrefillLimits
from prefill.scheduler import PrefillScheduler
from runtime.clock import ManualClock
from runtime.digests import block_names
from runtime.errors import (
    CapacityError,
    HandoffError,
    IncompatiblePeerError,
    InvalidRequestError,
    PeerLostError,
)
from tests.decode.test_prefix_cache import PAGE, generated_after
from tests.support.pool.cache_rig import CacheMachine, CacheRig
from worker.chunk_budget import ChunkBudget
from worker.scheduler import AggregatedScheduler

CHUNK = 8


@dataclass(eq=False)
class Task:
    """A request on the pool: its prompt, its output, or both are computed here."""

    request: Request
    key: int = 0
    num_known: int = 0  # output tokens that its client has from elsewhere
    events: list[Any] = field(default_factory=list)
    prompt_events: list[Any] = field(default_factory=list)
    decodes: bool = False
    is_expected: bool = False
    is_cancelled: bool = False

    @property
    def tokens(self) -> list[int]:
        tokens = list(self.request.prompt_token_ids)
        for _ in range(self.request.max_tokens):
            tokens.append(generated_after(tokens))
        return tokens

    @property
    def expected(self) -> list[int]:
        return self.tokens[len(self.request.prompt_token_ids) + self.num_known :]

    @property
    def drawn(self) -> list[int]:
        return [
            token.token_id
            for event in self.events
            if isinstance(event, Generated)
            for token in event.tokens
        ]

    @property
    def has_failed(self) -> bool:
        return any(isinstance(each, Failed) for each in (*self.events, *self.prompt_events))

    @property
    def has_first_token(self) -> bool:
        return any(isinstance(each, FirstToken) for each in self.prompt_events)


class AggregatedRig(CacheRig[AggregatedScheduler]):
    """A pool of both roles over pages of four tokens."""

    def __init__(self, *, num_pages: int, depth: int, grid: int) -> None:
        self.clock = ManualClock()
        pages, slots = PageAllocator(num_pages), SlotAllocator(0 if grid == 1 else 24)
        keys = itertools.count(1)
        prefill = PrefillScheduler(
            pages=pages,
            slots=slots,
            limits=PrefillLimits(PAGE, CHUNK, grid, 3, 8),
            clock=self.clock,
            cache_rule=ResumeRule(PAGE, grid, grid > 1),
            keys=keys,
        )
        decode = DecodeScheduler(
            pages=pages,
            slots=slots,
            limits=DecodeLimits(
                page_size=PAGE,
                grid=grid,
                depth=depth,
                max_running=4,
                max_held=8,
                chunk_tokens=CHUNK,
                max_context_tokens=(num_pages - 1) * PAGE,
                growth_tokens=PAGE,
                has_states=grid > 1,
            ),
            clock=self.clock,
            keys=keys,
        )
        super().__init__(
            AggregatedScheduler(prefill, decode, ChunkBudget(CHUNK, grid), self.clock), PAGE
        )
        self.tasks: dict[int, Task] = {}

    def tokens_of(self, key: int) -> Sequence[int]:
        return self.tasks[key].tokens

    def read(self, task: Task) -> None:
        """Compute its prompt and its output here."""
        taken = self.scheduler.decode.read_rest(
            task.request, task.events.append, blocks=self.blocks(task), compatibility="c"
        )
        task.key, task.decodes = taken.key, True
        self.tasks[task.key] = task

    def prefill(self, task: Task) -> None:
        """Compute its prompt only."""
        task.key = self.scheduler.prefill.submit(
            task.request, task.prompt_events.append, blocks=self.blocks(task)
        )
        self.tasks[task.key] = task

    def expect(self, task: Task, replayed: int) -> None:
        """Go on here with a prompt that is computed here."""
        task.num_known = 1 + replayed
        first = len(task.request.prompt_token_ids)
        known = task.tokens[first + 1 : first + 1 + replayed]
        self.scheduler.own_prompts.expect(
            task.key,
            task.request,
            task.events.append,
            replayed=known,
            blocks=self.blocks(task),
            compatibility="c",
            deadline=self.scheduler.prefill._entries[task.key].deadline,
        )
        task.is_expected = True

    def join(self, task: Task) -> None:
        self.scheduler.own_prompts.join(task.key, generated_after(task.request.prompt_token_ids))
        task.decodes = True

    def receive(self, task: Task) -> None:
        """Take the prompt from another pool."""
        taken = self.scheduler.decode.reserve(
            task.request, task.events.append, blocks=self.blocks(task), compatibility="c"
        )
        task.key, task.num_known = taken.key, 1
        self.tasks[task.key] = task
        prompt = task.request.prompt_token_ids
        self.memory.read(taken.prompt_page_ids, prompt[: taken.held_tokens])
        self.memory.write(
            taken.prompt_page_ids, taken.held_tokens, prompt[taken.held_tokens :], kept=self.kept
        )
        task.decodes = True
        self.scheduler.decode.join(task.key, generated_after(prompt))

    def cancel(self, task: Task) -> None:
        """End both of its requests, as their handlers do."""
        task.is_cancelled = True
        self.scheduler.decode.release(task.key)
        self.scheduler.prefill.release(task.key)

    def blocks(self, task: Task) -> tuple[bytes, ...]:
        return block_names(task.request.prompt_token_ids, PAGE, compatibility="c")

    def answer(self, batch: ForwardBatch, error: StepFailed | None = None) -> None:
        if error is not None:
            self.spoil(batch)
        drawn = [
            SampledToken(self.tasks[key].tokens[context + count])
            for key, context, count, sampling in zip(
                batch.request_keys,
                batch.context_lens,
                batch.query_lens,
                batch.sampling,
                strict=True,
            )
            if sampling is not None and error is None
        ]
        self.scheduler.on_result(batch, StepResult(0, drawn, error))

    def end(self) -> None:
        for task in self.tasks.values():
            self.cancel(task)


class AggregatedHistories(CacheMachine):
    """Random histories of a small pool."""

    rig: AggregatedRig

    @initialize(
        num_pages=st.integers(8, 24),
        depth=st.sampled_from((1, 2)),
        grid=st.sampled_from((1, 1, 8)),
    )
    def begin(self, num_pages: int, depth: int, grid: int) -> None:
        self.depth = depth
        self.rig = AggregatedRig(num_pages=num_pages, depth=depth, grid=grid)

    @rule(
        start=st.lists(st.sampled_from((0, 1)), min_size=0, max_size=4),
        tail=st.integers(1, 5),
        max_tokens=st.integers(1, 9),
        priority=st.integers(-1, 1),
        way=st.sampled_from(("read", "read", "prefill", "receive")),
    )
    def ask(self, start: list[int], tail: int, max_tokens: int, priority: int, way: str) -> None:
        prompt = [*itertools.chain(*([block] * PAGE for block in start)), *[2] * tail]
        request = Request(
            "r", tuple(prompt), max_tokens, SamplingParams(temperature=0), priority=priority
        )
        try:
            getattr(self.rig, way)(Task(request))
        except (CapacityError, InvalidRequestError):
            return

    @rule(place=st.integers(0, 40), replayed=st.sampled_from((0, 0, 2)))
    def go_on_in_place(self, place: int, replayed: int) -> None:
        """Offer the pool a prompt of its own."""
        if (task := self.pick(place)) is None or task.is_expected or task.decodes:
            return
        try:
            self.rig.expect(task, min(replayed, task.request.max_tokens - 1))
        except (CapacityError, IncompatiblePeerError, InvalidRequestError, HandoffError):
            return

    @rule(place=st.integers(0, 40))
    def join(self, place: int) -> None:
        task = self.pick(place)
        if task is not None and task.is_expected and task.has_first_token and not task.decodes:
            try:
                self.rig.join(task)
            except HandoffError:
                assert task.has_failed

    @rule(place=st.integers(0, 40))
    def cancel(self, place: int) -> None:
        if (task := self.pick(place)) is not None:
            self.rig.cancel(task)

    @rule()
    def lose_a_stage(self) -> None:
        self.in_flight.clear()
        self.rig.scheduler.on_pipeline_lost([], PeerLostError("stage 1 died"))

    @rule()
    def run_to_the_end(self) -> None:
        """Every request that neither failed nor was cancelled gets its tokens.

        Failed requests and computed prompts hold memory, so their owners release them.
        """
        for _ in range(400):
            for task in self.rig.tasks.values():
                if task.is_cancelled:
                    continue
                if task.has_failed or (task.has_first_token and not task.is_expected):
                    self.rig.cancel(task)
                elif task.has_first_token and not task.decodes:
                    self.rig.join(task)
            if self.in_flight:
                self.rig.answer(self.in_flight.pop(0))
            elif (batch := self.rig.launch()) is not None:
                self.in_flight.append(batch)
            else:
                break
        else:
            raise AssertionError("it does not end")
        for task in self.rig.tasks.values():
            if task.decodes and not task.is_cancelled and not task.has_failed:
                assert task.drawn == task.expected
                assert any(isinstance(event, Finished) for event in task.events)

    def pick(self, place: int) -> Task | None:
        tasks = [task for task in self.rig.tasks.values() if not task.is_cancelled]
        return tasks[place % len(tasks)] if tasks else None


def asked(prompt: Sequence[int], max_tokens: int = 5, salt: str = "") -> Task:
    return Task(
        Request("r", tuple(prompt), max_tokens, SamplingParams(temperature=0), cache_salt=salt)
    )


def finish(rig: AggregatedRig) -> None:
    while (batch := rig.launch()) is not None:
        rig.answer(batch)


def test_a_computed_prompt_changes_its_scheduler_with_its_pages() -> None:
    rig = AggregatedRig(num_pages=20, depth=1, grid=1)
    task = asked(range(10))
    rig.read(task)
    while not rig.scheduler.decode.is_stepping:
        batch = rig.launch()
        assert batch is not None
        pages = batch.page_tables[0].tolist()[:3]
        rig.answer(batch)
    (entry,) = rig.scheduler.decode._entries
    assert entry.key == task.key
    assert entry.pages is not None
    assert entry.pages.page_ids[:3] == pages
    assert not rig.scheduler.prefill.holds(task.key)
    finish(rig)
    assert task.drawn == task.expected
    again = asked([*range(10), 7])
    rig.read(again)
    finish(rig)
    assert again.drawn == again.expected
    assert rig.count("reused_tokens") == 8


def test_only_the_own_prompt_is_gone_on_with() -> None:
    """A key that names the prompt of another request, or one of another client, is refused."""
    rig = AggregatedRig(num_pages=20, depth=1, grid=1)
    task = asked(range(10), salt="a")
    rig.prefill(task)
    finish(rig)
    for other in (asked(range(1, 11), salt="a"), asked(range(10), salt="b")):
        other.key = task.key
        with pytest.raises(IncompatiblePeerError, match="is the prompt of another request"):
            rig.expect(other, 0)
    gone = asked(range(10), salt="a")
    gone.key = task.key
    deadline = rig.scheduler.prefill._entries[task.key].deadline
    rig.cancel(task)
    with pytest.raises(HandoffError):
        rig.scheduler.own_prompts.expect(
            gone.key,
            gone.request,
            gone.events.append,
            replayed=(),
            blocks=(),
            compatibility="",
            deadline=deadline,
        )


def test_replayed_tokens_without_a_free_page_wait_for_one() -> None:
    rig = AggregatedRig(num_pages=6, depth=1, grid=1)
    task, other = asked(range(4), max_tokens=9), asked(range(20, 30), max_tokens=2)
    rig.prefill(task)
    finish(rig)
    rig.prefill(other)
    finish(rig)
    assert rig.scheduler.pages.num_available == 1
    rig.expect(task, 6)
    rig.join(task)
    assert rig.scheduler.decode.load().queued_requests == 1
    rig.cancel(other)
    finish(rig)
    assert task.drawn == task.expected
    rig.end()
    rig.check()


TestAggregatedHistories = AggregatedHistories.TestCase
TestAggregatedHistories.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)

"""Prefix cache of a prefill pool, on the real scheduler with a memory that records tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, rule

from engine.core.batch import ForwardBatch
from engine.core.request import Request, SampledToken, SamplingParams
from engine.core.state_rows import NO_STATES
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepFailed, StepResult
from engine.sampling.sampler import Scores
from pool.prefix.resume_rule import ResumeRule
from prefill.prompts import FirstToken, PrefillEntryEvent, PrefillLimits, Started
from prefill.scheduler import PrefillScheduler
from runtime.clock import ManualClock
from runtime.digests import block_names
from runtime.errors import PeerLostError
from tests.support.pool.cache_rig import CacheMachine, CacheRig

PAGE, CHUNK, GRID = 4, 8, 8


@dataclass
class Prompt:
    """A request and its result."""

    token_ids: tuple[int, ...]
    key: int = 0
    events: list[PrefillEntryEvent] = field(default_factory=list)

    @property
    def started(self) -> Started:
        (started,) = [event for event in self.events if isinstance(event, Started)]
        return started

    @property
    def is_done(self) -> bool:
        return any(isinstance(event, FirstToken) for event in self.events)


class Rig(CacheRig[PrefillScheduler]):
    """A scheduler over pages of four tokens. With slots the model has recurrent states, and chunks
    end on a grid of eight; `states` has the tokens that each slot's state has read."""

    def __init__(
        self, *, num_pages: int = 40, max_running: int = 4, num_slots: int = 0, page: int = PAGE
    ) -> None:
        grid, self.page = GRID if num_slots else 1, page
        super().__init__(
            PrefillScheduler(
                pages=PageAllocator(num_pages),
                slots=SlotAllocator(num_slots),
                clock=ManualClock(),
                cache_rule=ResumeRule(page, grid, has_states=bool(num_slots)),
                limits=PrefillLimits(
                    page_size=page,
                    chunk_tokens=2 * GRID if num_slots else CHUNK,
                    grid=grid,
                    max_running=max_running,
                    max_queued=64,
                ),
            ),
            page,
        )
        self.states: dict[int, tuple[int, ...]] = {}
        self.prompts: dict[int, Prompt] = {}
        self.num_computed = 0

    def tokens_of(self, key: int) -> Sequence[int]:
        return self.prompts[key].token_ids

    def on_row(self, key: int, context: int, count: int, *, samples: bool) -> None:
        self.num_computed += count

    def end(self) -> None:
        for key in self.prompts:
            self.scheduler.release(key)

    def submit(
        self,
        *token_ids: int,
        priority: int = 0,
        caches: bool = True,
        salt: str = "",
        num_prompt_logprobs: int | None = None,
    ) -> Prompt:
        prompt = Prompt(token_ids)
        request = Request(
            "r",
            token_ids,
            5,
            SamplingParams(temperature=0),
            priority=priority,
            num_prompt_logprobs=num_prompt_logprobs,
        )
        blocks = block_names(token_ids, self.page, compatibility="c", salt=salt) if caches else ()
        prompt.key = self.scheduler.submit(request, prompt.events.append, blocks=blocks)
        self.prompts[prompt.key] = prompt
        return prompt

    def launch(self) -> ForwardBatch | None:
        batch = super().launch()
        if batch is not None:
            self.advance_states(batch)
        return batch

    def advance_states(self, batch: ForwardBatch) -> None:
        """Advance states as recurrent layers do, in launch order of the batches."""
        if not self.scheduler.slots.num_total:
            return
        kept = self.scheduler.slots.ledger.kept_ids()
        for row, slot in enumerate(batch.slot_ids.tolist()):
            states, context = (
                batch.states[row] if batch.states else NO_STATES,
                batch.context_lens[row],
            )
            tokens = self.prompts[batch.request_keys[row]].token_ids
            if states.resumed_slot:
                self.states[slot] = self.states[states.resumed_slot]
            assert context == 0 or self.states[slot] == tokens[:context], "another prompt's state"
            self.states[slot] = tokens[: context + batch.query_lens[row]]
            for snapshot in states.snapshots:
                assert snapshot.num_tokens % GRID == 0
                assert context < snapshot.num_tokens <= context + batch.query_lens[row]
                self.states[snapshot.slot_id] = tokens[: snapshot.num_tokens]
            written = {slot, *(snapshot.slot_id for snapshot in states.snapshots)}
            assert not written & kept, "what others go on from is written"

    def answer(self, batch: ForwardBatch, error: StepFailed | None = None) -> None:
        if error is not None:
            self.spoil(batch)
            for states in batch.states:
                for snapshot in states.snapshots:
                    self.states[snapshot.slot_id] = (-1,)
        tokens = [SampledToken(1) for row in batch.sampling if row is not None]
        scores: list[Scores] = [() for row in batch.scoring if row is not None]
        self.scheduler.on_result(
            batch, StepResult(0, [] if error else tokens, error, scores=[] if error else scores)
        )

    def run(self, *prompts: Prompt) -> None:
        """Run until these are computed."""
        while not all(prompt.is_done for prompt in prompts):
            batch = self.launch()
            assert batch is not None
            self.answer(batch)

    def compute(self, *token_ids: int, **options: object) -> Prompt:
        """Run a prompt from arrival to release."""
        prompt = self.submit(*token_ids, **options)  # type: ignore[arg-type]
        self.run(prompt)
        self.scheduler.release(prompt.key)
        return prompt


def test_the_first_repeat_of_a_prompt_computes_its_last_page_only() -> None:
    rig = Rig()
    first = rig.compute(*range(19))
    rig.num_computed = 0
    second = rig.compute(*range(19))
    assert (first.started.num_cached, second.started.num_cached, rig.num_computed) == (0, 16, 3)
    assert second.started.page_ids[:4] == first.started.page_ids[:4]
    assert len(set(second.started.page_ids)) == 5
    rig.check()


def test_short_prompts_with_a_shared_prefix_compute_it_once() -> None:
    """Both would fit into one batch: the share for short ones has grown to a chunk."""
    rig = Rig()
    long = rig.submit(*range(100, 200))
    for _ in range(CHUNK):
        rig.answer(rig.launch() or pytest.fail("nothing to compute"))
    shorts = [rig.submit(*range(PAGE), last) for last in (50, 51)]
    rig.run(*shorts)
    assert not long.is_done
    assert sorted(short.started.num_cached for short in shorts) == [0, PAGE]


@pytest.mark.parametrize(("length", "cached"), [(16, 12), (17, 16), (4, 0), (5, 4), (1, 0)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    rig = Rig()
    rig.compute(*range(length))
    assert rig.compute(*range(length)).started.num_cached == cached


def test_prompts_share_their_common_prefix_only() -> None:
    rig = Rig()
    rig.compute(*range(20))
    other = rig.compute(*range(10), *range(100, 110))
    assert other.started.num_cached == 8
    again = rig.compute(*range(10), *range(100, 110), 7)
    assert again.started.num_cached == 20
    rig.check()


def test_counts_are_of_tokens() -> None:
    rig = Rig()
    for _ in range(2):
        rig.compute(*range(19))
    rig.compute(*range(19), caches=False)
    assert [rig.count(name) for name in ("queried_tokens", "matched_tokens", "reused_tokens")] == [
        38,
        16,
        16,
    ]


def test_a_request_without_cache_neither_finds_nor_leaves_pages() -> None:
    rig = Rig()
    rig.compute(*range(9), caches=False)
    assert rig.compute(*range(9)).started.num_cached == 0
    assert rig.compute(*range(9), caches=False).started.num_cached == 0
    assert rig.compute(*range(9)).started.num_cached == 8


def test_salts_keep_prompts_apart() -> None:
    rig = Rig()
    rig.compute(*range(9), salt="a")
    assert rig.compute(*range(9), salt="b").started.num_cached == 0
    assert rig.compute(*range(9), salt="a").started.num_cached == 8


def test_a_scored_prompt_is_computed_whole_and_cached() -> None:
    rig = Rig()
    rig.compute(*range(9))
    assert rig.compute(*range(9), num_prompt_logprobs=0).started.num_cached == 0
    rig.compute(*range(50, 59), num_prompt_logprobs=0)
    assert rig.compute(*range(50, 59)).started.num_cached == 8


def test_concurrent_prompts_compute_a_shared_prefix_once() -> None:
    rig = Rig(max_running=8)
    prompts = [rig.submit(*range(24), 100 + i) for i in range(5)]
    rig.run(*prompts)
    assert rig.num_computed == 25 + 4
    assert [prompt.started.num_cached for prompt in prompts] == [0, 24, 24, 24, 24]
    rig.check()


def test_a_prompt_with_nothing_in_common_is_not_held_up_by_those_that_wait() -> None:
    rig = Rig(max_running=8)
    first, waiting, other = rig.submit(*range(9)), rig.submit(*range(9)), rig.submit(*range(50, 54))
    batches = [rig.launch(), rig.launch()]
    assert [batch and batch.request_keys for batch in batches] == [
        (first.key,),
        (first.key, other.key),
    ]
    assert waiting.events == []


def test_a_more_urgent_prompt_does_not_wait_for_one_that_is_less() -> None:
    rig = Rig()
    slow = rig.submit(*range(24), priority=1)
    batch = rig.launch()
    urgent = rig.submit(*range(24), priority=-1)
    rig.run(urgent)
    assert not slow.is_done
    assert batch is not None
    rig.answer(batch)
    rig.run(slow)
    rig.check()


@pytest.mark.parametrize("ends", ["aborted", "failed"])
def test_a_prompt_computes_the_rest_if_the_one_it_waits_for_ends(ends: str) -> None:
    rig = Rig()
    first, second = rig.submit(*range(24), 1), rig.submit(*range(24), 2)
    for error in (None, StepFailed("no") if ends == "failed" else None):
        batch = rig.launch()
        assert batch is not None
        rig.answer(batch, error)
    rig.scheduler.release(first.key)
    rig.run(second)
    assert second.started.num_cached == (8 if ends == "failed" else 16)
    rig.scheduler.release(second.key)
    rig.check()


def test_a_batch_after_a_failed_one_leaves_nothing() -> None:
    """With several batches in flight the next chunk was computed from what the failed one did not
    write."""
    rig = Rig()
    prompt = rig.submit(*range(24))
    first, second = rig.launch(), rig.launch()
    assert first is not None
    assert second is not None
    rig.answer(first, StepFailed("no"))
    rig.answer(second)
    rig.scheduler.release(prompt.key)
    assert rig.compute(*range(24)).started.num_cached == 0
    rig.check()


def test_an_aborted_prompt_leaves_its_computed_pages() -> None:
    rig = Rig()
    prompt = rig.submit(*range(24))
    batch = rig.launch()
    assert batch is not None
    rig.scheduler.release(prompt.key)
    rig.answer(batch)
    rig.check()
    assert rig.compute(*range(24)).started.num_cached == 8


def test_cached_pages_are_evicted_before_a_prompt_waits_unless_held() -> None:
    rig = Rig(num_pages=11)
    rig.compute(*range(20))
    held = rig.submit(*range(20), 7)  # shares five pages, computes one
    rig.run(held)
    assert held.started.num_cached == 20
    rig.compute(*range(100, 115))  # four pages are free
    other = rig.compute(*range(200, 215))
    assert rig.count("evicted_pages", cause="pressure") >= 3
    assert not set(other.started.page_ids) & set(held.started.page_ids)
    waiting = rig.submit(*range(300, 320))
    assert rig.launch() is None, "five pages, and only four are not held"
    rig.scheduler.release(held.key)
    rig.run(waiting)
    rig.scheduler.release(waiting.key)
    rig.check()


def test_load_counts_cached_pages_as_free() -> None:
    rig = Rig()
    rig.compute(*range(20))
    assert rig.scheduler.pages.num_free < rig.scheduler.pages.num_total
    assert rig.scheduler.load().pages_free == rig.scheduler.pages.num_total


def test_a_lost_pipeline_takes_everything_with_it() -> None:
    rig = Rig()
    rig.compute(*range(20))
    running = rig.submit(*range(20), 7)
    rig.launch()
    rig.scheduler.on_pipeline_lost([], PeerLostError("stage 1 died"))
    rig.scheduler.release(running.key)
    rig.check()
    assert rig.scheduler.pages.num_free == rig.scheduler.pages.num_total
    assert rig.compute(*range(20)).started.num_cached == 0


def test_a_flush_leaves_those_that_run_their_pages() -> None:
    rig = Rig()
    rig.compute(*range(20))
    running = rig.submit(*range(20), 7)
    batch = rig.launch()
    assert batch is not None
    assert rig.scheduler.cache.clear() == 5
    rig.compute(*range(100, 140))
    rig.answer(batch)
    assert running.is_done
    rig.scheduler.release(running.key)
    rig.check()


def test_a_state_is_kept_at_the_end_of_a_prompt_and_at_branches() -> None:
    rig = Rig(num_slots=12)
    rig.compute(*range(30))
    assert rig.compute(*range(30)).started.num_cached == 24
    assert rig.compute(*range(30), 99, 98, 97).started.num_cached == 24
    parted = rig.compute(*range(19), *range(50, 70))
    assert parted.started.num_cached == 0, "no state was kept before the branch"
    assert rig.compute(*range(19), *range(70, 90)).started.num_cached == 16, "the junction"
    assert rig.compute(*range(19), *range(50, 70)).started.num_cached == 32
    rig.check()


@pytest.mark.parametrize(
    ("page", "cached"), [(2, 48), (4, 48), (6, 48), (12, 48), (16, 48), (5, 40), (7, 0)]
)
def test_a_prompt_resumes_from_the_last_page_with_a_state(page: int, cached: int) -> None:
    """At a multiple of the page's tokens and of the eight between states. The last of 50 tokens is
    always computed."""
    rig = Rig(num_slots=12, page=page)
    rig.compute(*range(50))
    assert rig.compute(*range(50)).started.num_cached == cached
    rig.check()


def test_stateful_prompts_wait_for_one_that_will_cache_their_state() -> None:
    rig = Rig(num_slots=12)
    prompts = [rig.submit(*range(30)) for _ in range(3)]
    rig.run(*prompts)
    assert [prompt.started.num_cached for prompt in prompts] == [0, 24, 24]


def test_requests_have_slots_before_states_do() -> None:
    rig = Rig(num_slots=4, max_running=3)  # three slots
    prompts = [rig.submit(*range(start, start + 20)) for start in (0, 100, 200)]
    rig.run(*prompts)
    assert not rig.scheduler.slots.ledger.kept_ids()
    for prompt in prompts[:2]:
        rig.scheduler.release(prompt.key)
    rig.compute(*range(300, 320))
    assert not rig.scheduler.slots.ledger.kept_ids(), "two more may start at any moment"
    rig.check()


def test_a_slot_for_a_request_is_taken_from_the_states() -> None:
    rig = Rig(num_slots=5, max_running=3)
    for start in (0, 100, 200):
        rig.compute(*range(start, start + 20))
    assert len(rig.scheduler.slots.ledger.kept_ids()) == 3
    prompts = [rig.submit(*range(start, start + 20)) for start in (300, 400, 500)]
    rig.run(*prompts)
    assert len(rig.scheduler.slots.ledger.kept_ids()) <= 1
    for prompt in prompts:
        rig.scheduler.release(prompt.key)
    rig.check()
    assert rig.scheduler.load().slots_free == 4


def test_the_state_a_request_continues_from_is_never_evicted_for_its_slot() -> None:
    """Its pages would go with it."""
    rig = Rig(num_slots=5, max_running=3)
    rig.compute(*range(20))
    rig.compute(*range(100, 120))
    assert len(rig.scheduler.slots.ledger.kept_ids()) == 2
    running = [rig.submit(*range(start, start + 20), caches=False) for start in (300, 400)]
    rig.run(*running)
    again = rig.submit(*range(20))
    rig.run(again)
    assert again.started.num_cached == 16
    for prompt in (*running, again):
        rig.scheduler.release(prompt.key)
    rig.check()


class PrefillHistories(CacheMachine):
    """Random histories of a small pool: prompts over few tokens come and go."""

    rig: Rig
    prompts = Bundle("prompts")

    @initialize(num_pages=st.integers(6, 30), num_slots=st.sampled_from((0, 0, 5, 7, 10)))
    def begin(self, num_pages: int, num_slots: int) -> None:
        self.rig = Rig(num_pages=num_pages, num_slots=num_slots)

    @rule(
        target=prompts,
        start=st.lists(st.sampled_from((0, 1)), min_size=1, max_size=4),
        tail=st.integers(0, 5),
        priority=st.integers(-1, 1),
        caches=st.booleans(),
    )
    def submit(self, *, start: list[int], tail: int, priority: int, caches: bool) -> object:
        tokens = [token for block in start for token in (block,) * PAGE] + [9] * tail
        if (
            len(tokens) > (self.rig.scheduler.pages.num_total) * PAGE
            or self.rig.scheduler.load().queued_requests > 8
        ):
            return None
        return self.rig.submit(*tokens, priority=priority, caches=caches)

    @rule(prompt=consumes(prompts))
    def release(self, prompt: Prompt | None) -> None:
        if prompt is not None:
            self.rig.scheduler.release(prompt.key)


TestPrefillHistories = PrefillHistories.TestCase
TestPrefillHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

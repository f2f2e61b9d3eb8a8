"""The prefill scheduler with hand-made results: chunks, packing, order, bounds, memory."""

import math
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from engine.core.batch import ForwardBatch
from engine.core.request import Request, SampledToken, SamplingParams
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepFailed, StepResult
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import DataRanks, EntryTable, Failed
from prefill.prompts import (
    FirstToken,
    PrefillEntry,
    PrefillEntryEvent,
    PrefillLimits,
    Scored,
    Started,
)
from prefill.scheduler import PrefillScheduler
from runtime.clock import Deadline, ManualClock
from runtime.digests import block_names
from runtime.errors import CapacityError, DeadlineError, InvalidRequestError, PeerLostError
from runtime.pace import MIN_PROMPTS


@dataclass
class Client:
    events: list[PrefillEntryEvent] = field(default_factory=list)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def make(
    *,
    num_pages: int = 100,
    chunk_tokens: int = 8,
    grid: int = 4,
    max_running: int = 4,
    max_queued: int = 4,
    num_slots: int = 0,
) -> PrefillScheduler:
    return PrefillScheduler(
        pages=PageAllocator(num_pages),
        slots=SlotAllocator(num_slots),
        limits=PrefillLimits(
            page_size=4,
            chunk_tokens=chunk_tokens,
            grid=grid,
            max_running=max_running,
            max_queued=max_queued,
        ),
        clock=ManualClock(),
    )


def submit(
    scheduler: PrefillScheduler, prompt: int, *, priority: int = 0, timeout_s: float = math.inf
) -> tuple[int, Client]:
    client = Client()
    wanted = Request("r", tuple(range(prompt)), 5, SamplingParams(temperature=0), priority=priority)
    return scheduler.submit(
        wanted, client.events.append, deadline=Deadline.after(scheduler.clock, timeout_s)
    ), client


def answer(scheduler: PrefillScheduler, batch: ForwardBatch) -> None:
    tokens = [
        SampledToken(key)
        for key, row in zip(batch.request_keys, batch.sampling, strict=True)
        if row is not None
    ]
    scheduler.on_result(batch, StepResult(0, tokens))


def spans(batch: ForwardBatch) -> list[tuple[int, int, int]]:
    """Return (key, from token, to token) per row."""
    return [
        (key, start, start + count)
        for key, start, count in zip(
            batch.request_keys, batch.context_lens, batch.query_lens, strict=True
        )
    ]


def drain(scheduler: PrefillScheduler) -> list[list[tuple[int, int, int]]]:
    seen = []
    while (batch := scheduler.next_batch()) is not None:
        seen.append(spans(batch))
        answer(scheduler, batch)
    return seen


def test_chunks_end_on_the_grid_and_only_the_last_one_samples() -> None:
    scheduler = make()
    key, client = submit(scheduler, 19)
    assert drain(scheduler) == [[(key, 0, 8)], [(key, 8, 16)], [(key, 16, 19)]]
    assert client.kinds() == ["Started", "FirstToken"]


def test_scores_leave_per_chunk_and_before_the_first_token() -> None:
    scheduler, client = make(), Client()
    wanted = Request(
        "r", tuple(range(100, 119)), 5, SamplingParams(temperature=0), num_prompt_logprobs=0
    )
    scheduler.submit(wanted, client.events.append)
    while (batch := scheduler.next_batch()) is not None:
        (row,) = batch.scoring
        assert row is not None
        scores = tuple(SampledToken(token) for token in row.next_token_ids)
        tokens = [SampledToken(7)] if batch.sampling[0] is not None else []
        scheduler.on_result(batch, StepResult(0, tokens, scores=[scores]))
    assert client.kinds() == ["Started", "Scored", "Scored", "Scored", "FirstToken"]
    scored = [event for event in client.events if isinstance(event, Scored)]
    assert [event.first_position for event in scored] == [1, 9, 17]
    assert [token.token_id for event in scored for token in event.tokens] == list(range(101, 119))


def test_a_batch_is_packed_over_requests_on_the_grid() -> None:
    scheduler = make()
    a, _ = submit(scheduler, 10)
    b, _ = submit(scheduler, 9)
    # The first batch is full with a. Then a's last 2 tokens leave room for 6, of which b may take
    # 4.
    assert drain(scheduler) == [[(a, 0, 8)], [(a, 8, 10), (b, 0, 4)], [(b, 4, 9)]]


def test_only_running_prompts_have_started() -> None:
    """Decode reserves for every started prompt: one without tokens in the batch stays in the
    queue."""
    scheduler = make(max_running=8, max_queued=8)
    clients = [
        submit(scheduler, prompt)[1] for prompt in (3, 11, 11, 11)
    ]  # 3 and 4 of 8 tokens leave less than a grid
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.num_rows == 2
    assert [client.kinds() for client in clients] == [["Started"], ["Started"], [], []]
    last, _ = submit(
        scheduler, 1, priority=-1
    )  # ends within a grid, so one token of budget is enough for it
    batch = scheduler.next_batch()
    assert batch is not None
    assert spans(batch) == [(last, 0, 1), (2, 4, 11)]


def test_the_most_urgent_starts_first_and_memory_is_leased_then() -> None:
    scheduler = make(max_running=1)
    late, late_client = submit(scheduler, 4, priority=1)
    urgent, _ = submit(scheduler, 4, priority=-1)
    free = scheduler.pages.num_free
    assert free == scheduler.pages.num_total, "a queued request holds nothing"
    assert drain(scheduler) == [[(urgent, 0, 4)]]
    assert late_client.events == []
    scheduler.release(urgent)
    assert drain(scheduler) == [[(late, 0, 4)]]


def long_beside(*, grid: int = 64, chunk_tokens: int = 512) -> tuple[PrefillScheduler, int]:
    """Start a prompt of 100,000 tokens."""
    scheduler = make(
        num_pages=100_000, chunk_tokens=chunk_tokens, grid=grid, max_running=16, max_queued=64
    )
    key, _ = submit(scheduler, 100_000)
    step(scheduler)
    return scheduler, key


def step(scheduler: PrefillScheduler) -> dict[int, int]:
    """Run one batch: tokens by key."""
    batch = scheduler.next_batch()
    assert batch is not None
    answer(scheduler, batch)
    return dict(zip(batch.request_keys, batch.query_lens, strict=True))


def test_an_urgent_prompt_runs_in_the_next_batch() -> None:
    """It used to wait for 192 batches, until the long one was done."""
    scheduler, long = long_beside()
    urgent, client = submit(scheduler, 32, priority=-100)
    assert step(scheduler) == {urgent: 32, long: 448}
    assert client.kinds() == ["Started", "FirstToken"]


def test_an_urgent_long_prompt_takes_the_chunks_of_one_that_has_begun() -> None:
    scheduler, long = long_beside()
    urgent, _ = submit(scheduler, 1000, priority=-1)
    assert [step(scheduler) for _ in range(2)] == [{urgent: 512}, {urgent: 488}]
    assert step(scheduler) == {long: 512}


def test_short_prompts_get_a_share_of_steps_with_a_long_one_and_no_more() -> None:
    scheduler, long = long_beside()
    clients = [submit(scheduler, 60)[1] for _ in range(8)]
    less_urgent, waiting = submit(scheduler, 10, priority=1)
    seen = [step(scheduler) for _ in range(8)]
    assert all(client.kinds() == ["Started", "FirstToken"] for client in clients)
    assert waiting.events == []
    assert (
        sum(tokens.get(long, 0) for tokens in seen) >= 8 * 512 * 3 // 4 - 512
    )  # a chunk of the share was saved
    assert less_urgent not in {key for tokens in seen for key in tokens}


def test_a_stream_of_short_prompts_leaves_a_long_one_its_share() -> None:
    scheduler, long = long_beside(chunk_tokens=64)  # one chunk of the grid: it is one or the other
    progress = 0
    for _ in range(200):
        while scheduler.load().queued_requests < 4:
            submit(scheduler, 30)
        tokens = step(scheduler)
        progress += tokens.get(long, 0)
        for key in set(tokens) - {long}:
            scheduler.release(key)
    assert 200 * 64 * 0.7 <= progress < 200 * 64 * 0.8


@pytest.mark.parametrize(("grid", "chunk_tokens"), [(1, 8), (4, 8), (64, 64), (64, 512)])
def test_every_chunk_ends_on_the_grid_or_with_its_prompt_in_any_order(
    grid: int, chunk_tokens: int
) -> None:
    """A chunk's bits depend on its borders and not on other rows, so any order is allowed."""
    scheduler = make(
        num_pages=10_000, chunk_tokens=chunk_tokens, grid=grid, max_running=8, max_queued=64
    )
    rng = Random(3)
    lengths: dict[int, int] = {}
    ends: dict[int, int] = {}
    for _ in range(400):
        if rng.random() < 0.3 and scheduler.load().queued_requests < 60:
            length = rng.choice([1, 30, 64, 100, 700, 3000])
            lengths[submit(scheduler, length, priority=rng.choice([-1, 0, 0, 1]))[0]] = length
        batch = scheduler.next_batch()
        if batch is None:
            continue
        answer(scheduler, batch)
        assert sum(batch.query_lens) <= chunk_tokens
        for key, start, end in spans(batch):
            assert start == ends.get(key, 0)
            assert end % grid == 0 or end == lengths[key]
            ends[key] = end
            if end == lengths[key]:
                scheduler.release(key)
    assert (
        any(ends.get(key) == length for key, length in lengths.items() if length == 3000)
        or chunk_tokens == 8
    )
    scheduler.on_idle()


class CountedEntries(EntryTable[PrefillEntry]):
    """Entries that count their reads."""

    num_looks = 0

    def __getitem__(self, key: int) -> PrefillEntry:
        self.num_looks += 1
        return super().__getitem__(key)


def test_a_step_looks_at_each_waiting_prompt_a_few_times() -> None:
    """It does not scan all of them again for each short one."""
    scheduler, entries, count = (
        make(num_pages=5000, chunk_tokens=64, max_queued=1001),
        CountedEntries(),
        1000,
    )
    scheduler._entries = entries
    submit(scheduler, 4000)
    for _ in range(count):
        submit(scheduler, 9, timeout_s=1000)
    batch = scheduler.next_batch()
    assert batch is not None
    assert len(batch.request_keys) > 1, "one of the short ones had its share"
    assert entries.num_looks < 5 * count


def test_a_short_prompt_takes_no_memory_from_the_next_in_order() -> None:
    scheduler = make(num_pages=61, chunk_tokens=8, grid=4, max_running=4)
    long, _ = submit(scheduler, 160)  # 40 of 60 pages
    step(scheduler)
    _, blocked_client = submit(scheduler, 100)  # 25 pages, where 20 are left
    _, short_client = submit(scheduler, 4)
    for _ in range(8):
        assert set(step(scheduler)) == {long}
    assert blocked_client.events == short_client.events == []


def test_a_released_prompt_runs_no_further_though_a_batch_is_on_its_way() -> None:
    """With as many batches in flight as there are stages it would be computed to its end in
    vain."""
    scheduler = make()
    key, _ = submit(scheduler, 40)
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.release(key)
    assert scheduler.next_batch() is None
    answer(scheduler, batch)
    assert scheduler.pages.num_free == scheduler.pages.num_total


def test_chunks_of_one_prompt_may_be_in_flight_together() -> None:
    scheduler = make()
    key, client = submit(scheduler, 16)
    first, second = scheduler.next_batch(), scheduler.next_batch()
    assert first is not None
    assert second is not None
    assert (spans(first), spans(second)) == ([(key, 0, 8)], [(key, 8, 16)])
    answer(scheduler, first)
    assert client.kinds() == ["Started"]
    answer(scheduler, second)
    assert client.kinds() == ["Started", "FirstToken"]


def test_memory_lives_until_release_and_release_waits_for_the_batch() -> None:
    scheduler = make()
    key, _ = submit(scheduler, 4)
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.release(key)
    assert scheduler.pages.num_free < scheduler.pages.num_total
    answer(scheduler, batch)
    assert scheduler.pages.num_free == scheduler.pages.num_total
    scheduler.on_idle()


def test_a_queued_request_can_be_released() -> None:
    scheduler = make()
    key, client = submit(scheduler, 4)
    scheduler.release(key)
    assert scheduler.next_batch() is None
    assert client.events == []
    assert scheduler.load().queued_requests == 0


def test_the_queue_is_bounded_and_impossible_prompts_are_refused() -> None:
    scheduler = make(num_pages=3, max_queued=1)
    with pytest.raises(InvalidRequestError, match="9 tokens need 3 pages, the prefill pool has 2"):
        submit(scheduler, 9)
    submit(scheduler, 4)
    with pytest.raises(CapacityError, match="the limit is 1"):
        submit(scheduler, 4)


def test_a_prompt_waits_for_pages_without_being_passed() -> None:
    scheduler = make(num_pages=4, max_queued=4)
    a, _ = submit(scheduler, 8)
    b, b_client = submit(scheduler, 8)
    c, c_client = submit(scheduler, 1)
    assert drain(scheduler) == [[(a, 0, 8)]]
    assert b_client.events == c_client.events == []
    scheduler.release(a)
    assert drain(scheduler) == [[(b, 0, 8)], [(c, 0, 1)]]


def test_a_failed_step_and_a_lost_pipeline_notify_every_owner() -> None:
    scheduler = make()
    a, a_client = submit(scheduler, 4)
    batch = scheduler.next_batch()
    assert batch is not None
    error = StepFailed("stage 0: no")
    scheduler.on_result(batch, StepResult(0, [], error))
    b, b_client = submit(scheduler, 4)
    lost = PeerLostError("stage 1 died")
    scheduler.on_pipeline_lost([], lost)
    assert [event for event in a_client.events if isinstance(event, Failed)] == [
        Failed(error),
        Failed(lost),
    ]
    assert b_client.events == [Failed(lost)]
    for key in (a, b):
        scheduler.release(key)
    assert scheduler.load().running_requests == 0
    assert scheduler.pages.num_free == scheduler.pages.num_total
    scheduler.on_idle()


def cached(
    num_slots: int = 0, max_running: int = 4, *, has_states: bool = False
) -> PrefillScheduler:
    return replace(
        make(num_slots=num_slots, max_running=max_running), cache_rule=ResumeRule(4, 4, has_states)
    )


def submit_named(
    scheduler: PrefillScheduler, prompt: int, first: int = 0, *, timeout_s: float = math.inf
) -> tuple[int, Client]:
    client, tokens = Client(), tuple(range(first, first + prompt))
    wanted = Request("r", tokens, 1, SamplingParams(temperature=0))
    return scheduler.submit(
        wanted,
        client.events.append,
        blocks=block_names(tokens, 4, compatibility="x"),
        deadline=Deadline.after(scheduler.clock, timeout_s),
    ), client


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "waited for"])
def test_chunks_after_a_failed_one_are_neither_cached_nor_sent(*, is_released: bool) -> None:
    """Two stages have a chunk each; the first fails, and the second computes from what it left."""
    scheduler = cached()
    key, client = submit_named(scheduler, 16)
    first, second = scheduler.next_batch(), scheduler.next_batch()
    assert first is not None
    assert second is not None
    if is_released:
        scheduler.release(key)
    scheduler.on_result(first, StepResult(0, [], StepFailed("stage 1: no")))
    answer(scheduler, second)
    assert client.kinds() == ["Started"] + ["Failed"] * (not is_released)
    scheduler.release(key)
    _, other = submit_named(scheduler, 16)
    scheduler.next_batch()
    (started,) = other.events
    assert isinstance(started, Started)
    assert started.num_cached == 0


def test_a_request_that_failed_in_the_queue_holds_no_slot() -> None:
    """The last free one is for a prompt that may start, not for a snapshot."""
    scheduler = cached(num_slots=2, max_running=1, has_states=True)
    clock = scheduler.clock
    assert isinstance(clock, ManualClock)
    submit_named(scheduler, 20)
    submit_named(scheduler, 20, 900, timeout_s=1.0)
    first = scheduler.next_batch()
    assert first is not None
    answer(scheduler, first)
    clock.advance(2)
    assert drain(scheduler)


def test_started_names_the_pages_in_order_and_the_slot() -> None:
    scheduler = make(num_slots=3)
    _, client = submit(scheduler, 9)
    scheduler.next_batch()
    assert isinstance(client.events[0], Started)
    assert len(client.events[0].page_ids) == 3
    assert client.events[0].slot_id in (1, 2)
    assert not any(isinstance(event, FirstToken) for event in client.events)


@pytest.mark.parametrize("num_steps", range(6))
def test_s4_7_slots_and_pages_return_from_every_step(num_steps: int) -> None:
    """Aborted while queued, started, in a batch, between chunks, with its first token: nothing
    leaks."""
    scheduler = make(num_slots=2, max_running=2)
    key, _ = submit(scheduler, 10)
    batch: ForwardBatch | None = None
    for step in range(num_steps):
        if step % 2 == 0:
            batch = scheduler.next_batch()
        elif batch is not None:
            answer(scheduler, batch)
            batch = None
    scheduler.release(key)
    if batch is not None:
        assert scheduler.slots.num_free < scheduler.slots.num_total, "its batch is still on the way"
        answer(scheduler, batch)
    assert (scheduler.pages.num_free, scheduler.slots.num_free) == (
        scheduler.pages.num_total,
        scheduler.slots.num_total,
    )
    scheduler.on_idle()


def failure(client: Client) -> BaseException | None:
    return next((event.error for event in client.events if isinstance(event, Failed)), None)


def test_an_expired_prompt_is_never_computed() -> None:
    scheduler = make(num_slots=3)
    assert isinstance(scheduler.clock, ManualClock)
    late, late_client = submit(scheduler, 4, timeout_s=1.0)
    punctual, _ = submit(scheduler, 4, timeout_s=3.0)
    scheduler.clock.advance(2.0)
    assert drain(scheduler) == [[(punctual, 0, 4)]]
    assert isinstance(failure(late_client), DeadlineError)
    assert late_client.kinds() == ["Failed"], "once, and before it had memory"
    assert scheduler.load().queued_requests == 0
    for key in (late, punctual):
        scheduler.release(key)
    scheduler.on_idle()


def at_a_hundred_tokens_per_s() -> PrefillScheduler:
    """Train the estimate with a few prompts of 64 tokens, eight at a time."""
    scheduler = make(num_pages=1000, max_running=8, max_queued=8)
    assert isinstance(scheduler.clock, ManualClock)
    for _ in range(MIN_PROMPTS):
        key, _ = submit(scheduler, 64)
        while (batch := scheduler.next_batch()) is not None:
            scheduler.clock.advance(0.08)
            answer(scheduler, batch)
        scheduler.release(key)
    return scheduler


def test_a_prompt_that_cannot_finish_in_time_is_not_started() -> None:
    scheduler = at_a_hundred_tokens_per_s()
    hopeless, client = submit(scheduler, 800, timeout_s=7.9)
    possible, _ = submit(scheduler, 800, timeout_s=8.1)
    batch = scheduler.next_batch()
    assert batch is not None
    assert spans(batch) == [(possible, 0, 8)]
    assert isinstance(failure(client), DeadlineError)
    assert "800 tokens of the prompt cannot be computed within the 7.9 s" in str(failure(client))
    assert (hopeless, client.kinds()) == (possible - 1, ["Failed"])


def test_a_prompt_that_cannot_finish_in_time_is_abandoned() -> None:
    scheduler = at_a_hundred_tokens_per_s()
    assert isinstance(scheduler.clock, ManualClock)
    key, client = submit(scheduler, 800, timeout_s=9.0)
    first = scheduler.next_batch()
    assert first is not None
    scheduler.clock.advance(
        2.0
    )  # others kept the device busy: 792 tokens and seven seconds are left
    assert scheduler.next_batch() is None
    assert client.kinds() == ["Started", "Failed"]
    answer(scheduler, first)
    scheduler.release(key)
    assert scheduler.pages.num_free == scheduler.pages.num_total
    scheduler.on_idle()


def test_a_census_separates_running_prompts_from_those_in_handoff() -> None:
    scheduler = make(max_running=2)
    done, _ = submit(scheduler, 3)
    submit(scheduler, 20)
    submit(scheduler, 4)
    first = scheduler.next_batch()
    assert first is not None
    answer(scheduler, first)
    assert isinstance(scheduler.clock, ManualClock)
    scheduler.clock.advance(3.0)
    occupancy = scheduler.occupancy()
    assert occupancy.leases == {"computing": 1, "handoff": 1}
    assert (occupancy.num_pages_held, occupancy.oldest_s) == (
        1,
        3.0,
    )  # three tokens on pages of four; the third one waits
    scheduler.release(done)
    assert scheduler.occupancy().leases == {"computing": 1, "handoff": 0}


def test_a_data_rank_with_a_full_queue_stops_no_other() -> None:
    """The first choice has fewest tokens queued, in as many prompts as it may."""
    ranks = DataRanks((make(max_queued=2), make(max_queued=2)))

    def place(num_tokens: int) -> int:
        wanted = Request("r", tuple(range(num_tokens)), 5, SamplingParams(temperature=0))

        def admit(scheduler: PrefillScheduler) -> PrefillScheduler:
            scheduler.submit(wanted, lambda event: None)
            return scheduler

        return ranks.schedulers.index(ranks.place(wanted, (), admit))

    assert [place(num_tokens) for num_tokens in (40, 1, 1)] == [0, 1, 1]
    assert place(1) == 0
    with pytest.raises(CapacityError, match="2 prompts are queued, the limit is 2"):
        place(1)


def test_the_preferred_data_rank_counts_what_others_will_queue() -> None:
    ranks = DataRanks((make(max_queued=1), make()))
    wanted = Request("r", tuple(range(8)), 5, SamplingParams(temperature=0))

    def place(first: int | None = None) -> int:
        def admit(scheduler: PrefillScheduler) -> PrefillScheduler:
            scheduler.submit(wanted, lambda event: None)
            return scheduler

        return ranks.schedulers.index(ranks.place(wanted, (), admit, first))

    assert ranks.preferred(wanted, (), (0, 0)) == 0
    assert ranks.preferred(wanted, (), (1, 0)) == 1
    assert place(first=1) == 1, "it goes first, though the other is as good"
    assert ranks.preferred(wanted, (), (0, 0)) == 0
    assert place(first=1) == 1
    assert place(first=0) == 0
    assert place(first=0) == 1, "if there is room"

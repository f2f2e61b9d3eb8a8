"""The decode scheduler with hand-made results: what runs, what waits, what is given back."""

import math
from dataclasses import dataclass, field, replace

import pytest

from decode.entry import DecodeEntryEvent, DecodeLimits, Finished, Generated
from decode.scheduler import DecodeScheduler
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo
from engine.core.request import ClientShare, FinishReason, Request, SampledToken, SamplingParams
from engine.memory.budget import decode_requests
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepFailed, StepResult
from pool.request.entry import Failed
from runtime.clock import Deadline, ManualClock
from runtime.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
)


@dataclass
class Client:
    events: list[DecodeEntryEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [
            token.token_id
            for event in self.events
            if isinstance(event, Generated)
            for token in event.tokens
        ]

    @property
    def last(self) -> DecodeEntryEvent:
        return self.events[-1]


def make(
    *,
    num_pages: int = 20,
    page_size: int = 4,
    depth: int = 1,
    max_running: int = 4,
    num_slots: int = 0,
    grid: int = 1,
    replay_tokens: int = 1,
) -> DecodeScheduler:
    return DecodeScheduler(
        pages=PageAllocator(num_pages),
        slots=SlotAllocator(num_slots),
        limits=DecodeLimits(
            page_size=page_size,
            grid=grid,
            depth=depth,
            max_running=max_running,
            max_context_tokens=64,
            chunk_tokens=8,
            growth_tokens=page_size,
            has_states=grid > 1,
            replay_tokens=replay_tokens,
        ),
        clock=ManualClock(),
    )


def request(
    prompt: int = 5, max_tokens: int = 8, *, priority: int = 0, stop: frozenset[int] = frozenset()
) -> Request:
    return Request(
        "r",
        tuple(range(1, prompt + 1)),
        max_tokens,
        SamplingParams(temperature=0),
        priority=priority,
        stop_token_ids=stop,
    )


def joined(
    scheduler: DecodeScheduler,
    wanted: Request,
    first_token: int = 100,
    *,
    timeout_s: float = math.inf,
) -> tuple[int, Client]:
    client = Client()
    key = scheduler.reserve(
        wanted, client.events.append, deadline=Deadline.after(scheduler.clock, timeout_s)
    ).key
    scheduler.join(key, first_token)
    return key, client


def answer(scheduler: DecodeScheduler, batch: ForwardBatch) -> None:
    """Give every sampling row the token 100 + position of the sampled token."""
    tokens = [SampledToken(100 + row.position) for row in batch.sampling if row is not None]
    scheduler.on_result(batch, StepResult(0, tokens))


def run(scheduler: DecodeScheduler, steps: int) -> list[ForwardBatch]:
    batches = []
    for _ in range(steps):
        batch = scheduler.next_batch()
        if batch is None:
            break
        batches.append(batch)
        answer(scheduler, batch)
    return batches


def test_a_joined_request_decodes_without_a_prefill() -> None:
    scheduler = make()
    _, client = joined(scheduler, request(prompt=5, max_tokens=4))
    batches = run(scheduler, 9)
    assert [batch.mode for batch in batches] == [ForwardMode.DECODE] * 3
    assert batches[0].token_ids is not None
    assert batches[0].token_ids.tolist() == [100]
    assert batches[0].context_lens == (5,)
    assert batches[0].positions.tolist() == [5]
    assert client.tokens == [106, 107, 108]
    assert isinstance(client.last, Finished)
    assert client.last.reason is FinishReason.LENGTH
    assert scheduler.pages.num_free == scheduler.pages.num_total
    scheduler.on_idle()


def test_a_first_token_that_ends_the_request_never_runs() -> None:
    scheduler = make()
    _, client = joined(scheduler, request(stop=frozenset({100})))
    assert scheduler.next_batch() is None
    assert client.events == [Finished(FinishReason.STOP, 100, 0.0, 0.0, 0)]
    _, client = joined(scheduler, request(max_tokens=1))
    assert client.events == [Finished(FinishReason.LENGTH, None, 0.0, 0.0, 0)]
    scheduler.on_idle()


@pytest.mark.parametrize("num_replayed", [0, 1, 5, 8])
def test_tokens_of_another_pool_are_recomputed_and_not_sent_again(num_replayed: int) -> None:
    """A request moves here after its first token and `num_replayed` more; the eighth of nine ends
    it there, too. If chunks are on a grid, the output is computed as it was decoded."""
    scheduler, wanted = make(grid=4), request(prompt=5, max_tokens=9)
    client = Client()
    replayed = [106 + i for i in range(num_replayed)]
    key = scheduler.reserve(wanted, client.events.append, replayed=replayed).key
    scheduler.join(key, 105)
    batches = run(scheduler, 20)
    assert client.tokens == [106 + i for i in range(num_replayed, 8)]
    assert isinstance(client.last, Finished)
    assert client.last.reason is FinishReason.LENGTH
    draws = [batch.sampling[0] is not None for batch in batches]
    assert draws == [False] * min(num_replayed, len(batches)) + [True] * (8 - num_replayed)
    assert [batch.token_ids.tolist() for batch in batches if batch.token_ids is not None] == [
        [105 + i] for i in range(len(batches))
    ]
    scheduler.on_idle()


@pytest.mark.parametrize(
    ("num_replayed", "chunks"), [(0, []), (1, [1]), (5, [5]), (8, []), (20, [8, 8, 4])]
)
def test_output_of_another_pool_is_prefilled_if_the_grid_allows(
    num_replayed: int, chunks: list[int]
) -> None:
    scheduler, client = make(), Client()
    wanted = request(prompt=5, max_tokens=30 if num_replayed == 20 else 9)
    key = scheduler.reserve(
        wanted, client.events.append, replayed=[106 + i for i in range(num_replayed)]
    ).key
    scheduler.join(key, 105)
    batches = run(scheduler, 40)
    read = [batch for batch in batches if batch.mode is ForwardMode.PREFILL]
    assert [batch.num_tokens for batch in read] == chunks
    assert [
        token
        for batch in batches
        if batch.token_ids is not None
        for token in batch.token_ids.tolist()
    ] == [105 + i for i in range(wanted.max_tokens - 1)][
        : sum(batch.num_tokens for batch in batches)
    ]
    assert client.tokens == [106 + i for i in range(num_replayed, wanted.max_tokens - 1)]
    assert all(sampling is None for batch in read for sampling in batch.sampling), (
        "a replay draws nothing"
    )
    scheduler.on_idle()


def test_reserving_takes_prompt_and_growth_or_nothing() -> None:
    scheduler = make(num_pages=5)  # four usable pages of four tokens
    reservation = scheduler.reserve(request(prompt=5), lambda event: None)
    assert len(reservation.prompt_page_ids) == 2
    assert scheduler.pages.num_free == 1  # a third page for growth
    with pytest.raises(CapacityError) as refused:
        scheduler.reserve(request(prompt=5), lambda event: None)
    assert refused.value.resource == "pages"
    assert scheduler.pages.num_free == 1
    scheduler.release(reservation.key)
    assert scheduler.pages.num_free == 4


def test_a_request_that_could_never_fit_is_refused_by_field() -> None:
    with pytest.raises(
        InvalidRequestError, match="max_tokens: prompt of 5 and max_tokens 60 are 65 tokens"
    ):
        make(num_pages=99).reserve(request(prompt=5, max_tokens=60), lambda event: None)


def test_running_requests_are_bounded() -> None:
    scheduler = make(max_running=1)
    joined(scheduler, request())
    with pytest.raises(CapacityError, match="the limit is 1"):
        scheduler.reserve(request(), lambda event: None)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_deeper_pipeline_gets_as_many_micro_batches(depth: int) -> None:
    scheduler = make(depth=depth, max_running=6, num_pages=99)
    for _ in range(6):
        joined(scheduler, request())
    in_flight = [scheduler.next_batch() for _ in range(depth)]
    assert [batch.num_rows for batch in in_flight if batch is not None] == [6 // depth] * depth
    assert scheduler.next_batch() is None
    keys = [key for batch in in_flight if batch is not None for key in batch.request_keys]
    assert len(set(keys)) == 6


def test_out_of_pages_sets_the_youngest_back_and_replays_it_exactly() -> None:
    scheduler = make(num_pages=7)  # six usable pages; both want four in the end
    _, first = joined(scheduler, request(prompt=5, max_tokens=9))
    _, second = joined(scheduler, request(prompt=5, max_tokens=9))
    batches = run(scheduler, 60)
    for client in (first, second):
        assert client.tokens == [105 + i for i in range(1, 9)]
        assert isinstance(client.last, Finished)
    assert isinstance(first.last, Finished)
    assert isinstance(second.last, Finished)
    assert (first.last.num_preemptions, second.last.num_preemptions) == (0, 1)
    replayed = [batch for batch in batches if batch.mode is ForwardMode.PREFILL]
    assert [batch.context_lens for batch in replayed] == [
        (0,),
        (8,),
    ]  # of prompt and output, by chunks of 8
    assert [batch.sampling for batch in replayed] == [(None,)] * 2, "a replay draws nothing"
    scheduler.on_idle()


def test_output_before_a_move_is_replayed_many_tokens_at_a_time() -> None:
    """With states it must not be prefilled. A stream goes on beside it."""
    scheduler = make(grid=64, num_slots=4, replay_tokens=4)
    _, stream = joined(scheduler, request(prompt=3, max_tokens=5))
    moved = Client()
    known = [105 + position for position in range(1, 11)]
    key = scheduler.reserve(request(max_tokens=14), moved.events.append, replayed=known).key
    scheduler.join(key, 105)
    batches = run(scheduler, 30)
    of_moved = [
        (batch.mode, batch.query_lens[-1], batch.context_lens[-1], batch.sampling[-1] is not None)
        for batch in batches
        if batch.request_keys[-1] == key
    ]
    assert of_moved[:4] == [
        (ForwardMode.REPLAY, 4, 5, False),
        (ForwardMode.REPLAY, 4, 9, False),
        (ForwardMode.REPLAY, 3, 13, True),
        (ForwardMode.DECODE, 1, 16, True),
    ]
    assert all(batch.query_lens[0] == 1 for batch in batches)
    assert stream.tokens == [104, 105, 106, 107]
    assert moved.tokens == [116, 117, 118]


def test_replays_of_many_requests_share_the_tokens_of_a_step() -> None:
    scheduler = make(grid=64, num_slots=4, replay_tokens=4, num_pages=40)
    for _ in range(3):
        replayed = [105 + position for position in range(1, 9)]
        key = scheduler.reserve(request(max_tokens=12), lambda event: None, replayed=replayed).key
        scheduler.join(key, 105)
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.query_lens == (2, 2, 2)  # of `chunk_tokens`, 8


def test_priority_decides_which_request_is_preempted() -> None:
    scheduler = make(num_pages=7)
    _, urgent = joined(scheduler, request(max_tokens=9, priority=5))
    _, relaxed = joined(scheduler, request(max_tokens=9, priority=-5))
    run(scheduler, 60)
    assert isinstance(urgent.last, Finished)
    assert isinstance(relaxed.last, Finished)
    assert (urgent.last.num_preemptions, relaxed.last.num_preemptions) == (1, 0)


@pytest.mark.parametrize(("weight", "preempted"), [(1.0, [0, 1, 0]), (4.0, [0, 0, 1])])
def test_the_client_with_most_pages_for_its_weight_gives_way(
    weight: float, preempted: list[int]
) -> None:
    """The youngest request is the other client's only one."""
    scheduler = make(num_pages=11)
    shares = [ClientShare(b"hog", weight)] * 2 + [ClientShare(b"other")]
    clients = [
        joined(scheduler, replace(request(prompt=5, max_tokens=9), share=share))[1]
        for share in shares
    ]
    run(scheduler, 80)
    ends = [client.last for client in clients]
    assert [end.num_preemptions for end in ends if isinstance(end, Finished)] == preempted


def test_nothing_new_is_admitted_while_a_preempted_request_waits() -> None:
    scheduler = make(num_pages=7)
    joined(scheduler, request(max_tokens=9))
    joined(scheduler, request(max_tokens=9))
    while scheduler.load().queued_requests == 0:
        run(scheduler, 1)
    with pytest.raises(CapacityError, match="preempted"):
        scheduler.reserve(request(prompt=1, max_tokens=1), lambda event: None)


def test_release_in_flight_frees_only_when_the_batch_is_back() -> None:
    scheduler = make()
    key, client = joined(scheduler, request())
    batch = scheduler.next_batch()
    assert batch is not None
    free = scheduler.pages.num_free
    scheduler.release(key)
    assert scheduler.pages.num_free == free
    answer(scheduler, batch)
    assert scheduler.pages.num_free == scheduler.pages.num_total
    assert client.events == []
    scheduler.release(key)


def test_a_failed_step_fails_its_rows_and_keeps_their_memory() -> None:
    scheduler = make()
    key, client = joined(scheduler, request())
    batch = scheduler.next_batch()
    assert batch is not None
    error = StepFailed("stage 1: no")
    scheduler.on_result(batch, StepResult(0, [], error))
    assert client.events == [Failed(error)]
    assert scheduler.next_batch() is None
    assert scheduler.pages.num_free < scheduler.pages.num_total
    scheduler.release(key)
    assert scheduler.pages.num_free == scheduler.pages.num_total


def test_a_lost_pipeline_fails_reserved_running_and_waiting_requests() -> None:
    scheduler = make(num_pages=7)
    clients = [joined(scheduler, request(max_tokens=16)) for _ in range(2)]
    while scheduler.load().queued_requests == 0:
        run(scheduler, 1)
    batch = scheduler.next_batch()
    assert batch is not None
    error = PeerLostError("stage 1 died")
    scheduler.on_pipeline_lost([batch], error)
    assert [client.last for _, client in clients] == [Failed(error)] * 2
    for key, _ in clients:
        scheduler.release(key)
    assert scheduler.pages.num_free == scheduler.pages.num_total
    scheduler.on_idle()


def test_no_step_includes_an_expired_request() -> None:
    scheduler = make()
    assert isinstance(scheduler.clock, ManualClock)
    late, late_client = joined(scheduler, request(), timeout_s=5.0)
    punctual, _ = joined(scheduler, request(), timeout_s=50.0)
    both = scheduler.next_batch()
    assert both is not None
    assert both.request_keys == (late, punctual)
    scheduler.clock.advance(6.0)
    assert scheduler.next_batch() is None, "both are in flight"
    answer(scheduler, both)
    assert late_client.tokens == [106], "what was computed is published"
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.request_keys == (punctual,)
    assert isinstance(late_client.last, Failed)
    assert isinstance(late_client.last.error, DeadlineError)
    scheduler.release(late)
    answer(scheduler, batch)
    scheduler.release(punctual)
    assert scheduler.pages.num_free == scheduler.pages.num_total
    scheduler.on_idle()


def test_no_replay_includes_an_expired_request() -> None:
    """The replay would be the prompt and all generated tokens."""
    scheduler = make(num_pages=7)
    assert isinstance(scheduler.clock, ManualClock)
    oldest, _ = joined(scheduler, request(max_tokens=16))
    _, late = joined(scheduler, request(max_tokens=16), timeout_s=5.0)
    while scheduler.load().queued_requests == 0:
        run(scheduler, 1)
    scheduler.clock.advance(6.0)
    modes = {(batch.mode, batch.request_keys) for batch in run(scheduler, 60)}
    assert modes == {(ForwardMode.DECODE, (oldest,))}
    assert isinstance(late.last, Failed)
    assert isinstance(late.last.error, DeadlineError)
    scheduler.on_idle()


def test_every_request_ends_and_memory_returns_under_pressure() -> None:
    scheduler = make(num_pages=12, depth=2, max_running=8, num_slots=9)
    clients = []
    for i in range(40):
        try:
            clients.append(
                joined(scheduler, request(prompt=1 + i % 7, max_tokens=1 + i % 11, priority=i % 3))[
                    1
                ]
            )
        except CapacityError:
            run(scheduler, 5)
    run(scheduler, 2000)
    assert clients
    assert all(isinstance(client.last, Finished) for client in clients)
    assert scheduler.pages.num_free == scheduler.pages.num_total
    assert scheduler.slots.num_free == scheduler.slots.num_total


def test_s4_6_more_may_be_held_than_run_and_all_take_their_turns() -> None:
    scheduler = DecodeScheduler(
        pages=PageAllocator(99),
        slots=SlotAllocator(0),
        limits=DecodeLimits(
            page_size=4,
            grid=1,
            depth=1,
            max_running=2,
            max_held=decode_requests(2),
            max_context_tokens=64,
        ),
        clock=ManualClock(),
    )
    clients = [joined(scheduler, request(max_tokens=5))[1] for _ in range(6)]
    with pytest.raises(CapacityError, match="6 requests hold memory, the limit is 6"):
        scheduler.reserve(request(), lambda event: None)
    batches = run(scheduler, 3)
    assert [batch.num_rows for batch in batches] == [2, 2, 2]
    assert len({key for batch in batches for key in batch.request_keys}) == 6
    run(scheduler, 100)
    assert all(isinstance(client.last, Finished) for client in clients)


def test_a_request_without_tree_states_takes_plain_steps_until_some_free() -> None:
    """Two requests that came from another pool with five tokens, and room for the states of one."""
    scheduler = DecodeScheduler(
        pages=PageAllocator(20),
        slots=SlotAllocator(4),
        scratch=SlotAllocator(2),
        clock=ManualClock(),
        limits=DecodeLimits(
            page_size=4,
            grid=64,
            depth=2,
            max_running=1,
            max_held=2,
            max_context_tokens=64,
            growth_tokens=4,
            num_draft_tokens=3,
            has_states=True,
        ),
    )
    keys = []
    for _ in range(2):
        keys.append(
            scheduler.reserve(request(), lambda event: None, replayed=[106, 107, 108, 109]).key
        )
        scheduler.join(keys[-1], 105)
    first, second = scheduler.next_batch(), scheduler.next_batch()
    assert first is not None
    assert second is not None
    assert [shape(first), shape(second)] == [
        (ForwardMode.VERIFY, 4, 3, 1),
        (ForwardMode.DECODE, 1, 0, 0),
    ]
    scheduler.on_result(first, StepResult(1, []))
    scheduler.release(keys[0])
    scheduler.on_result(second, StepResult(2, []))
    third = scheduler.next_batch()
    assert third is not None
    assert shape(third) == (ForwardMode.VERIFY, 3, 3, 1)
    scheduler.release(keys[1])
    scheduler.on_result(third, StepResult(3, []))
    scheduler.on_idle()
    assert scheduler.scratch.num_free == 1


def test_a_leaked_record_of_states_is_found_when_idle() -> None:
    scheduler = make()
    scheduler.scratch = SlotAllocator(2, name="states of trees")
    scheduler.scratch.alloc(owner="request 7")
    with pytest.raises(InternalError, match=r"states of trees.*leaked by request 7"):
        scheduler.on_idle()


def shape(batch: ForwardBatch) -> tuple[ForwardMode, int, int | None, int]:
    """Return mode, tokens, nodes of the next tree and record of a batch of one row."""
    assert isinstance(batch.spec_info, SpecInfo)
    (row,) = batch.spec_info.rows
    return batch.mode, batch.num_tokens, row.num_draft_tokens, row.scratch

"""Scores that a client does not read are held back, and nothing passes them."""

import pytest

from pool.request.router_call import Outlet
from prefill.service import MAX_UNREAD_SCORES, PrefillOutlet
from protos import prefill_pb2 as pb
from protos import types_pb2
from runtime.clock import ManualClock
from runtime.errors import InvalidRequestError
from runtime.rpc.calls import MessageLimits, SendQueue


def scores(position: int, count: int = 1) -> types_pb2.PromptLogprobs:
    return types_pb2.PromptLogprobs(first_position=position, token_ids=range(count))


def outlet_of(max_tokens: int = 16384) -> tuple[PrefillOutlet, SendQueue[pb.PrefillEvent]]:
    queue = SendQueue[pb.PrefillEvent](MessageLimits(256, max_tokens))
    return PrefillOutlet(Outlet(queue, 5)), queue


def read(count: int) -> pb.PrefillScoresRead:
    return pb.PrefillScoresRead(count=count)


async def taken(queue: SendQueue[pb.PrefillEvent]) -> list[int | str | None]:
    """The positions of scores, and what else came; empty if nothing waits."""
    events = await queue.take() if len(queue) else []
    assert all(event.key == 5 for event in events)
    return [
        event.scored.first_position if event.HasField("scored") else event.WhichOneof("event")
        for event in events
    ]


async def test_scores_go_as_far_as_they_are_read_and_what_follows_waits_behind_them() -> None:
    outlet, queue = outlet_of()
    outlet.started(pb.PrefillStarted())
    count = MAX_UNREAD_SCORES + 3
    for position in range(count):
        outlet.scored(scores(position))
    outlet.first_token(pb.PrefillFirstToken())
    outlet.sent(pb.PrefillSent())
    assert await taken(queue) == ["started", *range(MAX_UNREAD_SCORES)]
    assert outlet.is_held_up
    outlet.scores_read(read(1))
    assert await taken(queue) == [MAX_UNREAD_SCORES]
    outlet.scores_read(read(2))
    assert await taken(queue) == [count - 2, count - 1, "first_token", "sent"]
    assert not outlet.is_held_up
    outlet.scores_read(read(MAX_UNREAD_SCORES))


async def test_waits_for_the_client_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr("prefill.service.time.monotonic", clock.now)
    outlet, _ = outlet_of()
    for position in range(MAX_UNREAD_SCORES):
        outlet.scored(scores(position))
        clock.advance(1.0)
    assert outlet.held_s == 0
    for position in range(3):  # each message that is read lets one more go
        outlet.scored(scores(position))
    clock.advance(5.0)
    outlet.scores_read(read(1))
    assert outlet.held_s == 5
    clock.advance(7.0)
    assert outlet.held_s == 12, "two still wait"
    outlet.scores_read(read(2))
    clock.advance(100.0)
    assert outlet.held_s == 12
    outlet.scored(scores(9))
    clock.advance(1.0)
    assert outlet.held_s == 13


async def test_a_prompt_without_scores_is_never_held_up() -> None:
    outlet, queue = outlet_of()
    outlet.started(pb.PrefillStarted())
    outlet.first_token(pb.PrefillFirstToken())
    assert await taken(queue) == ["started", "first_token"]
    assert not outlet.is_held_up


@pytest.mark.parametrize("count", [2, 1 << 31])
async def test_more_reads_than_there_were_scores_are_refused(count: int) -> None:
    outlet, _ = outlet_of()
    outlet.scored(scores(0))
    with pytest.raises(
        InvalidRequestError, match=f"scores_read.count: {count} are more than the 1 that are unread"
    ):
        outlet.scores_read(read(count))


async def test_scores_count_by_their_tokens_against_the_size_of_a_message() -> None:
    outlet, queue = outlet_of(1000)
    for position in range(3):
        outlet.scored(scores(position, 600))
    assert [await taken(queue) for _ in range(3)] == [[0], [1], [2]]

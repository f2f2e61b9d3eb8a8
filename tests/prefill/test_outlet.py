"""Scores that a client does not read are held back, and nothing passes them."""

import asyncio
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, Counter

from engine.core.request import Request, SampledToken, TokenLogprobs
from pool.request.handler import Brought
from pool.request.streams import EventSender, Inbox
from prefill.event_sender import MAX_UNREAD_SCORES, PrefillEventSender
from prefill.prompts import Scored
from prefill.service import PrefillHandler, PrefillInbox, PrefillParts
from protos import prefill_pb2 as pb
from protos import types_pb2
from runtime.clock import ManualClock
from runtime.errors import DeadlineError, InvalidRequestError
from runtime.rpc.calls import MessageLimits, SendQueue


def scores(position: int, count: int = 1) -> types_pb2.PromptLogprobs:
    return types_pb2.PromptLogprobs(first_position=position, token_ids=range(count))


def event_sender_of(
    max_tokens: int = 16384,
) -> tuple[PrefillEventSender, SendQueue[pb.PrefillEvent]]:
    queue = SendQueue[pb.PrefillEvent](MessageLimits(256, max_tokens))
    return PrefillEventSender(EventSender(queue, 5)), queue


def read(count: int) -> pb.PrefillScoresRead:
    return pb.PrefillScoresRead(count=count)


async def taken(queue: SendQueue[pb.PrefillEvent]) -> list[int | str | None]:
    """Return the positions of scores and the names of other events; empty if nothing is queued."""
    events = await queue.take() if len(queue) else []
    assert all(event.key == 5 for event in events)
    return [
        event.scored.first_position if event.HasField("scored") else event.WhichOneof("event")
        for event in events
    ]


async def test_unread_scores_are_bounded_and_later_events_wait_for_them() -> None:
    event_sender, queue = event_sender_of()
    event_sender.started(pb.PrefillStarted())
    count = MAX_UNREAD_SCORES + 3
    for position in range(count):
        event_sender.scored(scores(position))
    event_sender.first_token(pb.PrefillFirstToken())
    event_sender.sent(pb.PrefillSent())
    assert await taken(queue) == ["started", *range(MAX_UNREAD_SCORES)]
    assert event_sender.is_stalled
    event_sender.scores_read(read(1))
    assert await taken(queue) == [MAX_UNREAD_SCORES]
    event_sender.scores_read(read(2))
    assert await taken(queue) == [count - 2, count - 1, "first_token", "sent"]
    assert not event_sender.is_stalled
    event_sender.scores_read(read(MAX_UNREAD_SCORES))


async def test_waits_for_the_client_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr("prefill.service.time.monotonic", clock.now)
    event_sender, _ = event_sender_of()
    for position in range(MAX_UNREAD_SCORES):
        event_sender.scored(scores(position))
        clock.advance(1.0)
    assert event_sender.stalled_s == 0
    for position in range(3):  # each message that is read lets one more go
        event_sender.scored(scores(position))
    clock.advance(5.0)
    event_sender.scores_read(read(1))
    assert event_sender.stalled_s == 5
    clock.advance(7.0)
    assert event_sender.stalled_s == 12, "two still wait"
    event_sender.scores_read(read(2))
    clock.advance(100.0)
    assert event_sender.stalled_s == 12
    event_sender.scored(scores(9))
    clock.advance(1.0)
    assert event_sender.stalled_s == 13


async def test_a_prompt_with_scores_unread_for_too_long_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prefill.service.UNREAD_TIMEOUT_S", 3.0)
    inbox: PrefillInbox = Inbox(Counter("expired", "waits", registry=CollectorRegistry()))
    request = Request("r", (1,), max_tokens=1)
    handler = PrefillHandler(
        cast("PrefillParts", None), inbox, event_sender_of()[0], request, 5, Brought()
    )
    for position in range(MAX_UNREAD_SCORES + 200):
        inbox.happened(Scored(position, (SampledToken(1, TokenLogprobs(-1.0)),)))
    running, num_read = asyncio.create_task(handler.run()), 0
    while not running.done() and num_read < 100:
        await asyncio.wait([running], timeout=0.1)
        num_read += 1
        inbox.received(pb.PrefillInput(scores_read=read(1)))
    assert running.done(), "it holds the prompt's memory"
    with pytest.raises(DeadlineError, match="the client to read the prompt's logprobs"):
        await running
    assert num_read > 1


async def test_a_prompt_without_scores_is_never_held_up() -> None:
    event_sender, queue = event_sender_of()
    event_sender.started(pb.PrefillStarted())
    event_sender.first_token(pb.PrefillFirstToken())
    assert await taken(queue) == ["started", "first_token"]
    assert not event_sender.is_stalled


@pytest.mark.parametrize("count", [2, 1 << 31])
async def test_more_reads_than_there_were_scores_are_refused(count: int) -> None:
    event_sender, _ = event_sender_of()
    event_sender.scored(scores(0))
    with pytest.raises(
        InvalidRequestError, match=f"scores_read.count: {count} exceeds the 1 unread events"
    ):
        event_sender.scores_read(read(count))


async def test_scores_count_by_their_tokens_against_the_size_of_a_message() -> None:
    event_sender, queue = event_sender_of(1000)
    for position in range(3):
        event_sender.scored(scores(position, 600))
    assert [await taken(queue) for _ in range(3)] == [[0], [1], [2]]

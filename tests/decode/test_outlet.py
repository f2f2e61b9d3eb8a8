"""Events of a request on a decode pool: tokens in order, those of a step in one message, and memory
bounded by the output despite a slow router."""

import pytest

from decode.event_sender import MAX_JOINED, DecodeEventSender
from engine.core.request import SampledToken, TokenLogprobs
from engine.pipeline.results import StepResult
from pool.request.streams import EventSender
from protos import decode_pb2 as pb
from protos import types_pb2
from runtime.rpc.calls import MessageLimits, SendQueue
from tests.support.pool.arrivals import Arrivals, DecodeStream, arrivals, cancelled, first_token
from tests.support.pool.local_pool import call


def drawn(token_id: int) -> list[SampledToken]:
    return [SampledToken(token_id, TokenLogprobs(-float(token_id)))]


def chunk(*token_ids: int) -> types_pb2.TokenChunk:
    return types_pb2.TokenChunk(
        token_ids=token_ids,
        logprobs=[types_pb2.TokenLogprobs(logprob=-float(token_id)) for token_id in token_ids],
    )


async def test_unread_tokens_of_a_request_join_and_nothing_passes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a router that reads nothing costs is its tokens. Those of a message under way are not
    touched any more."""
    monkeypatch.setattr("decode.event_sender.MAX_JOINED", 4)
    queue = SendQueue[pb.DecodeEvent](MessageLimits(256, 16384))
    event_senders = {key: DecodeEventSender(EventSender(queue, key), 1) for key in (1, 2)}
    event_senders[1].committed(pb.DecodeCommitted())
    for token_id in range(6):
        for event_sender in event_senders.values():
            event_sender.generated(drawn(token_id))
    event_senders[1].finished(pb.DecodeFinished())
    first = await queue.take()
    assert sorted((event.key, event.position, list(event.tokens.token_ids)) for event in first) == [
        (1, 1, []),
        (1, 1, [0, 1, 2, 3]),
        (1, 5, [4, 5]),
        (1, 7, []),
        (2, 1, [0, 1, 2, 3]),
        (2, 5, [4, 5]),
    ]
    assert [event.WhichOneof("event") for event in first if event.key == 1] == [
        "committed",
        "tokens",
        "tokens",
        "finished",
    ]
    assert [
        entry.logprob for event in first if event.key == 2 for entry in event.tokens.logprobs
    ] == [0, -1, -2, -3, -4, -5]
    event_senders[2].generated(drawn(6))
    assert await queue.take() == [pb.DecodeEvent(key=2, position=7, tokens=chunk(6))]


async def test_a_message_never_exceeds_the_tokens_a_router_accepts() -> None:
    limits = MessageLimits(256, 16384)
    queue = SendQueue[pb.DecodeEvent](limits)
    for key in range(300):
        event_sender = DecodeEventSender(EventSender(queue, key), 0)
        for token_id in range(3 * MAX_JOINED):
            event_sender.generated(drawn(token_id))
    taken = []
    while len(queue):
        taken.append(await queue.take())
    assert (
        max(sum(len(event.tokens.token_ids) for event in message) for message in taken)
        <= limits.max_weight
    )
    assert (
        sum(len(event.tokens.token_ids) for message in taken for event in message)
        == 300 * 3 * MAX_JOINED
    )


async def committed(pools: Arrivals) -> DecodeStream:
    stream, destination = await pools.open()
    pools.deliver(destination, request_key=len(pools.router.streams))
    stream.send(first_token())
    assert (await stream.next()).WhichOneof("event") == "committed"
    return stream


async def test_a_step_of_several_requests_is_one_message() -> None:
    async with arrivals() as pools:
        streams = [await committed(pools) for _ in range(3)]
        before = pools.router.num_messages
        batch = pools.next_batch()
        assert batch is not None
        assert batch.num_rows == len(streams)
        call(
            pools.loop,
            lambda: pools.scheduler.on_result(
                batch, StepResult(0, [SampledToken(9)] * batch.num_rows)
            ),
        )
        events = [await stream.next() for stream in streams]
        assert [(item.position, list(item.tokens.token_ids)) for item in events] == [(1, [9])] * 3
        assert pools.router.num_messages == before + 1
        for stream in streams:
            stream.send(cancelled())
        await pools.until(lambda: pools.is_free)


async def test_a_finished_request_sends_its_end_at_once_and_holds_no_memory() -> None:
    async with arrivals() as pools:
        stream, destination = await pools.open(max_tokens=2)
        pools.deliver(destination)
        stream.send(first_token())
        assert (await stream.next()).WhichOneof("event") == "committed"
        before = pools.router.num_messages
        batch = pools.next_batch()
        assert batch is not None
        call(pools.loop, lambda: pools.scheduler.on_result(batch, StepResult(0, [SampledToken(9)])))
        assert [(await stream.next()).WhichOneof("event") for _ in range(2)] == [
            "tokens",
            "finished",
        ]
        await stream.ended()
        assert pools.router.num_messages == before + 1
        await pools.until(lambda: pools.is_free)


async def test_a_request_without_a_source_is_acknowledged_before_its_first_token() -> None:
    """16 tokens of 18 are there."""
    async with arrivals(caches=True) as pools:
        landed = await committed(pools)
        landed.send(cancelled())
        await pools.until(lambda: pools.is_free)
        stream = pools.begin(max_tokens=1, has_source=False)
        events = [await stream.next()]
        batch = pools.next_batch()
        assert batch is not None
        call(pools.loop, lambda: pools.scheduler.on_result(batch, StepResult(0, [SampledToken(9)])))
        events += [await stream.next() for _ in range(2)]
        assert [(event.position, event.WhichOneof("event")) for event in events] == [
            (0, "local"),
            (0, "tokens"),
            (1, "finished"),
        ]
        assert (events[0].local.cached_tokens, list(events[1].tokens.token_ids)) == (16, [9])
        await stream.ended()
        assert stream.events.empty()
        assert pools.metric("baton_local_prefill_total", reason="short_rest") == 1
        await pools.until(lambda: pools.is_free)


async def test_requests_end_with_their_routers_call_and_free_their_memory() -> None:
    async with arrivals() as pools:
        await pools.open()
        await committed(pools)
        await pools.router.drop()
        await pools.until(lambda: pools.is_free)

"""One stream of steps per router: whose events it carries, when it writes, and what ends with it."""

import asyncio
import itertools
from contextlib import ExitStack

import grpc
import pytest
from prometheus_client import CollectorRegistry

from decode.steps import MAX_EVENTS, StepFeed, StepFeeds, StepOutlet
from engine.core.request import DrawnToken
from engine.pipeline.stages import StepResult
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc, types_pb2
from runtime.client import open_channel
from runtime.errors import BatonError, InvalidRequestError, RequestAborted, UnavailableError
from runtime.metrics import RpcMetrics
from runtime.server import GrpcServer, ServerOptions
from tests.support.pool.arrivals import Arrivals, DecodeStream, arrivals, first_token
from tests.support.pool.local_pool import call

ID = "0123456789abcdef"
MANY = types_pb2.TokenChunk(token_ids=range(8000))


def chunk(token_id: int) -> types_pb2.TokenChunk:
    return types_pb2.TokenChunk(token_ids=[token_id], logprobs=[types_pb2.TokenLogprobs(logprob=-float(token_id))])


def event(key: int, position: int) -> pb.StepEvent:
    return pb.StepEvent(steps_key=key, position=position)


async def test_what_happens_between_two_messages_goes_into_one() -> None:
    feed = StepFeed()
    messages = feed.messages()
    for position in range(3):
        for key in (1, 2):
            feed.send(event(key, position))
        assert list((await anext(messages)).events) == [event(1, position), event(2, position)]


async def test_a_router_that_reads_slowly_gets_longer_messages_and_all_of_it_in_order() -> None:
    feed, count = StepFeed(), 2 * MAX_EVENTS + 5
    messages = feed.messages()
    for position in range(count):
        feed.send(event(7, position))
    lengths, positions = list[int](), list[int]()
    while len(positions) < count:
        events = (await anext(messages)).events
        lengths.append(len(events))
        positions += [item.position for item in events]
    assert (lengths, positions) == ([MAX_EVENTS, MAX_EVENTS, 5], list(range(count)))


async def test_unread_tokens_of_a_request_join_and_nothing_passes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a router that reads nothing costs is its tokens. Those of a message under way are not touched any more."""
    monkeypatch.setattr("decode.steps.MAX_JOINED", 4)
    feed = StepFeed()
    messages = feed.messages()
    outlets = {key: StepOutlet(feed, key, 1) for key in (1, 2)}
    outlets[1].committed(pb.DecodeCommitted())
    for token_id in range(6):
        for outlet in outlets.values():
            outlet.drawn(chunk(token_id))
    outlets[1].finished(pb.DecodeFinished())
    first = await anext(messages)
    assert [(event.steps_key, event.position, list(event.tokens.token_ids)) for event in first.events] == [
        (1, 1, []), (1, 1, [0, 1, 2, 3]), (2, 1, [0, 1, 2, 3]), (1, 5, [4, 5]), (2, 5, [4, 5]), (1, 7, [])]
    assert [entry.logprob for event in first.events if event.steps_key == 2 for entry in event.tokens.logprobs] == [
        0, -1, -2, -3, -4, -5]
    outlets[2].drawn(chunk(6))
    assert list((await anext(messages)).events) == [pb.StepEvent(steps_key=2, position=7, tokens=chunk(6))]


async def test_a_request_may_arrive_before_the_stream_that_it_names() -> None:
    feeds = StepFeeds()
    found = asyncio.create_task(feeds.named(ID))
    await asyncio.sleep(0.05)
    with feeds.opened("another's stream of steps"), feeds.opened(ID) as feed:
        assert await found is feed


async def test_a_stream_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.steps.ARRIVAL_S", 0.05)
    with pytest.raises(UnavailableError, match="not there"):
        await StepFeeds().named(ID)


async def test_ids_and_keys_are_not_shared() -> None:
    feeds = StepFeeds()
    with feeds.opened(ID) as feed, feed.joined(1, lambda error: None):
        with pytest.raises(InvalidRequestError, match="steps_id: is another stream's"), feeds.opened(ID):
            pass
        with pytest.raises(InvalidRequestError, match=r"open\.steps_key: 1 is another request's"), \
                feed.joined(1, lambda error: None):
            pass
    for bad in ("", "x" * 15, "x" * 65):
        with pytest.raises(InvalidRequestError, match="must have 16 to 64 characters"):
            await feeds.named(bad)
        with pytest.raises(InvalidRequestError, match="must have 16 to 64 characters"), feeds.opened(bad):
            pass


async def test_with_a_stream_end_the_requests_that_name_it_and_no_others() -> None:
    feeds, ended = StepFeeds(), list[tuple[str, BatonError]]()
    with ExitStack() as requests, feeds.opened("another's stream of steps") as other:
        requests.enter_context(other.joined(1, lambda error: ended.append(("another's", error))))
        with feeds.opened(ID) as feed:
            with feed.joined(1, lambda error: ended.append(("gone", error))):
                pass
            requests.enter_context(feed.joined(2, lambda error: ended.append(("left", error))))
        assert [(whose, type(error)) for whose, error in ended] == [("left", RequestAborted)]


async def committed(pools: Arrivals) -> DecodeStream:
    stream, destination = await pools.open()
    pools.deliver(destination, request_key=len(pools.streams))
    stream.send(first_token())
    assert (await stream.next_step()).WhichOneof("event") == "committed"
    return stream


async def test_a_step_of_several_requests_is_one_message() -> None:
    async with arrivals() as pools:
        streams = [await committed(pools) for _ in range(3)]
        before = pools.num_messages
        batch = pools.next_batch()
        assert batch is not None
        assert batch.num_rows == len(streams)
        call(pools.loop, lambda: pools.scheduler.on_result(batch, StepResult(0, [DrawnToken(9)] * batch.num_rows)))
        events = [await stream.next_step() for stream in streams]
        assert [(item.position, list(item.tokens.token_ids)) for item in events] == [(1, [9])] * 3
        assert pools.num_messages == before + 1
        for stream in streams:
            await stream.drop()
        await pools.until(lambda: pools.is_free)


async def test_a_request_without_a_source_is_acknowledged_before_its_first_token() -> None:
    """16 tokens of 18 are there. All that it comes to comes by the steps; its stream ends when the router has that."""
    async with arrivals(caches=True) as pools:
        landed = await committed(pools)
        await landed.drop()
        await pools.until(lambda: pools.is_free)
        stream = pools.begin(max_tokens=1, has_source=False)
        events = [await stream.next_step()]
        batch = pools.next_batch()
        assert batch is not None
        call(pools.loop, lambda: pools.scheduler.on_result(batch, StepResult(0, [DrawnToken(9)])))
        events += [await stream.next_step() for _ in range(2)]
        assert [(event.position, event.WhichOneof("event")) for event in events] == [
            (0, "local"), (0, "tokens"), (1, "finished")]
        assert (events[0].local.cached_tokens, list(events[1].tokens.token_ids)) == (16, [9])
        stream.half_close()
        await stream.ended()
        assert stream.responses.empty()
        assert pools.metric("baton_local_prefill_total", reason="short_rest") == 1
        await pools.until(lambda: pools.is_free)


async def test_requests_end_with_the_stream_of_their_router_and_free_what_they_hold() -> None:
    async with arrivals() as pools:
        waiting, _ = await pools.open()
        running = await committed(pools)
        pools.router.cancel()
        for stream in (waiting, running):
            with pytest.raises(RequestAborted, match="stream of steps has ended"):
                await stream.ended()
        await pools.until(lambda: pools.is_free)


async def test_a_router_that_reads_nothing_is_given_up_and_its_requests_with_it(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection lives, so nothing else would end its calls. When it reads again it finds that they have ended."""
    monkeypatch.setattr("decode.steps.ARRIVAL_S", 60.0)
    async with arrivals() as pools:
        server = GrpcServer(ServerOptions("127.0.0.1:0", write_s=0.3), services=(),
                            metrics=RpcMetrics.create(CollectorRegistry()))
        decode_pb2_grpc.add_DecodeServicer_to_server(pools.service, server.grpc)
        async with open_channel(await server.start()) as channel:
            stub = decode_pb2_grpc.DecodeStub(channel)
            unread = stub.Steps(pb.StepsRequest(steps_id=ID))
            feed, over = await pools.service.feeds.named(ID), asyncio.Event()
            with feed.joined(1, lambda error: over.set()):
                async with asyncio.timeout(60):
                    for position in itertools.count():
                        feed.send(pb.StepEvent(steps_key=1, position=position, tokens=MANY))
                        await asyncio.sleep(0.001)
                        if over.is_set():
                            break
            with pytest.raises(grpc.aio.AioRpcError, match="has read nothing"):
                async for _ in unread:
                    pass
        await server.drain(grace_s=0.1)

"""One router's call on a pool: its requests begin, end and fail separately, and all end with the
call. Requests here wait for commands of the test."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from pool.request import router_call
from pool.request.router_call import MAX_INPUTS, Opening, RequestKind, RouterCall
from pool.request.streams import MAX_UNREAD
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc, types_pb2
from runtime.errors import (
    CapacityError,
    DeadlineError,
    DrainingError,
    HandoffError,
    InternalError,
    InvalidRequestError,
    RequestAborted,
)
from runtime.observe.log import bound_ids, rebind
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.tracing import outgoing
from runtime.rpc.client import open_channel
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.rpc.status import error_from_rpc
from tests.support.pool.streams import SharedCall, Stream, call_tracker, decode_call

METHOD = "/baton.v1.Decode/Generate"
Request = Opening[pb.DecodeInput, pb.DecodeEvent]


@dataclass(frozen=True)
class End:
    """A scripted end of a request."""

    error: Exception | None = None


class Pool:
    """Running `requests` by id; each takes inputs and ends on command."""

    def __init__(self, num_taken: int = 0) -> None:
        self.num_taken = num_taken  # that it says it takes
        self.registry = CollectorRegistry()
        self.calls = call_tracker(self.registry)
        self.requests: dict[str, Request] = {}
        self.began: list[str] = []
        self.ended: list[str] = []
        self.traces: dict[str, object] = {}
        self.ids: dict[str, object] = {}
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.kind: RequestKind[pb.DecodeInput, pb.DecodeEvent] = RequestKind(
            METHOD,
            self._serve,
            lambda item: item.open.context,
            lambda key, ended: pb.DecodeEvent(key=key, ended=ended),
        )

    async def Serve(
        self, request_iterator: AsyncIterator[pb.DecodeInputs], context: object
    ) -> AsyncIterator[pb.DecodeEvents]:
        expired = Counter("expired", "Waits.", registry=CollectorRegistry())
        call = RouterCall(self.kind, self.calls, expired, self.num_taken)
        async with aclosing(
            call.events(message.inputs async for message in request_iterator)
        ) as batches:
            async for events in batches:
                yield pb.DecodeEvents(events=events)

    async def _serve(self, opening: Request) -> None:
        name = opening.input.open.request.request_id
        rebind(request_id=name)
        self.requests[name] = opening
        self.began.append(name)
        self.traces[name], self.ids[name] = outgoing(), dict(bound_ids())
        try:
            while True:
                await self.may_take.wait()
                match await opening.inbox.get(None, "something"):
                    case End(error=None):
                        return
                    case End(error=Exception() as error):
                        raise error
        finally:
            del self.requests[name]
            self.ended.append(name)

    def end(self, name: str, error: Exception | None = None) -> None:
        self.requests[name].inbox.happened(End(error))

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def opening(name: str, **context: Any) -> pb.DecodeInput:  # noqa: ANN401 - fields of a message
    return pb.DecodeInput(
        open=pb.DecodeOpen(
            request=types_pb2.EngineRequest(request_id=name),
            context=types_pb2.RequestContext(**context),
        )
    )


def with_key(key: int, message: pb.DecodeInput) -> pb.DecodeInput:
    message.key = key
    return message


def cancelled(key: int) -> pb.DecodeInput:
    return pb.DecodeInput(key=key, cancelled=types_pb2.RequestCancelled())


def token(position: int) -> types_pb2.TokenChunk:
    return types_pb2.TokenChunk(token_ids=[position])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - lists have no event to wait for
            await asyncio.sleep(0.001)


async def begun(
    pool: Pool, *names: str
) -> tuple[SharedCall[pb.DecodeInput, pb.DecodeEvent], list[Any]]:
    call = decode_call(pool.Serve)
    streams = [call.open(opening(name)) for name in names]
    await until(lambda: len(pool.began) == len(names))
    return call, streams


async def goes_on(pool: Pool, stream: Stream[pb.DecodeInput, pb.DecodeEvent], name: str) -> None:
    """Check that the request is alive: an event arrives, and it ends normally."""
    pool.requests[name].event_sender.send(
        pb.DecodeEvent(key=stream.key, position=77, tokens=token(1))
    )
    assert (await stream.next()).position == 77
    pool.end(name)
    await stream.ended()


async def test_requests_end_one_by_one_each_with_its_own_status() -> None:
    pool = Pool()
    call, (first, second, third) = await begun(pool, "a", "b", "c")
    pool.end("b", HandoffError("its bytes did not come"))
    with pytest.raises(HandoffError, match="its bytes did not come"):
        await second.ended()
    pool.end("c", RuntimeError("a secret"))
    with pytest.raises(InternalError, match="for request c"):
        await third.ended()
    await goes_on(pool, first, "a")
    assert pool.metric("baton_requests_total", method=METHOD, grpc_code="OK") == 1
    assert pool.metric("baton_requests_total", method=METHOD, grpc_code="ABORTED") == 1
    assert pool.metric("baton_requests_total", method=METHOD, grpc_code="INTERNAL") == 1
    assert pool.metric("baton_requests_in_flight", method=METHOD) == 0
    await call.drop()


async def test_each_request_has_its_own_trace_ids_and_log_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    pool, seen = Pool(), list[tuple[str, object]]()

    def note(record: logging.LogRecord) -> bool:
        seen.append((record.getMessage(), bound_ids().get("request_id")))
        return True

    monkeypatch.setattr(logging.getLogger("runtime.rpc.calls"), "filter", note)
    call = decode_call(pool.Serve)
    parents = {name: f"00-{'a' * 31}{number}-{'b' * 16}-01" for number, name in enumerate("ab")}
    streams = [
        call.open(opening(name, traceparent=parent, tracestate=f"x={name}"))
        for name, parent in parents.items()
    ]
    await until(lambda: len(pool.began) == 2)
    for name, parent in parents.items():
        assert pool.traces[name] == (("traceparent", parent), ("tracestate", f"x={name}"))
        assert pool.ids[name] == {"request_id": name}
        pool.end(name, HandoffError(f"of {name}"))
    for stream in streams:
        with pytest.raises(HandoffError):
            await stream.ended()
    assert sorted(seen) == [
        ("call rejected or failed: of a", "a"),
        ("call rejected or failed: of b", "b"),
    ]
    await call.drop()


async def test_simultaneous_events_are_one_message() -> None:
    pool = Pool()
    call, streams = await begun(pool, "a", "b", "c")
    before = call.num_messages
    for position in range(3):
        for name, stream in zip("abc", streams, strict=True):
            pool.requests[name].event_sender.send(
                pb.DecodeEvent(key=stream.key, position=position, tokens=token(position))
            )
    pool.end("b")
    for stream in streams:
        assert [(await stream.next()).position for _ in range(3)] == [0, 1, 2]
    await streams[1].ended()
    assert call.num_messages == before + 1
    await call.drop()


async def test_a_request_that_its_router_gives_up_is_cancelled_and_gets_no_end() -> None:
    pool = Pool()
    call, (first, second) = await begun(pool, "a", "b")
    event_sender = pool.requests["a"].event_sender
    first.send(cancelled(first.key))
    await until(lambda: pool.ended == ["a"])
    event_sender.send(
        pb.DecodeEvent(key=first.key, tokens=token(1))
    )  # as the engine does that does not know yet
    await goes_on(pool, second, "b")
    assert first.events.empty()
    assert not first.end.done()
    assert pool.metric("baton_requests_total", method=METHOD, grpc_code="CANCELLED") == 1
    assert await pool.calls.wait_quiet(timeout_s=5)
    await call.drop()


async def test_a_request_opened_and_cancelled_in_one_message_leaves_nothing() -> None:
    pool = Pool()
    call = decode_call(pool.Serve)
    call.send(with_key(1, opening("a")), cancelled(1), cancelled(1))
    call.half_close()
    async with asyncio.timeout(30):
        await call.handler
    assert pool.began == []
    assert await pool.calls.wait_quiet(timeout_s=5)


async def test_an_end_that_crosses_its_router_giving_up_is_not_waited_for() -> None:
    pool = Pool()
    call = RouterCall(
        pool.kind, pool.calls, Counter("expired", "Waits.", registry=CollectorRegistry())
    )
    inputs: asyncio.Queue[list[pb.DecodeInput]] = asyncio.Queue()

    async def messages() -> AsyncIterator[list[pb.DecodeInput]]:
        while True:
            yield await inputs.get()

    batches = call.events(messages())
    reading = asyncio.ensure_future(anext(batches))  # and a second message is not read
    inputs.put_nowait([with_key(1, opening("a")), with_key(2, opening("b"))])
    await until(lambda: len(pool.began) == 2)
    pool.end("a")
    assert [event.key for event in await reading] == [1]
    pool.end("b")
    await until(lambda: pool.ended == ["a", "b"])
    assert not await pool.calls.wait_quiet(timeout_s=0.05), "its end is not sent"
    inputs.put_nowait([cancelled(2)])
    await until(lambda: pool.calls._num_counted == 1)
    await batches.aclose()
    assert await pool.calls.wait_quiet(timeout_s=5)


@pytest.mark.parametrize("bad", [pb.DecodeInput(), pb.DecodeInput.FromString(b"\x9a\x06\x00")])
async def test_an_input_that_is_missing_or_unknown_ends_its_request_alone(
    bad: pb.DecodeInput,
) -> None:
    pool = Pool()
    call, (first, second) = await begun(pool, "a", "b")
    first.send(bad)
    with pytest.raises(InvalidRequestError, match="input: is missing"):
        await first.ended()
    assert pool.ended == ["a"]
    await goes_on(pool, second, "b")
    call.send(with_key(3, opening("c")), pb.DecodeInput(key=3))
    call.streams[3] = third = Stream(call, 3)
    with pytest.raises(InvalidRequestError, match="input: is missing"):
        await third.ended()
    assert "c" not in pool.began
    await call.drop()


async def test_unread_inputs_end_their_request_alone() -> None:
    pool = Pool()
    pool.may_take.clear()
    call, (first, second) = await begun(pool, "a", "b")
    for _ in range(MAX_UNREAD):
        first.send(pb.DecodeInput(new_source={}))
        second.send(pb.DecodeInput(new_source={}))
    await asyncio.sleep(0.05)
    assert not first.end.done()
    first.send(pb.DecodeInput(new_source={}))
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_UNREAD} are unread"):
        await first.ended()
    pool.may_take.set()
    await goes_on(pool, second, "b")
    await call.drop()


async def test_inputs_for_requests_that_are_over_or_never_were_are_dropped() -> None:
    pool = Pool()
    call, (first, second) = await begun(pool, "a", "b")
    pool.end("a")
    await first.ended()
    for key in (first.key, 999, 0):
        call.send(pb.DecodeInput(key=key, new_source={}), cancelled(key), pb.DecodeInput(key=key))
    await goes_on(pool, second, "b")
    await call.drop()


@pytest.mark.parametrize("key", [0, 1, 2])
async def test_a_key_that_was_used_before_ends_the_call(key: int) -> None:
    """The key no longer identifies one request: running ones release their resources."""
    pool = Pool()
    call, _ = await begun(pool, "a", "b")
    call.send(with_key(key, opening("c")))
    with pytest.raises(InvalidRequestError, match=f"keys must rise, but {key} was opened after 2"):
        await call.handler
    assert sorted(pool.ended) == ["a", "b"]
    assert await pool.calls.wait_quiet(timeout_s=5)


async def test_a_message_with_too_many_inputs_ends_the_call() -> None:
    pool = Pool()
    call, _ = await begun(pool, "a")
    call.send(*[cancelled(9)] * MAX_INPUTS)
    call.send(*[cancelled(9)] * (MAX_INPUTS + 1))
    with pytest.raises(
        InvalidRequestError, match=f"at most {MAX_INPUTS}, this one has {MAX_INPUTS + 1}"
    ):
        await call.handler
    assert pool.ended == ["a"]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
async def test_a_deadline_that_is_no_time_is_refused_by_name(bad: float) -> None:
    pool = Pool()
    call = decode_call(pool.Serve)
    stream = call.open(opening("a", time_left_s=bad))
    with pytest.raises(InvalidRequestError, match=r"context\.time_left_s"):
        await stream.ended()
    assert pool.began == []
    await call.drop()


async def test_a_request_ends_with_its_deadline_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_call, "LATE_S", 0.0)
    pool = Pool()
    call = decode_call(pool.Serve)
    short, none, long = (
        call.open(opening(name, **left))
        for name, left in (("a", {"time_left_s": 0.05}), ("b", {}), ("c", {"time_left_s": 1e18}))
    )
    with pytest.raises(DeadlineError, match=r"within the 0\.05 s"):
        await short.ended()
    assert math.isinf(pool.requests["b"].timeout_s)
    await goes_on(pool, none, "b")
    await goes_on(pool, long, "c")
    await call.drop()


async def test_requests_beyond_the_limit_are_refused_and_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_call, "SPARE_OPEN", 2)
    pool = Pool()
    call, (first, second) = await begun(pool, "a", "b")
    with pytest.raises(CapacityError, match="2 requests of one router") as refused:
        await call.open(opening("c")).ended()
    assert refused.value.resource == "requests"
    await goes_on(pool, first, "a")
    third = call.open(opening("d"))
    await until(lambda: "d" in pool.requests)
    await goes_on(pool, third, "d")
    await goes_on(pool, second, "b")
    await call.drop()


async def test_the_limit_grows_with_the_pool_and_admits_a_message_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_call, "SPARE_OPEN", 2)
    pool = Pool(num_taken=6)
    call, _ = await begun(pool, *(f"old{number}" for number in range(6)))
    keys = range(7, 13)
    call.streams |= {key: Stream(call, key) for key in keys}
    call.send(*(with_key(key, opening(f"new{key}")) for key in keys))
    for key in keys[2:]:
        with pytest.raises(CapacityError, match="8 requests of one router"):
            await call.streams[key].ended()
    assert pool.began[6:] == ["new7", "new8"]
    await goes_on(pool, call.streams[7], "new7")
    again = call.open(opening("again"))
    await until(lambda: "again" in pool.requests)
    await goes_on(pool, again, "again")
    await call.drop()


async def test_a_router_that_opens_and_never_reads_is_read_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every end waits until it is taken: their number is bounded."""
    monkeypatch.setattr(router_call, "SPARE_OPEN", 4)
    pool = Pool()
    call = RouterCall(
        pool.kind, pool.calls, Counter("expired", "Waits.", registry=CollectorRegistry())
    )

    async def messages() -> AsyncIterator[list[pb.DecodeInput]]:
        yield [with_key(key, opening(f"{key}", time_left_s=-1)) for key in range(1, 1000)]

    batches = call.events(messages())
    taken = list(await anext(batches))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(call._ends) + len(call._requests) <= 8
    async for events in batches:
        taken += events
    assert [event.key for event in taken] == list(range(1, 1000))
    assert await pool.calls.wait_quiet(timeout_s=5)


async def test_a_drain_refuses_new_requests_and_hands_back_running_ones() -> None:
    pool = Pool()
    call, (first,) = await begun(pool, "a")
    pool.calls.refuse_new("the server is draining")
    with pytest.raises(DrainingError, match="the server is draining"):
        await call.open(opening("b")).ended()
    assert not await pool.calls.wait_quiet(timeout_s=0.05)
    pool.calls.hand_back(DrainingError("the server is stopping"))
    with pytest.raises(DrainingError, match="the server is stopping"):
        await first.ended()
    assert await pool.calls.wait_quiet(timeout_s=5)
    assert not call.handler.done()
    await call.drop()


async def test_a_half_closed_call_ends_with_its_last_request() -> None:
    pool = Pool()
    call, (first,) = await begun(pool, "a")
    call.half_close()
    await asyncio.sleep(0.02)
    assert not call.handler.done()
    await goes_on(pool, first, "a")
    async with asyncio.timeout(30):
        await call.handler


async def test_all_requests_end_with_the_call_before_it_is_over() -> None:
    pool = Pool()
    call, _ = await begun(pool, "a", "b")
    await call.drop()
    assert sorted(pool.ended) == ["a", "b"]
    assert await pool.calls.wait_quiet(timeout_s=5)
    assert pool.metric("baton_requests_total", method=METHOD, grpc_code="CANCELLED") == 2


async def test_a_request_that_is_expelled_as_its_call_ends_is_over() -> None:
    """Its end has no recipient, so nothing waits for it."""
    pool = Pool()
    call, _ = await begun(pool, "a", "b")
    call.handler.cancel()
    await asyncio.sleep(0)  # the handler has cancelled them, and they have not run
    pool.calls.hand_back(DrainingError("the server is stopping"))
    await asyncio.wait([call.handler])
    assert sorted(pool.ended) == ["a", "b"]
    assert await pool.calls.wait_quiet(timeout_s=5)
    assert pool.metric("baton_requests_in_flight", method=METHOD) == 0


class Served(decode_pb2_grpc.DecodeServicer):
    """The same over gRPC."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def Serve(
        self,
        request_iterator: AsyncIterator[pb.DecodeInputs],
        context: "grpc.aio.ServicerContext[pb.DecodeInputs, pb.DecodeEvents]",
    ) -> AsyncIterator[pb.DecodeEvents]:
        async for message in self._pool.Serve(request_iterator, context):
            yield message


async def served(pool: Pool, write_s: float = 60.0) -> tuple[GrpcServer, str]:
    server = GrpcServer(
        ServerOptions("127.0.0.1:0", write_s=write_s),
        services=(),
        background_methods=frozenset({"/baton.v1.Decode/Serve"}),
        metrics=RpcMetrics.create(CollectorRegistry()),
    )
    pool.calls = server.calls
    decode_pb2_grpc.add_DecodeServicer_to_server(Served(pool), server.grpc)
    return server, await server.start()


async def test_a_router_that_reads_nothing_is_given_up_and_its_requests_with_it() -> None:
    """Its connection lives, so nothing else would end the call. When it reads again it finds that
    it has ended."""
    pool = Pool()
    server, address = await served(pool, write_s=0.3)
    async with open_channel(address) as channel:
        unread = decode_pb2_grpc.DecodeStub(channel).Serve()
        await unread.write(pb.DecodeInputs(inputs=[with_key(1, opening("a"))]))
        await until(lambda: pool.began)
        async with asyncio.timeout(60):
            while not pool.ended:
                pool.requests["a"].event_sender.send(
                    pb.DecodeEvent(key=1, tokens=types_pb2.TokenChunk(token_ids=range(8000))), 8000
                )
                await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in unread:
                pass
        assert isinstance(error_from_rpc(ended.value), RequestAborted)
        assert "has read nothing" in str(ended.value)
        async with asyncio.timeout(30):
            await server.drain(grace_s=600)


async def test_a_router_that_reads_slowly_is_not_given_up() -> None:
    pool, write_s = Pool(), 0.5
    server, address = await served(pool, write_s)
    async with open_channel(address) as channel:
        slow = decode_pb2_grpc.DecodeStub(channel).Serve()
        await slow.write(pb.DecodeInputs(inputs=[with_key(1, opening("a"))]))
        await until(lambda: pool.began)
        for position in range(40):
            pool.requests["a"].event_sender.send(
                pb.DecodeEvent(
                    key=1, position=position, tokens=types_pb2.TokenChunk(token_ids=range(16384))
                ),
                16384,
            )
        for position in range(40):
            await asyncio.sleep(write_s / 10)
            message = await slow.read()
            assert isinstance(message, pb.DecodeEvents)
            assert [event.position for event in message.events] == [position]
        assert not pool.ended
        slow.cancel()
        await until(lambda: pool.ended)
    await server.drain(grace_s=0)


async def test_a_malformed_message_ends_the_call_by_name() -> None:
    pool = Pool()
    server, address = await served(pool)
    async with open_channel(address) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(
            "/baton.v1.Decode/Serve"
        )()
        await call.write(pb.DecodeInputs(inputs=[with_key(1, opening("a"))]).SerializeToString())
        await until(lambda: pool.began)
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert isinstance(error_from_rpc(ended.value), InvalidRequestError)
        assert pool.ended == ["a"]
    await server.drain(grace_s=0)


async def test_a_drain_sends_every_end_before_the_call_ends() -> None:
    pool = Pool()
    server, address = await served(pool)
    async with open_channel(address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Serve()
        await call.write(
            pb.DecodeInputs(inputs=[with_key(key, opening(f"{key}")) for key in range(1, 101)])
        )
        await until(lambda: len(pool.began) == 100)
        draining = asyncio.create_task(server.drain(grace_s=0.05))
        ends: list[int] = []

        async def read_all() -> None:
            async for message in call:
                ends.extend(event.key for event in message.events if event.ended.code)

        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read_all()
        assert sorted(ends) == list(range(1, 101))
        assert isinstance(error_from_rpc(ended.value), DrainingError)
        await draining

"""The call that all requests to a worker share, over real gRPC, with a scripted worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos import decode_pb2 as pb
from protos import decode_pb2_grpc, types_pb2
from protos.worker_pb2 import WatchRequest
from protos.worker_pb2_grpc import WorkerStub
from router.workers import worker_call
from router.workers.worker_call import DECODE_CALL, CallSlot, WorkerCall
from runtime.errors import (
    BatonError,
    CapacityError,
    ConfigError,
    DrainingError,
    InvalidRequestError,
    PermissionDeniedError,
    RequestAborted,
    UnavailableError,
)
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc import interceptor
from runtime.rpc.client import open_channel
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.rpc.status import failure_of
from tests.router.harness import eventually
from tests.support.router.fake_workers import Fabric, FakeDecode, Journal

Call = WorkerCall[pb.DecodeInput, pb.DecodeEvent]


class Scripted(decode_pb2_grpc.DecodeServicer):
    """A worker with the messages of all calls in `received`; items of `answers` are sent on the
    current call, or end it."""

    def __init__(self) -> None:
        self.received: list[pb.DecodeInputs] = []
        self.answers: asyncio.Queue[pb.DecodeEvents | BatonError | None] = asyncio.Queue()
        self.num_calls = 0
        self.has_half_closed = asyncio.Event()
        self.reads = True

    async def Serve(
        self,
        request_iterator: AsyncIterator[pb.DecodeInputs],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[pb.DecodeEvents]:
        self.num_calls += 1
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (answer := await self.answers.get()) is not None:
                if isinstance(answer, BatonError):
                    raise answer
                yield answer
        finally:
            reader.cancel()

    async def _read(self, messages: AsyncIterator[pb.DecodeInputs]) -> None:
        if self.reads:
            async for message in messages:
                self.received.append(message)
            self.has_half_closed.set()

    @property
    def inputs(self) -> list[pb.DecodeInput]:
        return [item for message in self.received for item in message.inputs]

    def says(self, *events: pb.DecodeEvent) -> None:
        self.answers.put_nowait(pb.DecodeEvents(events=events))

    async def got(self, *kinds: str) -> None:
        await eventually(
            lambda: [item.WhichOneof("input") for item in self.inputs] == list(kinds),
            f"wait for {kinds}, got {self.inputs}",
        )


@dataclass
class Receiver:
    events: list[pb.DecodeEvent] = field(default_factory=list)
    ends: list[BatonError | None] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def received(self, event: pb.DecodeEvent) -> None:
        self.events.append(event)

    def ended(self, error: BatonError | None) -> None:
        self.ends.append(error)

    def call_lost(self, reason: str) -> None:
        self.losses.append(reason)

    @property
    def is_over(self) -> bool:
        return bool(self.ends or self.losses)


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Scripted, GrpcServer, grpc.aio.Channel]]:
    worker = Scripted()
    server = GrpcServer(
        ServerOptions("127.0.0.1:0"), services=(), metrics=RpcMetrics.create(CollectorRegistry())
    )
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server.grpc)
    try:
        async with open_channel(await server.start()) as channel:
            yield worker, server, channel
    finally:
        await server.grpc.stop(None)
        await server.stop()


def opening(name: str = "r") -> pb.DecodeInput:
    return pb.DecodeInput(open=pb.DecodeOpen(request=types_pb2.EngineRequest(request_id=name)))


def token(key: int, position: int = 0) -> pb.DecodeEvent:
    return pb.DecodeEvent(
        key=key, position=position, tokens=types_pb2.TokenChunk(token_ids=[position])
    )


def ended(key: int, error: BatonError | None = None) -> pb.DecodeEvent:
    status = b"" if error is None else failure_of(error).status
    return pb.DecodeEvent(key=key, ended=types_pb2.RequestEnded.FromString(status))


async def test_inputs_sent_together_are_one_message_and_events_go_by_key() -> None:
    async with scripted() as (worker, _, channel):
        call, receivers = Call(DECODE_CALL, channel), [Receiver() for _ in range(3)]
        keys = [
            call.open(receiver, opening(f"{index}")) for index, receiver in enumerate(receivers)
        ]
        for key in keys:
            call.send(key, pb.DecodeInput(first_token=types_pb2.TokenChunk(token_ids=[key])))
        await worker.got(*["open", "first_token"] * 3)
        assert len(worker.received) == 1
        assert [item.key for item in worker.inputs] == [key for key in keys for _ in range(2)]
        worker.says(
            *(token(key, position) for position in range(3) for key in keys), ended(keys[1])
        )
        await eventually(lambda: receivers[1].ends, "an end")
        for key, receiver in zip(keys, receivers, strict=True):
            assert [(event.key, event.position) for event in receiver.events] == [
                (key, 0),
                (key, 1),
                (key, 2),
            ]
        assert [receiver.ends for receiver in receivers] == [[], [None], []]
        call.task.cancel()


async def test_an_error_of_one_request_reaches_it_typed_and_no_other() -> None:
    async with scripted() as (worker, _, channel):
        call, first, second = Call(DECODE_CALL, channel), Receiver(), Receiver()
        keys = [call.open(first, opening()), call.open(second, opening())]
        worker.says(
            ended(keys[0], CapacityError("no slots", resource="slots", retry_after_s=2.5)),
            token(keys[1]),
        )
        await eventually(lambda: second.events, "a token")
        (error,) = first.ends
        assert isinstance(error, CapacityError)
        assert (str(error), error.resource, error.retry_after_s) == ("no slots", "slots", 2.5)
        assert not second.is_over
        call.task.cancel()


async def test_details_that_cannot_be_parsed_cost_no_request_its_call() -> None:
    async with scripted() as (worker, _, channel):
        call, first, second = Call(DECODE_CALL, channel), Receiver(), Receiver()
        keys = [call.open(first, opening()), call.open(second, opening())]
        said = ended(keys[0], CapacityError("no slots", resource="slots"))
        for detail in said.ended.details:
            detail.value = b"\xff\xff"
        worker.says(said, token(keys[1]))
        await eventually(lambda: second.events, "a token")
        (error,) = first.ends
        assert isinstance(error, CapacityError), "by its code"
        assert str(error) == "no slots"
        assert not second.is_over
        call.task.cancel()


async def test_a_call_whose_reader_fails_ends_at_the_worker_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it holds for the requests would be held for ever."""
    async with scripted() as (worker, server, channel):
        call, receiver = Call(DECODE_CALL, channel), Receiver()
        key = call.open(receiver, opening())
        await worker.got("open")

        def fails(_: pb.DecodeEvent) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(receiver, "received", fails)
        worker.says(token(key))
        await eventually(lambda: receiver.losses, "the loss")
        await eventually(server.calls._quiet.is_set, "the call at the worker")
        with pytest.raises(RuntimeError, match="a bug"):
            await call.task


async def test_events_for_unknown_or_ended_keys_are_dropped() -> None:
    async with scripted() as (worker, _, channel):
        call, first, second = Call(DECODE_CALL, channel), Receiver(), Receiver()
        keys = [call.open(first, opening()), call.open(second, opening())]
        behind = token(keys[0]), ended(keys[0]), pb.DecodeEvent()
        worker.says(token(99), ended(98), ended(keys[0]), *behind, token(keys[1]))
        await eventually(lambda: second.events, "a token")
        assert (first.events, first.ends, first.losses) == ([], [None], [])
        call.send(keys[0], pb.DecodeInput(first_token=types_pb2.TokenChunk()))
        call.leave(keys[0])
        await worker.got("open", "open")
        call.task.cancel()


async def test_an_abandoned_request_is_cancelled_unless_ending_or_unsent() -> None:
    async with scripted() as (worker, _, channel):
        call = Call(DECODE_CALL, channel)
        keys = [call.open(Receiver(), opening()) for _ in range(2)]
        await worker.got("open", "open")
        call.leave(keys[0])
        call.leave(keys[0])
        call.leave(keys[1], is_ending=True)
        call.leave(call.open(Receiver(), opening()))
        await worker.got("open", "open", "cancelled")
        assert worker.inputs[2].key == keys[0]
        worker.says(token(keys[0]), token(keys[1]), ended(keys[1]))
        kept = Receiver()
        worker.says(token(call.open(kept, opening())))
        await eventually(lambda: kept.events, "a token")
        call.task.cancel()


async def test_queued_inputs_of_an_abandoned_request_are_not_sent() -> None:
    async with scripted() as (worker, _, channel):
        call = Call(DECODE_CALL, channel)
        key = call.open(Receiver(), opening())
        await worker.got("open")
        call.send(key, pb.DecodeInput(first_token=types_pb2.TokenChunk()))
        call.leave(key)
        await worker.got("open", "cancelled")
        call.task.cancel()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (DrainingError("the server is stopping"), DrainingError),
        (UnavailableError("unhealthy"), UnavailableError),
        (PermissionDeniedError("not you"), PermissionDeniedError),
        (ConfigError("no"), ConfigError),
        (CapacityError("256 calls are under way", resource="calls"), CapacityError),
    ],
)
async def test_an_error_of_the_call_reaches_each_of_its_requests(
    said: BatonError, kind: type[BatonError]
) -> None:
    async with scripted() as (worker, _, channel):
        call, receivers = Call(DECODE_CALL, channel), [Receiver() for _ in range(2)]
        for receiver in receivers:
            call.open(receiver, opening())
        # A write that crosses the status replaces it in grpc.aio (grpc#36066), and the call is lost.
        await worker.got("open", "open")
        worker.answers.put_nowait(said)
        await eventually(lambda: all(receiver.is_over for receiver in receivers), "ends")
        errors = [error for receiver in receivers for error in receiver.ends]
        assert [type(error) for error in errors] == [kind] * 2
        assert errors[0] is not errors[1]
        assert call.has_ended


@pytest.mark.parametrize("how", ["ok", "aborted", "invalid", "bug", "dies"])
async def test_a_call_that_ends_otherwise_has_lost_its_requests(how: str) -> None:
    """Any error of the call is internal: no client caused it."""
    async with scripted() as (worker, server, channel):
        call, receiver = Call(DECODE_CALL, channel), Receiver()
        call.open(receiver, opening())
        await worker.got("open")
        if how == "dies":
            await server.grpc.stop(None)
        else:
            worker.answers.put_nowait(
                {
                    "ok": None,
                    "aborted": RequestAborted("the client has read nothing for 120 s"),
                    "invalid": InvalidRequestError(),
                    "bug": BatonError("a bug"),
                }[how]
            )
        await eventually(lambda: receiver.losses, "the loss")
        assert receiver.ends == []
        assert call.has_ended


async def test_a_worker_without_the_call_is_reported() -> None:
    """One of before, where each request had calls of its own."""
    server = GrpcServer(
        ServerOptions("127.0.0.1:0"), services=(), metrics=RpcMetrics.create(CollectorRegistry())
    )
    async with open_channel(await server.start()) as channel:

        async def turn() -> Receiver:
            receiver = Receiver()
            Call(DECODE_CALL, channel).open(receiver, opening())
            await eventually(lambda: receiver.is_over, "an end")
            return receiver

        receiver = await turn()
        while (
            receiver.losses
        ):  # gRPC loses the status of a call that ends while its first message is sent (`is_lost`)
            receiver = await turn()
        (error,) = receiver.ends
        assert isinstance(error, ConfigError)
        assert "the server does not offer this call" in str(error)
    await server.drain(grace_s=0)


async def test_a_worker_that_is_not_there_has_lost_its_requests() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        receiver = Receiver()
        Call(DECODE_CALL, channel).open(receiver, opening())
        await eventually(lambda: receiver.losses, "the loss")


async def test_a_message_that_cannot_be_parsed_loses_the_requests() -> None:
    async def serve(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        yield b"\xff\xff\xff"
        await asyncio.Event().wait()

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "baton.v1.Decode", {"Serve": grpc.stream_stream_rpc_method_handler(serve)}
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        receiver = Receiver()
        call = Call(DECODE_CALL, channel)
        call.open(receiver, opening())
        await eventually(lambda: receiver.losses, "the loss")
        assert call.has_ended
    await server.stop(None)


async def test_an_input_over_the_limit_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_call, "MAX_INPUT_BYTES", 1000)
    async with scripted() as (worker, _, channel):
        call, long, later, other = Call(DECODE_CALL, channel), Receiver(), Receiver(), Receiver()
        call.open(long, opening("x" * 2000))
        keys = [call.open(later, opening()), call.open(other, opening())]
        await worker.got("open", "open")
        call.send(
            keys[0], pb.DecodeInput(first_token=types_pb2.TokenChunk(token_ids=range(300, 2000)))
        )
        await worker.got("open", "open", "cancelled")
        worker.says(token(keys[1]))
        await eventually(lambda: other.events, "a token")
        for receiver in (long, later):
            (error,) = receiver.ends
            assert isinstance(error, InvalidRequestError)
            assert "at most 1000 bytes" in str(error)
        call.task.cancel()


def test_router_messages_are_within_the_workers_limits() -> None:
    taken = ServerOptions("").max_message_bytes
    assert taken > worker_call.MAX_INPUT_BYTES + 100, "one input and its frame"
    assert worker_call.MAX_BYTES < worker_call.MAX_INPUT_BYTES


async def test_a_worker_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_call, "WRITE_S", 0.3)
    async with scripted() as (worker, _, channel):
        worker.reads = False
        call, receiver = Call(DECODE_CALL, channel), Receiver()
        key = call.open(receiver, opening())
        for _ in range(8):
            call.send(key, pb.DecodeInput(new_source={"compatibility_text": "x" * (1 << 20)}))
        await eventually(lambda: receiver.losses, "the loss")
        assert receiver.losses == ["the worker has read nothing for 0.3 s"]


async def test_a_call_is_made_by_the_first_request_and_again_after_its_end() -> None:
    async with scripted() as (worker, _, channel):
        slot: CallSlot[pb.DecodeInput, pb.DecodeEvent] = CallSlot(DECODE_CALL, channel)
        receiver = Receiver()
        slot.current().open(receiver, opening())
        assert slot.current() is slot.current()
        await worker.got("open")
        worker.answers.put_nowait(None)
        await eventually(lambda: receiver.losses, "the loss")
        again = Receiver()
        key = slot.current().open(again, opening())
        worker.says(token(key))
        await eventually(lambda: again.events, "a token")
        assert worker.num_calls == 2
        slot.current().task.cancel()


async def test_requests_after_a_rotation_use_a_new_call_and_earlier_ones_theirs() -> None:
    shown: list[object] = ["old"]
    async with scripted() as (worker, _, channel):
        slot: CallSlot[pb.DecodeInput, pb.DecodeEvent] = CallSlot(
            DECODE_CALL, channel, lambda: shown[0]
        )
        before, receiver = slot.current(), Receiver()
        key = before.open(receiver, opening())
        await worker.got("open")
        shown[0] = "new"
        after = slot.current()
        after.open(Receiver(), opening())
        assert after is not before
        assert slot.current() is after
        await eventually(lambda: worker.num_calls == 2, "the second call")
        before.send(key, pb.DecodeInput(first_token=types_pb2.TokenChunk()))
        await eventually(lambda: len(worker.inputs) == 3, "what it still sends")
        assert not worker.has_half_closed.is_set()
        before.leave(key, is_ending=True)
        await asyncio.wait_for(worker.has_half_closed.wait(), 30)
        assert not after.has_ended
        worker.answers.put_nowait(None)  # to either: one of the two ends
        await eventually(lambda: before.has_ended or after.has_ended, "an end")
        before.task.cancel()
        after.task.cancel()


async def test_a_retired_call_that_its_worker_keeps_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_call, "RETIRED_S", 0.1)
    async with scripted() as (worker, _, channel):
        call = Call(DECODE_CALL, channel)
        key = call.open(Receiver(), opening())
        await worker.got("open")
        call.retire()
        call.leave(key)
        await eventually(lambda: call.has_ended, "the end")
        assert [item.WhichOneof("input") for item in worker.inputs] == ["open", "cancelled"]


async def test_watchers_of_a_worker_take_no_place_of_a_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interceptor, "_MAX_BACKGROUND_CALLS", 2)
    worker = FakeDecode("d", Fabric(), Journal())
    await worker.start()
    async with open_channel(worker.address) as channel:
        watches = [WorkerStub(channel).Watch(WatchRequest(interval_s=1)) for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError, match="2 endless calls are open"):
            await WorkerStub(channel).Watch(WatchRequest(interval_s=1)).read()
        calls = [Call(DECODE_CALL, channel) for _ in range(2)]
        await eventually(lambda: worker.num_calls == 2, "the calls of routers")
        assert not any(call.has_ended for call in calls)
        for call in calls:
            call.task.cancel()
    await worker.die()

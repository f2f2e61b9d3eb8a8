"""A request's stay on a pool, seen from a caller that behaves badly, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
from prometheus_client import CollectorRegistry

from engine.core.request import Request, SamplingParams
from pool.request.inbox import MAX_UNREAD, Inbox
from pool.request.opening import RequestParts, serve
from protos import prefill_pb2 as pb
from protos import prefill_pb2_grpc
from runtime.client import open_channel
from runtime.metrics import RpcMetrics
from runtime.server import GrpcServer, ServerOptions

Context = grpc.aio.ServicerContext[pb.RunRequest, pb.RunResponse]
STALL_S = 0.5


class Talkative:
    """A stay that always has more to say."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.num_said = 0
        self.ended = asyncio.Event()

    async def run(self) -> AsyncIterator[pb.RunResponse]:
        while True:
            self.num_said += 1
            await asyncio.sleep(self.pause_s)
            response = pb.RunResponse()
            response.started.terms.compatibility_text = "x" * (1 << 16)
            yield response

    def end(self) -> None:
        self.ended.set()


class Service(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, stay: Talkative) -> None:
        self.stay = stay
        self.inbox: Inbox[pb.RunRequest, object] | None = None

    async def Run(self, request_iterator: AsyncIterator[pb.RunRequest],
                  context: Context) -> AsyncIterator[pb.RunResponse]:
        parts = cast(RequestParts, SimpleNamespace(grammars=None, stall_s=STALL_S))
        request = Request("r", (1,), 1, SamplingParams(temperature=0))
        self.inbox = Inbox(request_iterator)

        async def begin() -> Talkative:
            return self.stay

        async with aclosing(serve(parts, self.inbox, request, begin)) as responses:
            async for response in responses:
                yield response


@asynccontextmanager
async def serving(stay: Talkative) -> AsyncIterator[tuple[Service, GrpcServer, Any]]:
    service = Service(stay)
    server = GrpcServer(ServerOptions("127.0.0.1:0"), services=(), metrics=RpcMetrics.create(CollectorRegistry()))
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.grpc)
    try:
        async with open_channel(await server.start()) as channel:
            yield service, server, prefill_pb2_grpc.PrefillStub(channel)
    finally:
        await server.drain(grace_s=0.1)


async def test_a_caller_that_never_reads_does_not_keep_its_handler() -> None:
    """Its connection lives, so nothing else would end the call; and every drain waited for it as long as it may."""
    stay = Talkative()
    async with serving(stay) as (_, server, stub):
        call = stub.Run()
        await call.write(pb.RunRequest())
        async with asyncio.timeout(30):
            await stay.ended.wait()
            await server.drain(grace_s=600)
        call.cancel()


async def test_a_caller_that_reads_slowly_is_not_cut_off() -> None:
    stay = Talkative(pause_s=STALL_S / 10)
    async with serving(stay) as (_, _, stub):
        call = stub.Run()
        for _ in range(40):
            await call.read()
        assert not stay.ended.is_set()
        call.cancel()
        await asyncio.wait_for(stay.ended.wait(), 30)


async def test_a_caller_that_never_stops_talking_is_read_no_further_than_it_is_heard() -> None:
    stay = Talkative(pause_s=60)  # it takes nothing out of its inbox
    async with serving(stay) as (service, _, stub):
        call = stub.Run()
        for _ in range(4 * MAX_UNREAD):
            await call.write(pb.RunRequest())
        await asyncio.sleep(0.2)
        assert service.inbox is not None
        assert service.inbox._queue.qsize() == MAX_UNREAD
        call.cancel()
        await asyncio.wait_for(stay.ended.wait(), 30)

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client import CollectorRegistry

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime import errors
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.client import open_channel, open_sync_channel, wait_serving
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ServerSecurity
from tests.router.harness import eventually
from tests.support.network.authority import Authority
from tests.support.network.door import serving
from tests.support.router.fake_workers import CachelessWorker
from tests.support.router.generation import SERVICE, EchoGeneration, serve_echo

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


class Ticker(CachelessWorker):
    """An endless stream."""

    async def Watch(
        self,
        request: worker_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        while True:
            yield worker_pb2.WatchResponse()
            await asyncio.sleep(0.01)


@pytest.fixture
async def echo() -> AsyncIterator[tuple[EchoGeneration, GrpcServer, str]]:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer, max_message_bytes=4096)
    yield servicer, server, address
    await server.drain(grace_s=0)


async def fail(address: str, *, text: str, request_id: str = "") -> errors.BatonError:
    async with open_channel(address) as channel:
        request = pb.GenerateRequest(text=text, request_id=request_id)
        call = generation_pb2_grpc.GenerationStub(channel).Generate(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return error_from_rpc(caught.value)


async def test_errors_of_a_stream_reach_the_client_typed(
    echo: tuple[EchoGeneration, GrpcServer, str],
) -> None:
    full = await fail(echo[2], text="full")
    assert isinstance(full, errors.CapacityError)
    assert (full.resource, full.retry_after_s) == ("queue", 2.5)
    bug = await fail(echo[2], text="bug", request_id="r7")
    assert isinstance(bug, errors.InternalError)
    assert "r7" in str(bug)
    assert "secret" not in str(bug)


class EndingTogether(EchoGeneration):
    """Streams that end with the same error, as requests of a broken pool do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting, self.broke, self.error = (
            0,
            asyncio.Event(),
            errors.PeerLostError("stage 1 died"),
        )

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.num_waiting += 1
        await self.broke.wait()
        raise self.error
        yield


async def test_an_error_that_many_calls_end_with_reaches_all_of_them() -> None:
    """The first to end used to clear the frames of the others, which then ended with UNKNOWN."""
    servicer = EndingTogether()
    server = GrpcServer(
        ServerOptions(listen="127.0.0.1:0"),
        services=(SERVICE,),
        metrics=RpcMetrics.create(CollectorRegistry()),
    )
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server.grpc)
    address = await server.start()
    try:
        calls = [asyncio.create_task(fail(address, text="x")) for _ in range(6)]
        await eventually(lambda: servicer.num_waiting == 6, "all calls")
        servicer.broke.set()
        ends = await asyncio.gather(*calls)
        assert [type(error) for error in ends] == [errors.PeerLostError] * 6, ends
    finally:
        await server.drain(grace_s=0)


async def test_oversize_message_names_the_limit(
    echo: tuple[EchoGeneration, GrpcServer, str],
) -> None:
    error = await fail(echo[2], text="x" * 5000)
    assert isinstance(error, errors.InvalidRequestError)
    assert "4096" in error.violations[0].description


async def test_cancelled_stream_is_closed_at_once(
    echo: tuple[EchoGeneration, GrpcServer, str],
) -> None:
    servicer, _, address = echo
    async with open_channel(address) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(text="hang"))
        await call.read()
        assert servicer.running
        call.cancel()
        await eventually(servicer.ended.is_set, "the call")
        assert not servicer.running


async def test_dropped_channel_is_a_cancellation(
    echo: tuple[EchoGeneration, GrpcServer, str],
) -> None:
    servicer, _, address = echo
    channel = open_channel(address)
    await (
        generation_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(text="hang")).read()
    )
    await channel.close()
    await eventually(servicer.ended.is_set, "the call")


async def test_calls_are_counted() -> None:
    registry = CollectorRegistry()
    server = GrpcServer(
        ServerOptions(listen="127.0.0.1:0"),
        services=(SERVICE,),
        metrics=RpcMetrics.create(registry),
    )
    generation_pb2_grpc.add_GenerationServicer_to_server(EchoGeneration(), server.grpc)
    address = await server.start()
    await fail(address, text="full")
    async with open_channel(address) as channel:
        await generation_pb2_grpc.GenerationStub(channel).GetModelInfo(pb.GetModelInfoRequest())
    labels = {"method": "/baton.v1.Generation/Generate", "grpc_code": "RESOURCE_EXHAUSTED"}
    assert registry.get_sample_value("baton_requests_total", labels) == 1
    labels = {"method": "/baton.v1.Generation/GetModelInfo", "grpc_code": "OK"}
    assert registry.get_sample_value("baton_requests_total", labels) == 1
    assert registry.get_sample_value("baton_requests_in_flight", {"method": labels["method"]}) == 0
    assert registry.get_sample_value("baton_draining") == 0
    await server.drain(grace_s=0)
    assert registry.get_sample_value("baton_draining") == 1


async def test_health_watch_follows_and_drain_reports_not_serving_first() -> None:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer)
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))  # type: ignore[attr-defined]  # stubs lack it
        assert (await watch.read()).status == SERVING
        await server.health.set_not_serving(SERVICE)
        assert (await watch.read()).status == NOT_SERVING
        await server.health.set_serving(SERVICE)
        assert (await watch.read()).status == SERVING
        running = generation_pb2_grpc.GenerationStub(channel).Generate(
            pb.GenerateRequest(text="hang")
        )
        await running.read()
        draining = asyncio.create_task(server.drain(grace_s=0.3))
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # it had its grace period
            await running.read()
        assert isinstance(error_from_rpc(caught.value), errors.UnavailableError)
        await draining
    assert not servicer.running


async def test_a_drain_lets_calls_through_that_begin_nothing() -> None:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer)
    async with open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        running = stub.Generate(pb.GenerateRequest(text="hang", request_id="r1"))
        await running.read()
        draining = asyncio.create_task(server.drain(grace_s=30))
        await eventually(lambda: server.calls._refusal, "a server that does not drain")
        refused = await fail(address, text="hello")
        assert isinstance(refused, errors.DrainingError)
        assert "draining" in str(refused)
        assert list((await stub.Abort(pb.AbortRequest(request_ids=["r1"]))).aborted) == ["r1"]
        assert (await stub.GetClusterStatus(pb.GetClusterStatusRequest())).running_requests == 1
        running.cancel()
        async with asyncio.timeout(20):
            await draining


async def test_emptying_hands_calls_back_and_keeps_the_server() -> None:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer)
    async with open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        running = stub.Generate(pb.GenerateRequest(text="hang"))
        await running.read()
        await server.empty(grace_s=0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.read()
        assert isinstance(error_from_rpc(caught.value), errors.DrainingError)
        assert not servicer.running
        again = stub.Generate(pb.GenerateRequest(text="hang"))
        await again.read()
        again.cancel()
    await server.drain(grace_s=0)


async def test_drain_lets_calls_finish_and_does_not_wait_for_background_streams() -> None:
    server = GrpcServer(
        ServerOptions(listen="127.0.0.1:0"),
        services=(SERVICE,),
        metrics=RpcMetrics.create(CollectorRegistry()),
        background_methods=frozenset({"/baton.v1.Worker/Watch"}),
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(Ticker(), server.grpc)
    address = await server.start()
    async with open_channel(address) as channel:
        watch = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        await watch.read()
        async with asyncio.timeout(60):
            await server.drain(grace_s=600)


async def test_a_drain_ends_calls_before_streams_without_an_end() -> None:
    """What a call says last may go through such a stream."""
    ended: list[str] = []

    class Calls(EchoGeneration):
        async def Generate(
            self,
            request: pb.GenerateRequest,
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> AsyncIterator[pb.GenerateResponse]:
            try:
                yield pb.GenerateResponse()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                ended.append("call")

    class Stream(Ticker):
        async def Watch(
            self,
            request: worker_pb2.WatchRequest,
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> AsyncIterator[worker_pb2.WatchResponse]:
            try:
                async for response in super().Watch(request, context):
                    yield response
            finally:
                ended.append("stream")

    server = GrpcServer(
        ServerOptions(listen="127.0.0.1:0"),
        services=(SERVICE,),
        metrics=RpcMetrics.create(CollectorRegistry()),
        background_methods=frozenset({"/baton.v1.Worker/Watch"}),
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(Stream(), server.grpc)
    generation_pb2_grpc.add_GenerationServicer_to_server(Calls(), server.grpc)
    async with open_channel(await server.start()) as channel:
        watch = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        call = generation_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest())
        await asyncio.gather(watch.read(), call.read())
        await server.drain(grace_s=0)
    assert ended == ["call", "stream"]


async def test_reflection_lists_the_services(echo: tuple[EchoGeneration, GrpcServer, str]) -> None:
    def names() -> set[str]:
        with open_sync_channel(echo[2]) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {SERVICE, "grpc.health.v1.Health"} <= await asyncio.to_thread(names)


async def test_reflection_is_the_same_under_both_of_its_names(
    echo: tuple[EchoGeneration, GrpcServer, str],
) -> None:
    """Newer clients ask version 1 only; its messages are those of v1alpha."""
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    answers = []
    async with open_channel(echo[2]) as channel:
        for version in ("v1", "v1alpha"):
            call: grpc.aio.StreamStreamCall[Any, Any] = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )(iter(asked))
            answers.append([answer async for answer in call])
    first, second = answers
    assert first == second
    listed = {service.name for service in first[0].list_services_response.service}
    assert {
        SERVICE,
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    } <= listed
    assert first[1].file_descriptor_response.file_descriptor_proto


async def test_port_in_use_is_one_clear_error(echo: tuple[EchoGeneration, GrpcServer, str]) -> None:
    with pytest.raises(errors.ConfigError, match=echo[2]) as caught:
        await serve_echo(EchoGeneration(), listen=echo[2])
    assert caught.value.field == "listen"


async def test_wait_serving_reports_the_last_state(
    echo: tuple[EchoGeneration, GrpcServer, str],
) -> None:
    async with open_channel(echo[2]) as channel:
        await wait_serving(channel, SERVICE, timeout_s=60)
        await echo[1].health.set_not_serving(SERVICE)
        with pytest.raises(errors.UnavailableError, match="NOT_SERVING"):
            await wait_serving(channel, SERVICE, timeout_s=1)


async def test_wait_serving_reports_connection_errors(tmp_path: Path) -> None:
    security = ServerSecurity(Authority().store(tmp_path, "prefill"))
    async with serving(security) as address, open_channel(address) as channel:
        with pytest.raises(
            errors.UnavailableError,
            match=r"is not serving after 1 s: .* it closes the connection; it may",
        ):
            await wait_serving(channel, SERVICE, timeout_s=1)


async def test_the_log_has_names_of_bad_fields_without_their_values(
    echo: tuple[EchoGeneration, GrpcServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with open_channel(echo[2]) as channel:
        request = pb.GenerateRequest(text="hi")
        request.sampling.temperature = -1
        with pytest.raises(grpc.aio.AioRpcError, match="must be from 0 to 100, got -1"):
            await generation_pb2_grpc.GenerationStub(channel).Generate(request).read()
    assert "call rejected for sampling.temperature" in caplog.text
    assert "got -1" not in caplog.text

"""A server's limits for its callers, over real connections."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from runtime import errors
from runtime.rpc.client import ChannelOptions, open_channel
from runtime.rpc.rebinding_server import LastingServer
from runtime.rpc.server import MAX_PING_STRIKES, MIN_PING_INTERVAL_S
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ServerSecurity
from runtime.security.tokens import TokenList
from tests.router.harness import eventually
from tests.support.network.ports import taken_port
from tests.support.network.raw_http2 import (
    END_HEADERS,
    HEADERS,
    PING,
    RST_STREAM,
    block,
    call,
    frame,
    raw_connection,
)
from tests.support.router.generation import EchoGeneration, serve_echo

Context = grpc.aio.ServicerContext[Any, Any]


class Torrent(EchoGeneration):
    """A stream longer than any window, sent while it is read."""

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.running.add(request.request_id)
        try:
            while True:
                yield pb.GenerateResponse(chunk=pb.GenerateChunk(text="x" * 65536))
        finally:
            self.running.discard(request.request_id)


def refused(failure: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> errors.BatonError:
    return error_from_rpc(failure.value)


async def test_a_client_that_never_reads_ends_and_holds_up_no_drain() -> None:
    servicer = Torrent()
    server, address = await serve_echo(servicer, write_s=0.3)
    async with open_channel(address) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(
            pb.GenerateRequest(request_id="r", text="x")
        )
        await eventually(lambda: servicer.running, "no call")
        await eventually(lambda: not servicer.running, "a handler that never ends")
        await eventually(lambda: server.calls._quiet.is_set(), "a call that counts for ever")
        async with asyncio.timeout(30):
            await server.drain(grace_s=600)
        call.cancel()


async def test_its_status_is_there_when_it_reads_after_all() -> None:
    servicer = Torrent()
    server, address = await serve_echo(servicer, write_s=0.3)
    async with open_channel(address) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(
            pb.GenerateRequest(request_id="r", text="x")
        )
        await eventually(lambda: servicer.running, "no call")
        await eventually(lambda: not servicer.running, "a handler that never ends")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert isinstance(refused(caught), errors.RequestAborted)
        assert "read nothing for 0.3 s" in str(refused(caught))
    await server.drain(grace_s=0)


async def test_calls_beyond_the_servers_limit_are_refused_and_name_it() -> None:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer, max_calls=3)
    async with open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        running = [
            stub.Generate(pb.GenerateRequest(request_id=str(i), text="hang")) for i in range(3)
        ]
        for call in running:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text="one more")).read()
        assert isinstance(refused(caught), errors.CapacityError)
        assert "3 calls are open, which is the limit" in str(refused(caught))
        running[0].cancel()
        await eventually(lambda: len(servicer.running) == 2, "a call that does not end")
        again = stub.Generate(pb.GenerateRequest(text="hang"))
        assert await again.read() == pb.GenerateResponse(
            request_id="chosen-by-server",
            chunk=pb.GenerateChunk(
                token_ids=[0], text="hang ", usage=pb.Usage(prompt_tokens=1, completion_tokens=1)
            ),
        )
    await server.drain(grace_s=0)


async def test_messages_held_by_calls_are_bounded_together() -> None:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer, max_held_bytes=2000)
    async with open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        text = "hang " + "x" * 1200
        first = stub.Generate(pb.GenerateRequest(text=text))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text=text)).read()
        assert isinstance(refused(caught), errors.CapacityError)
        assert "the limit is 2000" in str(refused(caught))
        first.cancel()
        await eventually(lambda: not servicer.running, "a call that does not end")
        assert await stub.Generate(pb.GenerateRequest(text=text)).read()
    await server.drain(grace_s=0)


@pytest.mark.parametrize(
    ("limits", "text", "num_own"),
    [({"max_calls": 9}, "hang", 8), ({"max_held_bytes": 2700}, "hang " + "x" * 1200, 1)],
)
async def test_a_client_with_many_calls_leaves_some_to_others(
    tmp_path: Path, limits: dict[str, int], text: str, num_own: int
) -> None:
    """Eight times what it leaves, of calls and of the bytes of their messages."""
    (tmp_path / "tokens").write_text("alice token-of-alice-1234\nbob token-of-bob-123456\n")
    alice, bob = (
        (("authorization", f"Bearer {token}"),)
        for token in ("token-of-alice-1234", "token-of-bob-123456")
    )
    security = ServerSecurity(tokens=TokenList(tmp_path / "tokens"))
    server, address = await serve_echo(EchoGeneration(), security=security, **limits)
    async with open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        running = [
            stub.Generate(pb.GenerateRequest(text=text), metadata=alice) for _ in range(num_own)
        ]
        for call in running:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text=text), metadata=alice).read()
        assert isinstance(refused(caught), errors.CapacityError)
        assert "left to others" in str(refused(caught))
        assert await stub.Generate(pb.GenerateRequest(text=text), metadata=bob).read()
    await server.drain(grace_s=0)


async def test_calls_without_a_message_block_their_client_alone(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alice token-of-alice-1234\nbob token-of-bob-123456\n")
    security = ServerSecurity(tokens=TokenList(tmp_path / "tokens"))
    server, address = await serve_echo(
        EchoGeneration(), security=security, max_message_bytes=64 << 20
    )

    async def no_message() -> AsyncIterator[bytes]:
        await asyncio.sleep(600)
        yield b""

    async with open_channel(address) as channel:
        alice = (("authorization", "Bearer token-of-alice-1234"),)
        silent: Any = channel.stream_stream("/baton.v1.Generation/Generate")
        calls = [silent(no_message(), metadata=alice) for _ in range(20)]
        await eventually(lambda: len(server.calls._calls) == len(calls), "calls")
        async with asyncio.timeout(2.5):  # less than the patience with messages being read
            response = await generation_pb2_grpc.GenerationStub(channel).GetLoad(
                pb.GetLoadRequest(), metadata=(("authorization", "Bearer token-of-bob-123456"),)
            )
        assert response.prefill_workers == 3
        for call in calls:
            call.cancel()
    await server.drain(grace_s=0)


async def test_questions_are_short() -> None:
    server, address = await serve_echo(EchoGeneration())
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationStub(channel).Abort(
                pb.AbortRequest(request_ids=["x" * 128] * 4096)
            )
        assert isinstance(refused(caught), errors.InvalidRequestError)
        assert "at most 262144 bytes" in str(refused(caught))
    await server.drain(grace_s=0)


async def test_a_malformed_message_is_the_callers_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, address = await serve_echo(EchoGeneration())
    async with open_channel(address) as channel:
        start: Any = channel.unary_unary("/baton.v1.Generation/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await start(b"\xff\xff\xff")
        assert isinstance(refused(caught), errors.InvalidRequestError)
    await server.drain(grace_s=0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_streams_beyond_the_connections_limit_wait_at_the_client() -> None:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer, max_streams=2)
    async with open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        await stub.GetLoad(pb.GetLoadRequest())  # the settings have arrived
        calls = [
            stub.Generate(pb.GenerateRequest(request_id=str(i), text="hang")) for i in range(3)
        ]
        await asyncio.gather(calls[0].read(), calls[1].read())
        assert len(servicer.running) == 2
        calls[0].cancel()
        await calls[2].read()
        for call in calls:
            call.cancel()
    await server.drain(grace_s=0)


async def test_connections_of_a_server_are_bounded() -> None:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer, max_connections=2)
    async with (
        open_channel(address) as first,
        open_channel(address) as second,
        open_channel(address) as third,
    ):
        calls = []
        for name, channel in (("1", first), ("2", second), ("3", third)):
            request = pb.GenerateRequest(request_id=name, text="hang")
            calls.append(generation_pb2_grpc.GenerationStub(channel).Generate(request))
            await calls[-1].read()
        # Which of them is the newest is not known to the server: all came between two checks.
        reads = [asyncio.create_task(call.read()) for call in calls]
        ended, open_ones = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        (closed,) = ended
        failure = closed.exception()
        assert isinstance(failure, grpc.aio.AioRpcError)
        assert failure.code() is grpc.StatusCode.UNAVAILABLE, "one connection is one too many"
        others = {"1", "2", "3"} - {str(reads.index(closed) + 1)}
        await eventually(lambda: servicer.running == others, "a call without a connection")
        for read in open_ones:
            read.cancel()
        for call in calls:
            call.cancel()
    await server.drain(grace_s=0)


async def pinged(address: str, pause_s: float, count: int, *, ends_within_s: float) -> bool:
    """Return whether the connection survives that long after this many pings."""
    async with raw_connection(address) as connection:
        try:
            for _ in range(count):
                await connection.send(frame(PING, bytes(8)))
                await asyncio.sleep(pause_s)
            await asyncio.wait_for(connection.closed(), ends_within_s)
        except TimeoutError:
            return True
        except ConnectionError:
            pass
        return False


async def test_a_flood_of_pings_ends_the_connection_and_our_own_pace_does_not() -> None:
    server, address = await serve_echo(
        EchoGeneration(), keepalive_s=600.0
    )  # this client does not answer the server's own
    flood, pace = await asyncio.gather(
        pinged(address, 0, 10_000, ends_within_s=60),
        pinged(address, 2 * MIN_PING_INTERVAL_S, MAX_PING_STRIKES + 5, ends_within_s=3),
    )
    assert not flood
    assert pace
    assert ChannelOptions().keepalive_s > 2 * MIN_PING_INTERVAL_S
    await server.drain(grace_s=0)


async def test_the_second_door_takes_only_names(door: str) -> None:
    server, _ = await serve_echo(EchoGeneration(), health_listen=door)
    async with open_channel(door) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # the stubs lack it
        assert await check(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await check(health_pb2.HealthCheckRequest(service="x" * 2000))
    await server.drain(grace_s=0)


@pytest.fixture
def door() -> Iterator[str]:
    with taken_port("127.0.0.1") as taken:
        yield f"127.0.0.1:{taken + 1}"  # unused while the one before it is held


async def sent(address: str, path: bytes) -> None:
    async with raw_connection(address) as connection:
        await connection.send(frame(HEADERS, block(path), END_HEADERS, stream=1))
        await asyncio.sleep(0.3)


@pytest.mark.parametrize("path", [b"/\xff\xfe/x", b"/baton.v1.Generation/Generat\xc3("])
async def test_a_path_that_is_no_text_stops_nothing(
    path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """grpc.aio ends its serving loop for it without an error."""
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer)
    async with open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        running = stub.Generate(pb.GenerateRequest(request_id="r", text="hang"))
        await running.read()
        for _ in range(3):
            await sent(address, path)
            async with open_channel(address) as other:
                await generation_pb2_grpc.GenerationStub(other).GetLoad(
                    pb.GetLoadRequest(), wait_for_ready=True, timeout=20
                )
        assert servicer.running == {"r"}, "what was under way goes on"
        await stub.GetLoad(pb.GetLoadRequest(), wait_for_ready=True, timeout=20)
        assert "gRPC closed its port" in caplog.text
        lasting = server.grpc
        assert isinstance(lasting, LastingServer)
        await eventually(lambda: lasting.num_former == 1, "former servers without calls")
        draining = asyncio.create_task(server.drain(grace_s=20))
        running.cancel()
        async with asyncio.timeout(30):
            await draining


async def test_a_client_that_resets_a_stream_it_does_not_read_is_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC fails the response that is being sent, and cancels the handler later or not at all."""
    servicer = Torrent()
    server, address = await serve_echo(servicer)
    async with raw_connection(address) as connection:
        for stream in range(1, 41, 2):
            request = pb.GenerateRequest(request_id=str(stream), text="x").SerializeToString()
            await connection.send(
                call(b"/baton.v1.Generation/Generate", message=request, stream=stream)
            )
            await eventually(lambda: servicer.running, "no call")
            await connection.send(frame(RST_STREAM, (8).to_bytes(4, "big"), stream=stream))
            await eventually(lambda: not servicer.running, "a handler that never ends")
    await server.drain(grace_s=0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]

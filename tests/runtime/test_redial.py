"""Peers known by a name that return at another address: gRPC's own resolver asks a name server
whose answers change.

Both ends of gRPC are real, on loopback addresses. A peer that is away has no address at all, as a
pod's name.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from runtime.config import parse_address
from runtime.rpc.client import ChannelOptions, open_channel, open_sync_channel
from runtime.rpc.redial import RedialingChannel, RedialingSyncChannel, renew
from runtime.rpc.status import is_lost
from runtime.security.access import PLAIN_CHANNEL
from tests.support.network.names import NameServer
from tests.support.router.generation import EchoGeneration, serve_echo

NAME, FOUND_S = "worker.test", 3.0
AWAY_S = 11.0  # gRPC itself looks for a name that is gone after 1, 2.6, 5.2, 9.3 and 15.8 s
Ask = Callable[[], Awaitable[str]]


@pytest.fixture
def names() -> Iterator[NameServer]:
    with NameServer() as server:
        yield server


@asynccontextmanager
async def echo_at(host: str, port: int = 0) -> AsyncIterator[int]:
    """Run a server; yield its port."""
    server, address = await serve_echo(EchoGeneration(), listen=f"{host}:{port}")
    try:
        yield parse_address(address).port
    finally:
        await server.drain(grace_s=0)


def target(names: NameServer, port: int) -> str:
    """Return the name as a target resolved by this server."""
    return f"dns://{names.address}/{NAME}:{port}"


@asynccontextmanager
async def asking(kind: str, names: NameServer, port: int) -> AsyncIterator[Ask]:
    """Yield a function that calls the peer over one channel of this kind, as `runtime.rpc.client`
    makes it for a name."""
    where, options = target(names, port), ChannelOptions().as_grpc()
    if kind == "asyncio":
        async with RedialingChannel(
            PLAIN_CHANNEL, lambda _: grpc.aio.insecure_channel(where, options), is_named=True
        ) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)

            async def ask() -> str:
                return (await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=1)).model

            yield ask
        return
    with RedialingSyncChannel(
        PLAIN_CHANNEL, lambda _: grpc.insecure_channel(where, options), is_named=True
    ) as blocking:
        sync_stub = generation_pb2_grpc.GenerationStub(blocking)
        stream = kind == "threads, streaming"

        def ask_now() -> str:
            if stream:
                return next(
                    sync_stub.Generate(pb.GenerateRequest(text="echo"), timeout=1)
                ).chunk.text.strip()
            return sync_stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=1).model

        yield lambda: asyncio.to_thread(ask_now)


async def seconds_until(ask: Ask, *, answers: bool) -> float:
    began_s = time.monotonic()
    async with asyncio.timeout(60):
        while True:
            try:
                if await ask() == "echo" and answers:
                    return time.monotonic() - began_s
            except grpc.RpcError:
                if not answers:
                    return time.monotonic() - began_s
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("away_s", [0.0, AWAY_S])
@pytest.mark.parametrize("kind", ["asyncio", "threads", "threads, streaming"])
async def test_a_peer_at_a_new_address_is_found_within_three_seconds(
    names: NameServer, kind: str, away_s: float
) -> None:
    """In one of two tries: a busy machine may delay either."""
    if await seconds_until_found(names, kind, away_s) >= FOUND_S:
        assert await seconds_until_found(names, kind, away_s) < FOUND_S


async def seconds_until_found(names: NameServer, kind: str, away_s: float) -> float:
    """Move a peer to another address after some time away; return when a caller has found it."""
    names.answers[NAME] = ["127.0.0.2"]
    async with echo_at("127.0.0.2") as port:
        pass
    async with asking(kind, names, port) as ask:
        async with echo_at("127.0.0.2", port):
            await seconds_until(ask, answers=True)
        names.answers[NAME] = []
        away_until_s = time.monotonic() + away_s
        while time.monotonic() < away_until_s:
            await seconds_until(ask, answers=False)
            await asyncio.sleep(0.1)
        async with echo_at("127.0.0.3", port):
            names.answers[NAME] = ["127.0.0.3"]
            return await seconds_until(ask, answers=True)


async def test_grpc_itself_looks_a_name_up_again_when_its_connection_is_lost(
    names: NameServer,
) -> None:
    """For calls that wait for a connection: the channel of these is not replaced."""
    names.answers[NAME] = ["127.0.0.2"]
    async with echo_at("127.0.0.2") as port:
        pass
    async with grpc.aio.insecure_channel(
        target(names, port), ChannelOptions().as_grpc()
    ) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        async with echo_at("127.0.0.2", port):
            await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        async with echo_at("127.0.0.3", port):
            names.answers[NAME] = ["127.0.0.3"]
            await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=FOUND_S, wait_for_ready=True)


async def test_a_recovered_name_server_resolves_without_further_delay(
    names: NameServer,
) -> None:
    names.answers[NAME] = None
    async with echo_at("127.0.0.3") as port, asking("asyncio", names, port) as ask:
        await seconds_until(ask, answers=False)
        names.garbage = b"\x00" * 7
        await seconds_until(ask, answers=False)
        names.garbage, names.answers[NAME] = b"", ["127.0.0.3"]
        assert (
            await seconds_until(ask, answers=True) < 6.0
        )  # a question under way is asked again after five seconds


@pytest.mark.parametrize("addresses", [["127.0.0.9", "127.0.0.3"], ["::1"], ["127.0.0.9", "::1"]])
async def test_one_reachable_address_of_several_is_enough(
    names: NameServer, addresses: list[str]
) -> None:
    names.answers[NAME] = addresses
    host = addresses[-1]
    async with (
        echo_at(f"[{host}]" if ":" in host else host) as port,
        asking("asyncio", names, port) as ask,
    ):
        assert await seconds_until(ask, answers=True) < FOUND_S


async def test_a_call_under_way_outlives_the_channel_that_is_replaced(names: NameServer) -> None:
    names.answers[NAME] = ["127.0.0.2"]
    options = ChannelOptions().as_grpc()
    async with echo_at("127.0.0.2") as port:
        where = target(names, port)
        async with RedialingChannel(
            PLAIN_CHANNEL, lambda _: grpc.aio.insecure_channel(where, options), is_named=True
        ) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            held = stub.Generate(pb.GenerateRequest(text="hang"))
            await held.read()
            renew(channel)
            asked = names.num_asked
            assert (await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)).model == "echo"
            assert names.num_asked > asked
            assert not held.done()
            held.cancel()


async def test_a_reachable_name_keeps_its_channel(names: NameServer) -> None:
    names.answers[NAME] = ["127.0.0.2"]
    dialed, options = [], ChannelOptions().as_grpc()
    async with echo_at("127.0.0.2") as port:
        where = target(names, port)

        def dial(_: object) -> grpc.aio.Channel:
            dialed.append(where)
            return grpc.aio.insecure_channel(where, options)

        async with RedialingChannel(PLAIN_CHANNEL, dial, is_named=True) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            await asyncio.gather(
                *(stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10) for _ in range(8))
            )
            for _ in range(8):
                await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert len(dialed) == 1


async def test_a_peer_that_shakes_hands_slowly_is_reached(names: NameServer) -> None:
    """Each connection attempt has seconds, for any pause between two: a busy peer accepts none
    within 0.4 s."""
    server, address = await serve_echo(EchoGeneration())
    host, port = address.split(":")

    async def delayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0.7)  # the server's first frame comes so late, or later
        await asyncio.gather(_pass_on(reader, to_writer), _pass_on(to_reader, writer))

    relay = await asyncio.start_server(delayed, "127.0.0.1", 0)
    async with (
        relay,
        open_channel(
            f"127.0.0.1:{relay.sockets[0].getsockname()[1]}",
            ChannelOptions(max_reconnect_backoff_s=0.4),
        ) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        assert (await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)).model == "echo"
    await server.drain(grace_s=0)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def test_channels_redial_names_but_not_addresses() -> None:
    for address, is_named in (
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("[fe80::1%lo]:1", False),
        ("localhost:1", True),
        ("decode-0.decode:7000", True),
    ):
        async with open_channel(address) as channel:
            assert isinstance(channel, RedialingChannel) is is_named, address
        with open_sync_channel(address) as blocking:
            assert isinstance(blocking, RedialingSyncChannel) is is_named, address


async def test_a_name_without_an_address_is_a_peer_that_cannot_be_reached(
    names: NameServer,
) -> None:
    options = ChannelOptions().as_grpc()
    async with RedialingChannel(
        PLAIN_CHANNEL, lambda _: grpc.aio.insecure_channel(target(names, 1), options), is_named=True
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generation_pb2_grpc.GenerationStub(channel).GetModelInfo(
                pb.GetModelInfoRequest(), timeout=10
            )
    assert is_lost(refused.value)

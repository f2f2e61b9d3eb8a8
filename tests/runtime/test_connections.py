"""How many connections one peer may hold, and what is left to others and to the process itself."""

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from runtime.rpc.client import open_channel, wait_serving
from runtime.rpc.connections import (
    RESERVED_FILES,
    ConnectionLimits,
    _excess,
    files_for,
    raised_file_limit,
)
from runtime.security.access import ServerSecurity, network_of
from tests.router.harness import eventually, token_request, write_model_dir
from tests.router.test_process import announced
from tests.support.network.authority import Authority
from tests.support.network.door import plain_client
from tests.support.network.ports import taken_port
from tests.support.network.raw_http2 import RawConnection, raw_connection
from tests.support.router.fake_workers import Fabric, FakeDecode, FakePrefill, Journal
from tests.support.router.generation import EchoGeneration, serve_echo

STRANGER = "127.0.0.2"
MAX_CONNECTIONS = 8


@pytest.mark.parametrize(
    ("wanted", "files", "kept", "accepted", "per_peer"),
    [
        (1024, 1 << 20, 1024, 2048, 512),
        (1024, 1024, 384, 512, 192),  # 512 are reserved
        (1024, 256, 48, 64, 48),  # a quarter
        (8, 1 << 20, 8, 16, 8),
        (1, 1 << 20, 1, 2, 1),
    ],
)
def test_connections_leave_descriptors_to_the_process(
    wanted: int, files: int, kept: int, accepted: int, per_peer: int
) -> None:
    assert ConnectionLimits.within(wanted, files) == ConnectionLimits(kept, accepted, per_peer)
    assert ConnectionLimits.within(wanted, files_for(wanted)).kept == wanted
    assert files_for(1024) == RESERVED_FILES + 2048


def test_the_newest_of_the_peer_that_has_most_are_closed() -> None:
    limits = ConnectionLimits(kept=5, accepted=10, per_peer=3)
    few, many = b"\1\0\0\1", b"\2\0\0\2"
    assert _excess([(1, few), (2, many), (3, many), (4, few)], limits) == []
    assert _excess([(1, many), (2, many), (3, many), (4, many)], limits) == [4], (
        "more than one peer may have"
    )
    assert _excess([(1, many), (2, many), (3, few), (4, many), (5, few), (6, few)], limits) in (
        [4],
        [6],
    )
    assert _excess([(n, many) for n in range(9)] + [(9, few)], limits) == [8, 7, 6, 5, 4, 3]
    assert _excess([(n, bytes([n, 0, 0, 0])) for n in range(6)], limits), (
        "as many peers as connections"
    )


def test_a_peer_is_an_address_or_the_network_of_one() -> None:
    assert network_of("10.1.2.3") == network_of("::ffff:10.1.2.3") == bytes([10, 1, 2, 3])
    assert (
        network_of("2001:db8:1:2::3")
        == network_of("2001:db8:1:2:ffff::")
        != network_of("2001:db8:1:3::3")
    )
    assert network_of("fe80::1%eth0") == network_of("fe80::2")


@pytest.fixture
def soft_limit() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(soft_limit: int) -> None:
    assert raised_file_limit() == soft_limit
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft_limit


@pytest.fixture
def door() -> Iterator[str]:
    with taken_port("127.0.0.1") as taken:
        yield f"127.0.0.1:{taken + 1}"  # unused while the one before it is held


@asynccontextmanager
async def held(
    address: str, count: int, *, greets: bool = False
) -> AsyncIterator[list[RawConnection]]:
    """Open this many connections of a stranger, which send nothing or only a greeting."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(raw_connection(address, greets=greets, source=STRANGER))
            for _ in range(count)
        ]


@pytest.mark.parametrize("greets", [False, True])
async def test_many_connections_of_a_stranger_leave_the_port_open(*, greets: bool) -> None:
    """gRPC's own limit is half a limit above ours: without limits per peer it is closed to all."""
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer, max_connections=MAX_CONNECTIONS, keepalive_s=600.0)
    async with open_channel(address) as early:
        running = generation_pb2_grpc.GenerationStub(early).Generate(
            pb.GenerateRequest(request_id="r", text="hang")
        )
        await running.read()
        async with held(address, 2 * MAX_CONNECTIONS - 1, greets=greets) as strangers:
            closed = [asyncio.create_task(stranger.closed()) for stranger in strangers]
            await eventually(
                lambda: sum(task.done() for task in closed) >= MAX_CONNECTIONS,
                "strangers that stay",
            )
            for _ in range(3):
                async with open_channel(address) as late:
                    await generation_pb2_grpc.GenerationStub(late).GetLoad(
                        pb.GetLoadRequest(), timeout=30, wait_for_ready=True
                    )
            assert servicer.running == {"r"}, "who was there before them stays"
            for task in closed:
                task.cancel()
        running.cancel()
    await server.drain(grace_s=0)


async def test_silent_handshakes_close_no_port_that_speaks_tls(tmp_path: Path) -> None:
    authority = Authority()
    security = ServerSecurity(authority.store(tmp_path, "router"))
    server, address = await serve_echo(
        EchoGeneration(), max_connections=MAX_CONNECTIONS, security=security
    )
    known = authority.issue("client")
    async with held(address, 2 * MAX_CONNECTIONS) as strangers:
        async with plain_client(address, authority.pem, known.key, known.certificate) as channel:
            await generation_pb2_grpc.GenerationStub(channel).GetLoad(
                pb.GetLoadRequest(), timeout=30, wait_for_ready=True
            )
        async with asyncio.timeout(
            30
        ):  # those that may stay have no more than the time of a handshake
            await asyncio.gather(*(stranger.closed() for stranger in strangers))
    await server.drain(grace_s=0)


async def test_a_health_door_is_shut_by_no_stranger(door: str) -> None:
    server, _ = await serve_echo(EchoGeneration(), health_listen=door, keepalive_s=600.0)
    async with held(door, 128, greets=True), open_channel(door) as probe:
        await wait_serving(probe, "baton.v1.Generation", timeout_s=30)
    await server.drain(grace_s=0)


async def test_clients_connections_leave_descriptors_for_workers(tmp_path: Path) -> None:
    """Of 256 open files a stranger would take all that the router does not hold yet, before it has
    a worker."""
    fabric, journal = Fabric(), Journal()
    prefill, decode = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    await asyncio.gather(prefill.start(), decode.start())
    await asyncio.gather(prefill.die(), decode.die())
    model, path = write_model_dir(tmp_path / "model"), tmp_path / "router.json"
    settings = tmp_path / "baton.toml"
    settings.write_text(
        "[router]\nkeepalive_s = 600\n"
    )  # else those without ping replies make room for others
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
        "runpy.run_module('router', run_name='__main__', alter_sys=True)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        limited,
        "--prefill",
        prefill.address,
        "--decode",
        decode.address,
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        "--announce",
        str(path),
        "--config",
        str(settings),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        address = (await announced(path)).address
        async with held(address, 300, greets=True):
            await asyncio.gather(prefill.start(), decode.start())
            async with grpc.aio.insecure_channel(address) as channel:
                await wait_serving(channel, "baton.v1.Generation", timeout_s=60)
                stub = generation_pb2_grpc.GenerationStub(channel)
                assert [
                    response async for response in stub.Generate(token_request([3]), timeout=30)
                ]
    finally:
        process.kill()
        _, said = await process.communicate()
    assert b"RLIMIT_NOFILE is 256, which allows 48 connections" in said
    await asyncio.gather(prefill.die(), decode.die())

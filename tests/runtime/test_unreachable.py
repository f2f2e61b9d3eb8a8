"""Reasons why a peer is unreachable, from real failing connections, without terms of gRPC's
internals."""

import asyncio
import socket
from pathlib import Path

import grpc
import pytest

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from runtime.rpc.client import ChannelOptions, open_channel
from runtime.rpc.unreachable import reach_problem
from runtime.security.access import (
    PLAIN_CHANNEL,
    ChannelSecurity,
    PeerRole,
    ServerSecurity,
    client_security,
)
from tests.support.network.authority import Authority
from tests.support.network.door import serving


async def problem(address: str, security: ChannelSecurity = PLAIN_CHANNEL) -> str:
    """Return the error of a call to `address`, without the address."""
    async with open_channel(address, ChannelOptions(connect_s=0.5), security=security) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generation_pb2_grpc.GenerationStub(channel).GetModelInfo(
                pb.GetModelInfoRequest(), timeout=20
            )
    return reach_problem(refused.value.details()).removeprefix(f"{address}: ")


async def test_tls_that_does_not_fit_is_named(tmp_path: Path) -> None:
    authority, other = Authority("one"), Authority("two")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    router = ChannelSecurity(authority.store(tmp_path / "router", "router"))
    stranger = ChannelSecurity(other.store(tmp_path / "stranger", "router")).to(PeerRole.PREFILL)
    nameless = client_security(tls_ca=tmp_path / "ca.pem", server_name="prefill")
    async with serving(ServerSecurity(authority.store(tmp_path / "prefill", "prefill"))) as address:
        asks_for_tls = "it closes the connection; it may require TLS or another certificate"
        assert await problem(address) == asks_for_tls
        assert await problem(address, nameless) == asks_for_tls
        assert (
            await problem(address, stranger)
            == "its certificate is not signed by an authority in tls_ca"
        )
        assert await problem(address, router.to(PeerRole.DECODE)) == (
            "its certificate has another name than the expected one"
        )
    async with serving(ServerSecurity()) as address:
        assert (
            await problem(address, router.to(PeerRole.PREFILL))
            == "it does not speak TLS, but the call uses TLS"
        )


async def test_a_server_without_grpc_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes connections for it
        assert await problem(address_of(silent)) == "it accepts the connection but sends nothing"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving_http = asyncio.create_task(asyncio.to_thread(answer_http, listening))
        assert await problem(address_of(listening)) == "it speaks HTTP/1, not gRPC"
        await serving_http


def address_of(listening: socket.socket) -> str:
    return "{}:{}".format(*listening.getsockname())


def answer_http(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


async def test_an_unreachable_target_is_named() -> None:
    assert await problem("127.0.0.1:1") == "connection refused"
    assert (await problem("nowhere.invalid:7000")).startswith("nowhere.invalid ")


def test_other_details_are_unchanged() -> None:
    assert reach_problem("the queue is full") == "the queue is full"
    assert reach_problem(None) == "no details"
    assert reach_problem(
        "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:7000: Failed to "
        "connect to remote host: No route to host"
    ) == ("[::1]:7000: Failed to connect to remote host: No route to host")

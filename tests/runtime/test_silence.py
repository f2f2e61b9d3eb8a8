"""A peer that keeps its connection open and sends nothing."""

import asyncio
import socket

import grpc
import pytest

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc
from runtime import errors
from runtime.rpc.client import ChannelOptions, open_channel
from runtime.rpc.server import ServerOptions
from runtime.rpc.status import error_from_rpc
from tests.support.router.generation import EchoGeneration, serve_echo


@pytest.fixture(autouse=True)
def patient_connections() -> None:
    """Keep the default timeouts, which are tested here."""


async def test_silent_peer_is_given_up_by_both_sides() -> None:
    for options in (ServerOptions("127.0.0.1:0"), ChannelOptions()):
        assert options.keepalive_s + options.keepalive_timeout_s < 5
    with socket.create_server(("127.0.0.1", 0)) as silent:
        relay = await Relay.start(silent)
        servicer = EchoGeneration()
        server, relay.target = await serve_echo(servicer)
        async with open_channel(relay.address) as channel:
            call = generation_pb2_grpc.GenerationStub(channel).Generate(
                pb.GenerateRequest(text="hang")
            )
            await call.read()
            relay.muted = True
            async with asyncio.timeout(30):  # half of what the call would take
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                await servicer.ended.wait()
            assert isinstance(error_from_rpc(caught.value), errors.UnavailableError)
        await relay.close()
        await server.drain(grace_s=0)


class Relay:
    """A relay that, once muted, keeps its connections open and sends nothing."""

    def __init__(self) -> None:
        self.muted = False
        self.target = ""
        self.address = ""
        self._server: asyncio.Server | None = None
        self._pumps: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, listening: socket.socket) -> "Relay":
        relay = cls()
        host, port = listening.getsockname()
        relay.address = f"{host}:{port}"
        relay._server = await asyncio.start_server(relay._accept, sock=listening)
        return relay

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        to_server = await asyncio.open_connection(host, int(port))
        self._pumps += [
            asyncio.create_task(self._pump(reader, to_server[1])),
            asyncio.create_task(self._pump(to_server[0], writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if not self.muted:
                    writer.write(data)
        finally:
            writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

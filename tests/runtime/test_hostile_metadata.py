"""Metadata that is no text, from unknown callers."""

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.observe.log import LogStyle, configure
from runtime.security.access import ServerSecurity
from runtime.security.tokens import TokenList
from tests.support.network.raw_http2 import call, raw_connection
from tests.support.router.generation import EchoGeneration, serve_echo

GET_LOAD = b"/baton.v1.Generation/GetLoad"
SECRET = "a-token-of-somebody-else"
QUOTING = "grpc._cython.cygrpc"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root, quoting = logging.getLogger(), logging.getLogger(QUOTING)
    handlers, level, quoting_level = root.handlers[:], root.level, quoting.level
    stream = io.StringIO()
    configure(level="debug", style=LogStyle.HUMAN, role="router", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    quoting.setLevel(quoting_level)
    logging.captureWarnings(capture=False)


async def test_metadata_that_is_not_utf8_costs_one_line_of_log(log: io.StringIO) -> None:
    """gRPC logs each such value, whenever it is read: 880 tracebacks for a call of 2 KB."""
    server, address = await serve_echo(EchoGeneration())
    async with raw_connection(address) as connection:
        before = len(log.getvalue())
        await connection.send(call(GET_LOAD, [(b"a", b"\xff")] * 440))
        assert await connection.ended() == 1
    assert len(log.getvalue()) - before < 1000
    await server.drain(grace_s=0)


async def test_a_token_with_a_stray_byte_is_in_no_log(log: io.StringIO, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(SECRET)
    server, address = await serve_echo(
        EchoGeneration(), security=ServerSecurity(tokens=TokenList(path))
    )
    async with raw_connection(address) as connection:
        await connection.send(
            call(GET_LOAD, [(b"authorization", f"Bearer {SECRET}".encode() + b"\xff")])
        )
        assert await connection.ended() == 1
    assert "UNAUTHENTICATED" in log.getvalue()
    assert SECRET not in log.getvalue()
    await server.drain(grace_s=0)

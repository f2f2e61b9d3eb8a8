"""Only Python's logging writes to stderr: a line of gRPC's own among JSON lines breaks their
readers."""

import os
import subprocess
import sys

import pytest

_GOAWAY = """
from runtime.process.quiet import quiet_grpc
quiet_grpc()
import socket, threading
import grpc

def serve(listener):  # HTTP/2 as far as it goes: settings, then a GOAWAY with an error
    connection, _ = listener.accept()
    connection.sendall(bytes.fromhex("000000040000000000" + "000008070000000000" + "00000000" + "00000002"))
    connection.recv(1 << 16)
    connection.close()

listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=2)
    except grpc.RpcError as error:
        print(error.code().name)  # no server answers
"""
_ENTRY = """
import runpy, sys
import runtime.process.quiet
runtime.process.quiet.quiet_grpc = lambda: print("asked for silence", "after" if "grpc" in sys.modules else "before")
sys.argv = ["role", "--help"]
runpy.run_module({module!r}, run_name="__main__")
"""


def output(program: str, **environment: str) -> tuple[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env=inherited | environment,
    )
    return done.stdout, done.stderr


def test_grpc_writes_no_lines_of_its_own() -> None:
    said, shouted = output(_GOAWAY)
    assert said.strip() in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert shouted == ""


def test_suppressed_lines_can_be_enabled() -> None:
    _, shouted = output(_GOAWAY, GRPC_VERBOSITY="INFO")
    assert "Got goaway" in shouted


@pytest.mark.parametrize("module", ["baton", "router", "prefill", "decode"])
def test_every_entry_point_silences_grpc_before_loading_it(module: str) -> None:
    assert output(_ENTRY.format(module=module))[0].startswith("asked for silence before\n")

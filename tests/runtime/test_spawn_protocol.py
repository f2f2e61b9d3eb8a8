"""Orders run any module: they are taken from processes of the same user only."""

import os
import threading
from pathlib import Path

import pytest

from pool.fork_server import SpawnServer
from runtime.process.spawn_protocol import is_from_user, open_socket


def test_the_user_of_a_connection_is_known(tmp_path: Path) -> None:
    with open_socket() as listener, open_socket() as caller:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        caller.connect(str(tmp_path / "socket"))
        with listener.accept()[0] as channel:
            assert is_from_user(channel, os.getuid())
            assert not is_from_user(channel, os.getuid() + 1)


def test_a_server_of_forks_hangs_up_on_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with open_socket() as listener, open_socket() as caller:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        server = threading.Thread(target=SpawnServer(listener).serve, daemon=True)
        caller.connect(str(tmp_path / "socket"))
        server.start()
        caller.settimeout(60)
        assert caller.recv(1) == b""

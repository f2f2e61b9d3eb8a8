"""Workers that are forks behave like processes of their own."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.fork_server import MAX_SOCKET_BYTES, Child, ForkServer, ForkServerLink
from runtime.errors import ConfigError, UnavailableError

_MODULE = """
import asyncio, atexit, json, os, sys, random, threading
atexit.register(print, "the interpreter has been taken apart")
print(json.dumps({
    "torch": "torch" in sys.modules, "threads": len(os.listdir("/proc/self/task")), "arguments": sys.argv[1:],
    "folder": os.getcwd(), "setting": os.environ.get("SETTING"), "home": os.environ.get("HOME"),
    "cores": sorted(os.sched_getaffinity(0)), "session": os.getsid(0) == os.getpid(), "name": __name__,
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1], "random": random.random(),
    "ucx": "libucs.so" in open("/proc/self/maps").read()}), flush=True)
if sys.argv[1:2] == ["stay"]:
    asyncio.run(asyncio.sleep(60))
print("an error", file=sys.stderr)
sys.exit(7)
"""


def fork_server_in(folder: Path) -> ForkServer:
    """Start a fork server that can import the module."""
    (folder / "modules").mkdir()
    (folder / "modules" / "a_worker.py").write_text(_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "modules"), prepend=os.pathsep)
        return ForkServer()


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with fork_server_in(tmp_path_factory.mktemp("fork_server")) as fork_server:
        yield fork_server


@pytest.fixture
async def link(
    fork_server: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[ForkServerLink]:
    folder = tmp_path_factory.mktemp("here")
    (folder / "a_worker.py").write_text("raise SystemExit('taken from the working directory')")
    monkeypatch.chdir(folder)
    link = await fork_server.connect()
    yield link
    link.close()


async def start(link: ForkServerLink, *arguments: str) -> Child:
    core = str(min(os.sched_getaffinity(0)))
    return await asyncio.wait_for(
        link.spawn("a_worker", arguments, core=core, environment={"SETTING": "on"}), 120
    )


async def said(child: Child) -> dict[str, object]:
    assert child.stdout is not None
    line = await asyncio.wait_for(child.stdout.readline(), 60)
    words = json.loads(line)
    assert isinstance(words, dict)
    return words


async def test_a_fork_is_as_good_as_a_process_of_its_own(link: ForkServerLink) -> None:
    child = await start(link, "one", "two")
    words = await said(child)
    assert words == {
        **words,
        "torch": True,
        "threads": 1,
        "arguments": ["one", "two"],
        "folder": os.getcwd(),
        "setting": "on",
        "home": None,
        "cores": [min(os.sched_getaffinity(0))],
        "session": True,
        "name": "__main__",
        "descriptors": ["0", "1", "2"],
        "ucx": True,
    }
    assert child.stdout is not None
    assert await child.stdout.read() == b"an error\n"
    assert await asyncio.wait_for(child.wait(), 60) == 7
    assert child.returncode == 7
    again = await said(await start(link))
    assert again["random"] != words["random"]


async def test_a_signal_to_its_group_ends_no_other_process(link: ForkServerLink) -> None:
    first, second = await start(link, "stay"), await start(link, "stay")
    os.killpg(first.pid, signal.SIGKILL)  # as soon as it has started
    assert await asyncio.wait_for(first.wait(), 60) == -signal.SIGKILL
    assert second.returncode is None
    await said(second)
    os.kill(second.pid, signal.SIGTERM)
    assert await asyncio.wait_for(second.wait(), 60) == -signal.SIGTERM


async def test_forks_outlive_the_connection_but_not_the_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_worker.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    with fork_server_in(tmp_path) as fork_server:
        first, second = await fork_server.connect(), await fork_server.connect()
        child = await start(first, "stay")
        assert (await said(child))["arguments"] == ["stay"]  # while what it writes is read
        first.close()
        other = await start(second, "stay")
        os.kill(child.pid, 0)
        fork_server.close()
        assert await asyncio.wait_for(other.wait(), 60) == -signal.SIGKILL
        with pytest.raises(UnavailableError, match="the fork server has ended"):
            await start(second)
        with pytest.raises(UnavailableError, match="cannot reach"):
            await fork_server.connect()
    assert other.stdout is not None
    await asyncio.wait_for(other.stdout.read(), 60)  # ends


def test_a_folder_too_deep_for_a_socket_is_refused_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * MAX_SOCKET_BYTES)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match=rf"TMPDIR.* {MAX_SOCKET_BYTES}$"):
        ForkServer()
    assert not any(deep.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(deep / "absent"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        ForkServer()


async def test_a_fork_server_that_cannot_load_is_an_error_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "baton.fork_server.program", lambda module, *arguments: [sys.executable, "-c", "exit(7)"]
    )
    with (
        ForkServer() as fork_server,
        pytest.raises(UnavailableError, match="it ended with exit code 7"),
    ):
        await fork_server.connect()

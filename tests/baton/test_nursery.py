"""Workers that are forks: whatever holds for a process of its own holds for them."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.nursery import MAX_SOCKET_BYTES, Child, Nursery, NurseryLink
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


def nursery_in(folder: Path) -> Nursery:
    """One that knows the module."""
    (folder / "modules").mkdir()
    (folder / "modules" / "a_worker.py").write_text(_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "modules"), prepend=os.pathsep)
        return Nursery()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.fixture
async def link(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NurseryLink]:
    folder = tmp_path_factory.mktemp("here")
    (folder / "a_worker.py").write_text("raise SystemExit('taken from the working directory')")
    monkeypatch.chdir(folder)
    link = await nursery.connect()
    yield link
    link.close()


async def start(link: NurseryLink, *arguments: str) -> Child:
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


async def test_a_fork_is_as_good_as_a_process_of_its_own(link: NurseryLink) -> None:
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


async def test_a_signal_to_its_group_ends_it_and_nobody_else(link: NurseryLink) -> None:
    first, second = await start(link, "stay"), await start(link, "stay")
    os.killpg(first.pid, signal.SIGKILL)  # as soon as it has started
    assert await asyncio.wait_for(first.wait(), 60) == -signal.SIGKILL
    assert second.returncode is None
    await said(second)
    os.kill(second.pid, signal.SIGTERM)
    assert await asyncio.wait_for(second.wait(), 60) == -signal.SIGTERM


async def test_forks_outlive_the_connection_but_not_the_nursery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_worker.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    with nursery_in(tmp_path) as nursery:
        first, second = await nursery.connect(), await nursery.connect()
        child = await start(first, "stay")
        assert (await said(child))["arguments"] == ["stay"]  # while what it writes is read
        first.close()
        other = await start(second, "stay")
        os.kill(child.pid, 0)
        nursery.close()
        assert await asyncio.wait_for(other.wait(), 60) == -signal.SIGKILL
        with pytest.raises(UnavailableError, match="the nursery has ended"):
            await start(second)
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await nursery.connect()
    assert other.stdout is not None
    await asyncio.wait_for(other.stdout.read(), 60)  # ends


def test_a_folder_too_deep_for_a_socket_is_refused_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * MAX_SOCKET_BYTES)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match=rf"TMPDIR.* {MAX_SOCKET_BYTES}$"):
        Nursery()
    assert not any(deep.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(deep / "absent"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        Nursery()


async def test_a_nursery_that_cannot_load_is_an_error_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "baton.nursery.program", lambda module, *arguments: [sys.executable, "-c", "exit(7)"]
    )
    with Nursery() as nursery, pytest.raises(UnavailableError, match="it ended with exit code 7"):
        await nursery.connect()

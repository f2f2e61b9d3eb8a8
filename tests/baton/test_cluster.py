"""Supervision of a local cluster, with fake roles that start at once."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig
from baton.process import ProcessSpec, RoleProcess
from baton.values import Query
from runtime.errors import ConfigError, UnavailableError
from runtime.process.announce import Announcement
from runtime.security.access import ServerSecurity, client_security
from runtime.security.tokens import TokenList
from tests.support.router.generation import EchoGeneration, serve_echo

ROOT = Path(__file__).parents[2]
FAKES = ROOT / "tests" / "support" / "cluster" / "fake_roles"


@pytest.fixture(autouse=True)
def fake_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fake roles before the real ones on the path of children."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(ROOT)]))


def model(folder: Path, name: str = "good") -> Path:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text("{}")
    (folder / name / "model.safetensors").touch()
    return folder / name


def config(folder: Path, name: str = "good", **given: Any) -> ClusterConfig:  # noqa: ANN401
    settings: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "decode_pp": 2,
        "ready_timeout_s": 120,
        "forks_workers": False,
        **given,
    }
    return ClusterConfig(model=model(folder, name), **settings)


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")

    def of(self, name: str) -> str:
        return next(line for line in self.lines if line.startswith(f"{name}: "))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
async def cluster(tmp_path: Path, log: Log) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(config(tmp_path), sink=log) as running:
        yield running


async def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (other processes' doings)
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_it_serves_and_gives_each_process_its_flags(cluster: LocalCluster, log: Log) -> None:
    assert set(cluster.processes) == {"prefill-0", "decode-0.0", "decode-0.1", "router"}
    async with AsyncBatonClient(cluster.address) as client:
        assert (await client.complete(Query("hello there"), timeout_s=60)).text == "hello there "
    await eventually(
        lambda: all(
            any(line.startswith(f"{name}: ") for line in log.lines) for name in cluster.processes
        )
    )
    assert "--rank 1 --world-size 2 " in log.of("decode-0.1")
    leader = str(cluster.processes["decode-0.0"].spec.announce)
    assert f"--leader file://{leader}" in log.of("decode-0.1")
    assert f"--decode file://{leader}" in log.of("router")
    assert all(
        f"on cores {list(process.spec.cores or ())} " in log.of(name)
        for name, process in cluster.processes.items()
    )


async def test_a_start_that_takes_long_shows_how_far_each_process_is(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cluster.PROGRESS_S", 0.0)
    async with LocalCluster(config(tmp_path), sink=log):
        reports = [line for line in log.lines if re.search(r"^baton: .*after \d+ s: ", line)]
    state = "(loads|warms up|serves)"
    assert re.search(
        f": prefill-0 {state}, decode-0.0 {state}, decode-0.1 {state}, router {state}$", reports[0]
    )


async def test_a_start_that_compiles_kernels_shows_how_many_are_there(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also shows that others, whose announcement the cluster does not wait for yet, have
    progressed."""
    monkeypatch.setattr("baton.cluster.PROGRESS_S", 0.0)
    settings = config(tmp_path)
    (settings.model / "kernels").touch()

    def watch(name: str, line: str) -> None:
        log(name, line)
        if "prefill-0 compiles kernels (3 of 37)" in line and "router loads" not in line:
            (settings.model / "kernels").unlink(missing_ok=True)

    async with asyncio.timeout(120):
        async with LocalCluster(settings, sink=watch):
            pass
    assert not (settings.model / "kernels").exists()


class Elsewhere:
    """Processes that each have another loopback address and one more word on their command line."""

    def host(self, name: str) -> str:
        return {"prefill-0": "127.0.0.2"}.get(name, "127.0.0.3")

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        return module, ("--placed", name, *arguments)


async def test_routers_share_the_workers_and_processes_have_their_places(
    tmp_path: Path, log: Log
) -> None:
    async with LocalCluster(config(tmp_path, routers=2, places=Elsewhere()), sink=log) as running:
        assert set(running.processes) == {
            "prefill-0",
            "decode-0.0",
            "decode-0.1",
            "router",
            "router-1",
        }
        assert running.addresses[0] == running.address
        for address in running.addresses:
            async with AsyncBatonClient(address) as client:
                assert (await client.complete(Query("hello"), timeout_s=60)).text == "hello "
        prefill = running.processes["prefill-0"].announcement
        assert prefill is not None
        assert prefill.address.startswith("127.0.0.2:")
        await eventually(
            lambda: all(
                any(line.startswith(f"{name}: ") for line in log.lines)
                for name in running.processes
            )
        )
        for name in running.processes:
            assert f"--placed {name} " in log.of(name)
            assert ("prefill-0.json" in log.of(name)) == name.startswith("router"), (
                "where it announces itself"
            )
    assert all(process.pid is None for process in running.processes.values())


async def test_a_gateway_needs_a_model_with_a_tokenizer(tmp_path: Path, log: Log) -> None:
    with pytest.raises(ConfigError, match="--http needs a tokenizer"):
        async with LocalCluster(config(tmp_path, http="127.0.0.1:0"), sink=log):
            pass


async def test_processes_may_have_all_cores(tmp_path: Path, log: Log) -> None:
    cores = sorted(os.sched_getaffinity(0))
    async with LocalCluster(config(tmp_path, one_core_each=False), sink=log) as running:
        await eventually(
            lambda: all(
                any(line.startswith(f"{name}: ") for line in log.lines)
                for name in running.processes
            )
        )
        assert all(f"on cores {cores} " in log.of(name) for name in running.processes)


def take_names(*names: str) -> None:
    """Write files into the working directory that end any process that imports them."""
    for name in names:
        Path(f"{name}.py").write_text("raise SystemExit('taken from the working directory')")


async def test_files_in_the_working_directory_are_not_taken_for_roles(
    cluster: LocalCluster,
) -> None:
    """Those of the cluster run beside them, and `baton router` does."""
    take_names("router", "prefill", "decode", "baton", "runtime", "typer")
    process = cluster.processes["decode-0.1"]
    await eventually(process.spec.announce.exists)
    process.kill()
    await eventually(lambda: process.num_starts == 2)
    await eventually(process.spec.announce.exists)
    command = str(Path(sys.executable).with_name("baton"))
    done = await asyncio.to_thread(
        subprocess.run,
        [command, "router", "--help"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--prefill" in done.stdout


async def test_a_killed_process_restarts_at_its_address(cluster: LocalCluster) -> None:
    process = cluster.processes["decode-0.1"]
    await eventually(process.spec.announce.exists)
    process.kill()
    await eventually(lambda: process.num_starts == 2)
    again = await process.announced(timeout_s=60)
    await eventually(process.spec.announce.exists)
    assert str(again.pid) not in process.spec.announce.read_text()
    assert again.address in process.spec.announce.read_text()


async def pauses(folder: Path, log: Log, serves: Callable[[], bool]) -> list[str]:
    """Return the pauses between three deaths of a process, which dies when it serves or when it has
    announced its address without serving."""

    async def until_serving(announcement: Announcement) -> None:
        if not serves():
            raise UnavailableError("it does not")

    spec = ProcessSpec(
        "prefill-0",
        "prefill",
        ("--model", str(model(folder))),
        "127.0.0.1:0",
        None,
        folder / "announced.json",
        leads=True,
    )
    process = RoleProcess(spec, log, until_serving)
    life = asyncio.create_task(process.run())
    for count in range(1, 4):
        await eventually(lambda count=count: process.num_starts == count and spec.announce.exists())  # type: ignore[misc]
        await eventually(lambda: process._has_served == serves())
        process.settle()
        process.kill()
    await eventually(lambda: process.num_starts == 4)
    await process.stop(grace_s=5)
    await life
    return [line.rpartition(" in ")[2] for line in log.lines if "starting again" in line]


async def test_a_process_that_had_served_is_started_again_without_a_long_pause(
    tmp_path: Path, log: Log
) -> None:
    assert await pauses(tmp_path, log, lambda: True) == ["0.1 s"] * 3


async def test_pauses_grow_if_a_process_dies_before_it_serves(tmp_path: Path, log: Log) -> None:
    assert await pauses(tmp_path, log, lambda: False) == ["0.1 s", "0.2 s", "0.4 s"]


async def test_the_supervisor_reports_when(cluster: LocalCluster, log: Log) -> None:
    process = cluster.processes["prefill-0"]
    await eventually(lambda: process._has_served)  # asked of its health
    process.kill()
    await eventually(lambda: process.num_starts == 2)
    (line,) = (line for line in log.lines if "starting again" in line)
    stamp = r"\d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(
        rf"prefill-0: {stamp} warning was ended by SIGKILL, starting again in .* s", line
    )
    assert all(
        re.match(rf"baton: {stamp} info ", line) for line in log.lines if line.startswith("baton:")
    )


async def test_a_process_that_the_kernel_killed_for_memory_is_reported_so(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts such kills; here each SIGKILL is counted as one."""
    killed = [0]
    monkeypatch.setattr("baton.process.num_oom_kills", lambda: killed[0])
    async with LocalCluster(config(tmp_path), sink=log) as running:
        process = running.processes["prefill-0"]
        killed[0] += 1
        process.kill()
        await eventually(lambda: process.num_starts == 2)
    (line,) = (line for line in log.lines if "starting again" in line)
    assert "was ended by SIGKILL, because memory ran out, starting again in" in line


async def test_stop_leaves_no_process(tmp_path: Path, log: Log) -> None:
    async with LocalCluster(config(tmp_path), sink=log) as running:
        pids = [process.pid for process in running.processes.values()]
    assert not any(alive(pid) for pid in pids if pid is not None)
    assert len(pids) == 4


async def test_a_process_that_cannot_start_ends_the_start(tmp_path: Path, log: Log) -> None:
    with pytest.raises(
        UnavailableError,
        match=r"decode-0\.[01] ended with exit code 1: the weights are not readable",
    ):
        async with LocalCluster(config(tmp_path, "broken"), sink=log):
            pass


async def test_a_process_that_refuses_its_settings_ends_the_start_as_such(
    tmp_path: Path, log: Log
) -> None:
    with pytest.raises(
        ConfigError, match=r"decode-0\.[01] ended with exit code 2: the settings do not fit"
    ):
        async with LocalCluster(config(tmp_path, "refused"), sink=log):
            pass


async def test_a_cluster_that_never_serves_names_the_missing_process(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_serving = LocalCluster.wait_serving  # the time to start is not what runs out
    monkeypatch.setattr(
        LocalCluster, "wait_serving", lambda self, timeout_s: wait_serving(self, timeout_s=5)
    )
    with pytest.raises(
        UnavailableError, match=r"prefill-0: baton.v1.Prefill is not serving.*NOT_SERVING"
    ):
        async with LocalCluster(config(tmp_path, "slow"), sink=log):
            pass


class Restarted:
    """A process that restarts at once."""

    def __init__(self, name: str, role: str, address: str) -> None:
        self.spec = ProcessSpec(name, role, (), address, (0,), Path(), leads=role == "router")
        self.announcement = Announcement(address, None, 0, "")
        self.num_restarts = 0

    async def restart(self, *, grace_s: float) -> None:
        self.num_restarts += 1


async def test_a_restart_shows_its_token_and_names_missing_processes(
    tmp_path: Path, log: Log
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef\n")
    server, address = await serve_echo(
        EchoGeneration(), security=ServerSecurity(tokens=TokenList(token_file))
    )
    cluster = LocalCluster(
        config(tmp_path, security=client_security(token_file=token_file)), sink=log
    )
    processes: dict[str, Any] = {
        role: Restarted(role, role, address) for role in ("router", "decode")
    }
    cluster.processes.update(processes)
    with pytest.raises(UnavailableError, match=r"decode 127\.0\.0\.1:1: warming up"):
        await cluster.restart("decode", timeout_s=5)
    assert [processes[role].num_restarts for role in ("router", "decode")] == [0, 1]
    cluster.processes.clear()
    await cluster.stop()
    await server.drain(grace_s=0)


@pytest.mark.parametrize(
    ("settings", "field"), [({"decode": 0}, "decode"), ({"prefill_pp": 65}, "prefill_pp")]
)
def test_bad_counts_are_refused_before_anything_starts(
    tmp_path: Path, log: Log, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match="1 to 64") as caught:
        LocalCluster(config(tmp_path, **settings), sink=log)
    assert caught.value.field == field


def test_the_limit_is_on_all_processes_together(tmp_path: Path) -> None:
    """Two routers, 14 prefill processes, and 3 pools of 2 stages of 8 ranks."""
    fits: dict[str, Any] = {
        "routers": 2,
        "prefill": 14,
        "decode": 3,
        "decode_pp": 2,
        "decode_tp": 8,
    }
    config(tmp_path, **fits).check()
    with pytest.raises(ConfigError, match=r"^65 processes requested.* the limit is 64"):
        config(tmp_path, **{**fits, "prefill": 15}).check()


def up(folder: Path, *flags: str, name: str = "good") -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "baton",
        "up",
        "--model",
        str(model(folder, name)),
        "--listen",
        "127.0.0.1:0",
    ]
    return subprocess.Popen(
        [*command, "--no-preload", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(child: subprocess.Popen[str], word: str) -> list[str]:
    assert child.stdout is not None
    lines: list[str] = []
    while not lines or word not in lines[-1]:
        lines.append(child.stdout.readline())
        assert lines[-1], f"ended without saying {word}: {lines}"
    return lines


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_says_ready_and_stops_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path) as child:
        said = "".join(read_until(child, "ready: "))
        started = children_of(child.pid)
        child.send_signal(number)
        assert child.wait(60) == 0
        assert child.stdout is not None
        assert "stopping after running requests end" in child.stdout.read()
    assert "router: 127.0.0.1:" in said
    assert len(started) == 3
    assert not any(map(alive, started))


def test_up_and_its_processes_log_json_with_the_json_style(tmp_path: Path) -> None:
    """The fake roles print plain text and log JSON."""
    with up(tmp_path, "--log-style", "json") as child:
        lines = read_until(child, "ready: ")
        assert child.stdout is not None
        os.kill(children_of(child.pid)[0], signal.SIGKILL)
        lines += read_until(child, "starting again")
        child.send_signal(signal.SIGINT)
        lines += child.stdout.readlines()
        assert child.wait(60) == 0
    values = [json.loads(line) for line in lines]
    assert all({"process", "time", "level", "role", "message"} <= each.keys() for each in values)
    assert {each["process"] for each in values} == {"baton", "prefill-0", "decode-0", "router"}
    printed = next(each for each in values if "on cores" in each["message"])
    assert (printed["level"], printed["role"]) == ("warning", printed["process"])


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("refused", 2, "baton up: decode-0 ended with exit code 2: the settings do not fit"),
        ("broken", 1, "baton up: decode-0 ended with exit code 1: the weights are not readable"),
    ],
)
def test_a_failed_start_gives_its_reason_in_json_too(
    tmp_path: Path, name: str, code: int, says: str
) -> None:
    with up(tmp_path, "--log-style", "json", name=name) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        lines, errors = child.stdout.readlines(), child.stderr.readlines()
        assert child.wait(60) == code
    assert [json.loads(line)["message"] for line in errors] == [says]
    assert all(json.loads(line)["message"] != says for line in lines), "it is said once"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_terminal_without_frames_shows_the_cluster_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    with up(tmp_path) as child:
        said = read_until(child, "ready: ")
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""
    assert said[0].startswith("baton       " + ("│ " if encoding == "utf-8" else "| "))


def test_a_second_signal_ends_up_at_once_and_in_order(tmp_path: Path) -> None:
    """Killed processes used to be restarted, or were not waited for: a traceback followed."""
    with up(tmp_path) as child:
        read_until(child, "ready: ")
        started = children_of(child.pid)
        for pid in started:
            os.kill(pid, signal.SIGSTOP)  # none ends by itself
        child.send_signal(signal.SIGINT)
        read_until(child, "stopping after running requests end")
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 1
        assert child.stderr is not None
        assert child.stderr.read() == "baton up: stopped at once\n"
    assert len(started) == 3
    assert not any(map(alive, started))


async def test_killing_up_itself_leaves_no_orphan(tmp_path: Path) -> None:
    with up(tmp_path) as child:
        await asyncio.to_thread(read_until, child, "ready: ")
        started = children_of(child.pid)
        child.kill()
        await eventually(lambda: not any(map(alive, started)))
    assert len(started) == 3


def stand_in_demo(folder: Path) -> None:
    """Write a `demo` package without a model, found before the real one."""
    (folder / "demo").mkdir()
    (folder / "demo" / "__init__.py").touch()
    model(folder / "demo", "model")


def test_a_demo_with_wrong_output_fails(tmp_path: Path) -> None:
    stand_in_demo(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "baton", "demo"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0
    assert "What did Ivan do?" in done.stdout
    assert "the right answer is 'Near the library Ivan hid a red notebook.'" in done.stderr


def test_interrupted_demo_stops_everything(tmp_path: Path) -> None:
    stand_in_demo(tmp_path)
    (tmp_path / "demo" / "model" / "slow").touch()  # it cannot be over before it is interrupted
    with subprocess.Popen(
        [sys.executable, "-m", "baton", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        read_until(child, "waiting for the pools")
        started = children_of(child.pid)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 1
        assert child.stderr is not None
        assert child.stderr.read() == "baton demo: interrupted\n"
    assert started
    assert not any(map(alive, started))

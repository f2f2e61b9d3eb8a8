"""Command line of a worker: accepted and refused values, before torch is loaded."""

import errno
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pool.main import worker_command
from pool.stage.config import WorkerConfig
from runtime.config import load
from runtime.process.supervision import EXIT_CONFIG

DEMO = Path(__file__).parents[2] / "demo"
DECODE = worker_command("decode", lambda flags, file: 0)


def checked(*arguments: str) -> Result:
    return CliRunner().invoke(DECODE, [*arguments, "--check-settings"])


def test_the_model_may_be_set_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('[decode]\nmodel = "here"\n')
    given: list[WorkerConfig] = []

    def start(flags: dict[str, object], path: Path | None) -> int:
        given.append(load(WorkerConfig, section="decode", flags=flags, file=path))
        return 0

    for flags in ([], ["--model", "there"]):
        assert (
            CliRunner()
            .invoke(worker_command("decode", start), ["--config", str(file), *flags])
            .exit_code
            == 0
        )
    assert [config.model for config in given] == [Path("here"), Path("there")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model must be given, or set in the table [decode] of --config"),
        (
            ["--numerics", "wrong"],
            "decode.numerics: Input should be 'exact' or 'fast' (got 'wrong')",
        ),
        (
            ["--num-pages", "999999999"],
            "decode.num_pages: Input should be less than or equal to 268435456 (got 999999999)",
        ),
        (["--drain-s", "inf"], "decode.drain_s: Input should be a finite number (got inf)"),
        (
            ["--caller-stall-s", "1e300"],
            "decode.caller_stall_s: Input should be less than or equal to 86400 (got 1e+300)",
        ),
        (["--rank", "1"], "rank 1 is outside 0..0"),
        (
            ["--rank", "1", "--world-size", "2"],
            "a process other than 0 needs --leader HOST:PORT (or MASTER_ADDR and MASTER_PORT)",
        ),
        (
            ["--rank", "1", "--world-size", "2", "--leader", "foo"],
            "--leader must be HOST:PORT, got 'foo'",
        ),
        (
            ["--draft", "/nowhere"],
            "/nowhere does not exist; --draft takes the folder of a checkpoint",
        ),
        (["--otel-endpoint", "foo"], "otel_endpoint must be like http://127.0.0.1:4317, got 'foo'"),
        (
            ["--transport-interface", "none0"],
            "transport_interface: there is no network device 'none0' here",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(arguments: list[str], says: str) -> None:
    done = checked(*arguments, *(["--model", "x"] if arguments else []))
    assert done.exit_code == EXIT_CONFIG
    assert done.stderr.startswith(f"decode: {says}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "abc"},
            "MASTER_PORT must be a port from 1 to 65535, got 'abc'",
        ),
        (
            {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "0"},
            "MASTER_PORT must be a port from 1 to 65535, got '0'",
        ),
        (
            {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "65536"},
            "MASTER_PORT must be a port from 1 to 65535, got '65536'",
        ),
        ({"RANK": "first"}, "RANK must be a number from 0 to 99999, got 'first'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE must be a number from 0 to 99999, got '-2'"),
        (
            {"MASTER_ADDR": "a b", "MASTER_PORT": "7000"},
            "MASTER_ADDR must be a host name or an address, got 'a b'",
        ),
    ],
)
@pytest.mark.parametrize("asks_only", [True, False])
def test_a_launcher_s_variables_that_do_not_fit_are_one_line(
    variables: dict[str, str],
    says: str,
    asks_only: bool,  # noqa: FBT001
) -> None:
    arguments = ["--model", "x", *(["--check-settings"] if asks_only else [])]
    done = CliRunner().invoke(DECODE, arguments, env={"RANK": "1", "WORLD_SIZE": "2", **variables})
    assert (done.exit_code, done.stderr) == (EXIT_CONFIG, f"decode: {says}\n")


def test_a_leader_without_a_port_is_refused() -> None:
    done = checked("--model", "x", "--rank", "1", "--world-size", "2", "--leader", "10.0.0.1:0")
    assert (done.exit_code, done.stderr) == (
        EXIT_CONFIG,
        "decode: --leader must end in a port from 1 to 65535, got '10.0.0.1:0'\n",
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_a_failed_import_for_lack_of_memory_is_one_line(error: Exception) -> None:
    def start(flags: dict[str, object], path: Path | None) -> int:
        raise error

    done = CliRunner().invoke(worker_command("decode", start), ["--model", "x"])
    assert done.exit_code == EXIT_CONFIG
    assert re.fullmatch(
        r"decode: out of memory before it could load anything; \d+ of \d+ MiB are free.*\n",
        done.stderr,
    )


def test_settings_that_fit_start_nothing() -> None:
    done = checked(
        "--model",
        "x",
        "--rank",
        "1",
        "--world-size",
        "2",
        "--leader",
        "file:///run/leader.json",
        "--draft",
        str(DEMO / "draft"),
    )
    assert (done.exit_code, done.output) == (0, "")

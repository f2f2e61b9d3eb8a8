"""The roles check the settings of `baton up` before any of them starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster_config import ClusterConfig
from baton.settings_check import check_settings
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle
from runtime.process.supervision import EXIT_CONFIG


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--numerics", "wrong"),
            "prefill.numerics: Input should be 'exact' or 'fast' (got 'wrong')",
        ),
        (("--device", "tpu"), "prefill.device: device must be cpu, cuda or cuda:N, got 'tpu'"),
        (("--transport", "pigeon"), "prefill.transport: Input should be "),
        (
            ("--draft", "/nowhere"),
            "/nowhere does not exist; --draft takes the folder of a checkpoint",
        ),
        (("--otel-endpoint", "foo"), "otel_endpoint must be like http://127.0.0.1:4317, got 'foo'"),
    ],
)
async def test_a_flag_that_workers_refuse(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await check_settings(ClusterConfig(worker_flags=flags))
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("[decode]\nfoo = 1", "decode.foo: unknown setting"),
        ('[decode]\nmax_running = "x"', "decode.max_running: Input should be a valid integer"),
        (
            "[router]\nkeepalive_s = inf",
            "router.keepalive_s: Input should be a finite number (got inf)",
        ),
        (
            "[router]\nmax_connection_age_s = 2592000",
            "router.max_connection_age_s: Input should be less than or equal to "
            "86400 (got 2592000)",
        ),
        ("[gateway]\nfoo = 1", "gateway.foo: unknown setting"),
    ],
)
async def test_a_table_that_its_role_refuses(tmp_path: Path, table: str, says: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(table)
    with pytest.raises(ConfigError) as refused:
        await check_settings(ClusterConfig(config_file=file))
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize("role", ["router", "decode"])
async def test_the_refusal_of_a_role_with_json_logs_is_its_message(
    tmp_path: Path, role: str
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(f"[{role}]\nfoo = 1\n")
    with pytest.raises(ConfigError) as refused:
        await check_settings(ClusterConfig(config_file=file, log_style=LogStyle.JSON))
    assert str(refused.value) == f"{role}.foo: unknown setting"


async def test_settings_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(
        "[decode]\nmax_running = 3\n[router]\nmax_waiting = 5\n[gateway]\ndrain_s = 3\n"
    )
    await check_settings(
        ClusterConfig(
            decode_pp=2,
            decode_partition="balanced",
            config_file=file,
            worker_flags=("--numerics", "fast"),
        )
    )


def test_nothing_starts_and_the_exit_code_gives_the_reason() -> None:
    command = [
        sys.executable,
        "-m",
        "baton",
        "up",
        "--no-preload",
        "--listen",
        "127.0.0.1:0",
        "--log-level",
        "loud",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (EXIT_CONFIG, "")
    assert done.stderr == (
        "baton up: prefill.log_level: Input should be 'debug', 'info', 'warning' or 'error' "
        "(got 'loud')\n"
    )

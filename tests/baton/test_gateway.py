"""Start options of a gateway and refused settings. Running gateways are in
tests/cluster/test_openai.py."""

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.gateway import (
    GatewayConfig,
    app,
    arguments_of,
    check_can_serve,
    check_installed,
    listeners_of,
    serve,
    wait_ready,
)
from runtime.config import Address, load
from runtime.errors import ConfigError, UnavailableError
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity
from runtime.security.tokens import OwnToken

ROOT = Path(__file__).resolve().parents[2]
HERE = Address("127.0.0.1", 8000)


def settings(**given: Any) -> GatewayConfig:  # noqa: ANN401
    return GatewayConfig.model_validate({"router": ("127.0.0.1:7000",), **given})


def values_of(arguments: list[str], flag: str) -> list[str]:
    """Return the values that follow each `flag`."""
    return [arguments[index + 1] for index, argument in enumerate(arguments) if argument == flag]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (HERE, 8001)),
        ({"listen": "127.0.0.1:8000"}, (HERE, 8001)),
        ({"metrics_port": 8000}, (Address("127.0.0.1", 8001), 8000)),
    ],
)
def test_the_two_listeners_have_different_ports(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], expected: tuple[Address, int]
) -> None:
    """The kernel offers a port again as soon as it is free."""
    offered = iter((8000, 8000, 8001))

    class Probe:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None: ...
        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(offered)

    probes = SimpleNamespace(create_server=Probe, AF_INET=socket.AF_INET, AF_INET6=socket.AF_INET6)
    monkeypatch.setattr("baton.preflight.socket", probes)
    assert listeners_of(settings(**{"listen": "127.0.0.1:0", **given})) == expected


def test_every_router_is_given_and_what_they_do_better_is_off() -> None:
    arguments = arguments_of(
        settings(router=("a:1", "[::1]:2"), flag=("--tool-call-parser", "qwen")), HERE, 9
    )
    start = arguments.index("--worker-urls")
    assert arguments[start + 1 : start + 3] == ["grpc://a:1", "grpc://[::1]:2"]
    assert {"--disable-retries", "--disable-circuit-breaker"} <= set(arguments)
    assert arguments[-2:] == ["--tool-call-parser", "qwen"]
    assert (values_of(arguments, "--port"), values_of(arguments, "--prometheus-port")) == (
        ["8000"],
        ["9"],
    )
    assert values_of(arguments, "--history-memory-max-responses") == ["10000"]
    assert values_of(arguments_of(settings(stored_responses=0), HERE, 9), "--history-backend") == [
        "none"
    ]


def test_the_key_of_its_control_plane_is_nobodys() -> None:
    keys = [
        values_of(arguments_of(settings(), HERE, 9), "--control-plane-api-keys") for _ in range(2)
    ]
    assert keys[0] != keys[1]
    assert len(keys[0][0].rpartition(":")[2]) == 64


def test_the_keys_of_clients_are_named(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nalice 0123456789abcdef0123\nfedcba98765432100123\n")
    arguments = arguments_of(settings(token_file=tmp_path / "keys"), HERE, 9)
    assert values_of(arguments, "--tenant-api-key") == [
        "alice:0123456789abcdef0123",
        "client-2:fedcba98765432100123",
    ]


def test_a_file_of_settings_has_a_table_for_it(tmp_path: Path) -> None:
    (tmp_path / "baton.toml").write_text('[gateway]\nrouter = ["r:7000"]\nmax_body_bytes = 4096\n')
    config = load(
        GatewayConfig, section="gateway", flags={"drain_s": 3}, file=tmp_path / "baton.toml"
    )
    assert (config.router, config.max_body_bytes, config.drain_s) == (("r:7000",), 4096, 3)


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str) -> ModuleSpec | None:
        return None if name == "smg" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    for refused in (
        check_installed,
        lambda: check_can_serve("h:1", PLAIN_CHANNEL),
        lambda: serve(settings()),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'baton\[http\]'"):
            refused()


def test_a_gateway_without_a_router_is_one_line() -> None:
    done = CliRunner().invoke(app, [])
    assert (done.exit_code, done.stderr) == (
        2,
        "gateway: --router must be given, or set in the table [gateway] of --config\n",
    )


@pytest.mark.parametrize(
    ("flags", "table", "reason"),
    [
        (
            ("--log-style", "json"),
            "",
            "--router must be given, or set in the table [gateway] of --config",
        ),
        (
            ("--router", "r:7000"),
            'log_style = "json"\ntls_cert = "/none"',
            "tls_cert: no such file: /none",
        ),
    ],
    ids=["flag", "table"],
)
def test_the_reason_of_its_end_is_written_in_the_style_of_its_logs(
    tmp_path: Path, flags: tuple[str, ...], table: str, reason: str
) -> None:
    (tmp_path / "baton.toml").write_text(f"[gateway]\n{table}\n")
    done = subprocess.run(
        [sys.executable, "-m", "baton.gateway", "--config", tmp_path / "baton.toml", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, line["level"], line["role"], line["message"]) == (
        2,
        "error",
        "gateway",
        f"gateway: {reason}",
    )


def test_unsupported_gateway_settings_are_refused(tmp_path: Path) -> None:
    check_can_serve("127.0.0.1:0", PLAIN_CHANNEL)
    with pytest.raises(ConfigError, match="http must be HOST:PORT"):
        check_can_serve("8000", PLAIN_CHANNEL)
    (tmp_path / "token").write_text("0123456789abcdef0123")
    with pytest.raises(ConfigError, match="TLS or tokens"):
        check_can_serve("127.0.0.1:0", ChannelSecurity(token=OwnToken(tmp_path / "token")))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls_cert": Path(__file__)}, "tls_cert and tls_key"),
        ({"log_level": "loud"}, "log level"),
        ({"tls_key": Path("/none")}, "tls_key: no such file: /none"),
        ({"flag": ("--nonsense",)}, "--nonsense"),
        ({"listen": "256.0.0.1:0"}, "cannot listen on 256"),
        ({"flag": ("--chat-template", "/x")}, "--chat-template is not allowed: routers"),
        ({"flag": ("--tokenizer-path=/x",)}, "--tokenizer-path is not allowed"),
        ({"flag": ("--model", "/x")}, "--model-path is not allowed"),
    ],
)
def test_a_bad_setting_ends_it_before_it_listens(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        serve(settings(**given))


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
async def test_a_proxy_of_the_environment_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """A fake gateway that is ready, and proxies that do not exist; the client does not support
    SOCKS either."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        await wait_ready(f"{host}:{port}", timeout_s=30.0)


async def test_waiting_for_a_missing_gateway_ends_with_the_reason() -> None:
    with pytest.raises(
        UnavailableError, match=r"127\.0\.0\.1:9 is not ready after 3 s: .*connection"
    ):
        await wait_ready("127.0.0.1:9", timeout_s=3.0)

"""`baton gateway`: OpenAI's HTTP API in front of one or more routers, served by the published
gateway `smg`.

    baton gateway --router 127.0.0.1:7000 --listen 127.0.0.1:8000

The routers run with `--vllm-engine`; the gateway reads their tokenizer from there, so it needs no
model directory. What is set here is what differs from the gateway's own defaults, and why;
`--flag=--tool-call-parser=qwen` gives it more.
"""

import argparse
import asyncio
import importlib.util
import os
import secrets
import socket
import sys
import uuid
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import typer
from pydantic import Field

from runtime.config import Address, AddressField, Config, PeerField, load, parse_address
from runtime.config_flags import Flags, flags_of
from runtime.errors import BatonError, ConfigError, UnavailableError
from runtime.observe.log import LEVELS, LogStyle, styled_line
from runtime.process.announce import Announcement, write_announcement
from runtime.process.supervision import EXIT_CONFIG, EXIT_FAILED
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity
from runtime.security.tokens import read_tokens

DEFAULT_LISTEN = "127.0.0.1:8000"
_MODULES = ("smg", "smg_grpc_proto")
# Routers have the tokenizer; before it asks them, the gateway looks for what they call it on this
# host and on a hub.
_NO_HUB = "http://127.0.0.1:9"
_LOOK_S = 0.05  # between two looks at whether it is ready
_LOOK_TIMEOUT_S = 5.0
# Of the gateway's levels: at its own "info" it logs every step of its start and every worker it
# looks at.
_LEVELS = {"debug": "info", "info": "warn", "warning": "error", "error": "error"}
# What a router does better, or what would hurt behind one:
_ALWAYS = (
    "--backend",
    "vllm",
    "--policy",
    "round_robin",
    # routers queue, and report themselves when they are full
    "--disable-worker-overload-protection",
    "--disable-retries",  # OpenAI's clients retry; two layers of it make a storm of an overload
    # refuses a minute long after ten errors, with no other router to go to
    "--disable-circuit-breaker",
    "--no-remove-unhealthy-workers",
    "--health-check-interval-secs",
    "2",
    "--health-check-timeout-secs",
    "2",
    "--health-success-threshold",
    "1",  # a router that comes back is used again within seconds
)


class GatewayConfig(Config):
    """Settings of a gateway: flags and the [gateway] table of a TOML file."""

    router: tuple[PeerField, ...] = Field(
        min_length=1, description="HOST:PORT of a router with --vllm-engine; several are allowed."
    )
    listen: AddressField = Field(
        default=DEFAULT_LISTEN, description="HOST:PORT for HTTP; port 0 takes a free one."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of Prometheus /metrics; default and 0: a free one.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address /metrics is served on.")
    announce: Path | None = Field(
        default=None, description="File to write addresses to at the start (JSON)."
    )
    tls_cert: Path | None = Field(
        default=None, description="PEM certificate; clients then connect by HTTPS."
    )
    tls_key: Path | None = Field(default=None, description="PEM key of the certificate.")
    token_file: Path | None = Field(
        default=None, description="API keys that clients must show, one per line."
    )
    stored_responses: int = Field(
        default=10_000,
        ge=0,
        le=1_000_000,
        description="Responses kept in memory for later requests; 0: none.",
    )
    max_body_bytes: int = Field(
        default=16 << 20, ge=1 << 10, le=1 << 29, description="Largest request."
    )
    drain_s: int = Field(
        default=30, ge=1, le=86_400, description="Seconds that SIGTERM leaves running requests."
    )
    flag: tuple[str, ...] = Field(
        default=(),
        description="A further flag of `smg launch`, as --flag=--tool-call-parser=qwen; repeat.",
    )
    log_level: str = Field(
        default="info", description="Least level logged: debug, info, warning or error."
    )
    log_style: LogStyle = Field(
        default=LogStyle.HUMAN, description="Log lines for people, or one JSON object per line."
    )

    def check(self) -> None:
        """Raises ConfigError for what the single settings do not show."""
        if self.log_level not in LEVELS:
            raise ConfigError(
                f"log level must be one of {', '.join(LEVELS)}, got {self.log_level!r}",
                field="log_level",
            )
        for field, path in (("tls_cert", self.tls_cert), ("tls_key", self.tls_key)):
            if path is not None and not path.is_file():
                raise ConfigError(f"{field}: {path} is no file", field=field)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key must be given together", field="tls_cert")


def check_can_serve(listen: str, security: ChannelSecurity) -> None:
    """Raises ConfigError where no gateway can be put before routers, which require `security`."""
    parse_address(listen, field="http")
    check_installed()
    if security != PLAIN_CHANNEL:
        raise ConfigError(
            "--http cannot be used with TLS or tokens between the processes: the gateway shows routers "
            "neither",
            field="http",
        )


def check_installed() -> None:
    """Raises ConfigError when the extra `http` is missing."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the OpenAI gateway needs the package {missing[0]}: pip install 'baton[http]'",
            field="http",
        )


async def wait_ready(address: str, *, timeout_s: float) -> None:
    """Until the gateway at HOST:PORT has a router that serves, and its tokenizer. Raises
    UnavailableError naming what it lacks when that takes longer."""
    reason = "it does not listen"
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx2.AsyncClient(timeout=_LOOK_TIMEOUT_S, trust_env=False) as client,
        ):
            while True:
                try:
                    response = await client.get(f"http://{address}/readiness")
                except httpx2.HTTPError as error:
                    reason = str(error) or type(error).__name__
                else:
                    if response.is_success:
                        return
                    reason = response.text
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise UnavailableError(
            f"the gateway at {address} is not ready after {timeout_s:.0f} s: {reason}"
        ) from None


def arguments_of(config: GatewayConfig, listen: Address, metrics_port: int) -> list[str]:
    """The arguments of `smg launch`, but for what must not be seen in a list of processes. Raises
    ConfigError for a token file that cannot be used."""
    arguments = [
        *_ALWAYS,
        "--worker-urls",
        *(f"grpc://{router}" for router in config.router),
        "--host",
        listen.host,
        "--port",
        str(listen.port),
        "--prometheus-host",
        config.metrics_host,
        "--prometheus-port",
        str(metrics_port),
        "--log-level",
        _LEVELS[config.log_level],
        "--max-payload-size",
        str(config.max_body_bytes),
        "--shutdown-grace-period-secs",
        str(config.drain_s),
    ]
    if config.log_style is LogStyle.JSON:
        arguments.append("--log-json")
    if config.stored_responses:
        arguments += ["--history-memory-max-responses", str(config.stored_responses)]
    else:
        arguments += ["--history-backend", "none"]
    if config.tls_cert is not None and config.tls_key is not None:
        arguments += [
            "--tls-cert-path",
            str(config.tls_cert),
            "--tls-key-path",
            str(config.tls_key),
        ]
    return [*arguments, *_keys(config), *config.flag]


def _keys(config: GatewayConfig) -> list[str]:
    """Adding and removing routers over HTTP is closed by a key that is kept nowhere."""
    keys = ["--control-plane-api-keys", f"baton:baton:admin:{secrets.token_hex(32)}"]
    if config.token_file is not None:
        for number, (name, token) in enumerate(read_tokens(config.token_file), 1):
            keys += ["--tenant-api-key", f"{name or f'client-{number}'}:{token}"]
    return keys


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"flag: {message}", field="flag")


def serve(config: GatewayConfig) -> None:
    """Until SIGTERM or SIGINT.

    Raises:
        ConfigError: the extra is missing, or a setting is refused.
        UnavailableError: it cannot listen.
    """
    config.check()
    check_installed()
    from smg.router import Router
    from smg.router_args import RouterArgs

    listen, metrics_port = _chosen(config)
    parser = _Parser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    given = RouterArgs.from_cli_args(
        parser.parse_args(arguments_of(config, listen, metrics_port)), use_router_prefix=False
    )
    _refuse_own_texts(given)
    os.environ["HF_ENDPOINT"] = _NO_HUB
    if config.announce is not None:  # it listens in a moment; /readiness reports when it serves
        write_announcement(
            config.announce, Announcement(str(listen), metrics_port, os.getpid(), uuid.uuid4().hex)
        )
    try:
        Router.from_args(given).start()
    except ValueError as error:
        raise ConfigError(str(error), field="flag") from error
    except (OSError, RuntimeError) as error:
        raise UnavailableError(f"the gateway ended: {error}") from error


def _refuse_own_texts(given: Any) -> None:  # noqa: ANN401 - of a package that may not be installed
    """Raises ConfigError for flags by which a gateway would render and read texts by files of its
    own."""
    for flag in ("chat_template", "tokenizer_path", "model_path"):
        if getattr(given, flag):
            raise ConfigError(
                f"flag: --{flag.replace('_', '-')} is not taken: routers render chats and read texts",
                field="flag",
            )


def _chosen(config: GatewayConfig) -> tuple[Address, int]:
    """Where to listen, with ports for those that were left open."""
    listen = parse_address(config.listen, field="listen")
    if not listen.port:
        listen = Address(listen.host, _free_port(listen.host))
    return listen, config.metrics_port or _free_port(config.metrics_host)


def _free_port(host: str) -> int:
    try:
        with socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as probe:
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}", field="listen") from error


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help="Serve OpenAI's HTTP API in front of one or more routers.")
@flags_of(GatewayConfig, section="gateway")
def gateway(flags: Flags, file: Path | None, checks_only: bool) -> None:  # noqa: FBT001
    """Run a gateway until it is told to stop."""
    try:
        settings = load(GatewayConfig, section="gateway", flags=flags, file=file)
        if checks_only:
            settings.check()
        else:
            serve(settings)
    except BatonError as error:
        text = f"gateway: {error}"
        line = (
            styled_line(LogStyle.JSON, text, role="gateway", level="error")
            if flags["log_style"] is LogStyle.JSON
            else text
        )
        print(line, file=sys.stderr)
        raise typer.Exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED) from None


if __name__ == "__main__":
    app(prog_name="baton gateway")

"""`baton gateway`: OpenAI's HTTP API in front of routers, served by the published gateway `smg`.

    baton gateway --router 127.0.0.1:7000 --listen 127.0.0.1:8000

The routers run with `--vllm-engine`. The gateway gets their tokenizer from them, so it needs no
model directory. This module sets only the flags that differ from the gateway's defaults, and gives
the reasons. `--flag=--tool-call-parser=qwen` passes a further flag.
"""

import argparse
import asyncio
import importlib.util
import os
import secrets
import uuid
from pathlib import Path
from typing import Any, NoReturn

import typer
from pydantic import Field

from baton.preflight import free_ports
from runtime.config import Address, AddressField, Config, PeerField, load, parse_address
from runtime.config_flags import Flags, flags_of
from runtime.errors import BatonError, ConfigError, UnavailableError
from runtime.observe.log import LEVELS, LogStyle, configure, report_end
from runtime.process.announce import Announcement, write_announcement
from runtime.process.supervision import EXIT_CONFIG, EXIT_FAILED
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity
from runtime.security.tokens import read_tokens

DEFAULT_LISTEN = "127.0.0.1:8000"
_MODULES = ("smg", "smg_grpc_proto")
# Before it asks the routers for the tokenizer, the gateway looks for its name on this host and on a
# hub. This address makes the hub lookup fail at once.
_NO_HUB = "http://127.0.0.1:9"
_LOOK_S = 0.05  # between two readiness checks
_LOOK_TIMEOUT_S = 5.0
# Levels of the gateway. Its "info" logs every step of the start and every health check of a worker.
_LEVELS = {"debug": "info", "info": "warn", "warning": "error", "error": "error"}
# The router does these better, or they harm when they run in front of a router.
_ALWAYS = (
    "--backend",
    "vllm",
    "--policy",
    "round_robin",
    # routers queue, and report when they are full
    "--disable-worker-overload-protection",
    "--disable-retries",  # clients of OpenAI's API retry; two layers of retries amplify an overload
    # it rejects everything for a minute after ten errors, and there may be no other router
    "--disable-circuit-breaker",
    "--no-remove-unhealthy-workers",
    "--health-check-interval-secs",
    "2",
    "--health-check-timeout-secs",
    "2",
    "--health-success-threshold",
    "1",  # use a router within seconds after it recovers
)


class GatewayConfig(Config):
    """Settings of a gateway: flags and the [gateway] table of a TOML file."""

    router: tuple[PeerField, ...] = Field(
        min_length=1, description="HOST:PORT of a router with --vllm-engine; repeatable."
    )
    listen: AddressField = Field(
        default=DEFAULT_LISTEN, description="HOST:PORT for HTTP; port 0 takes a free one."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of Prometheus /metrics; default and 0: a free port.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address that serves /metrics.")
    announce: Path | None = Field(
        default=None, description="File to write the addresses to at startup (JSON)."
    )
    tls_cert: Path | None = Field(default=None, description="PEM certificate; enables HTTPS.")
    tls_key: Path | None = Field(default=None, description="PEM key of the certificate.")
    token_file: Path | None = Field(
        default=None, description="File of API keys for clients, one per line."
    )
    stored_responses: int = Field(
        default=10_000,
        ge=0,
        le=1_000_000,
        description="Number of responses kept in memory for later requests; 0: none.",
    )
    max_body_bytes: int = Field(
        default=16 << 20, ge=1 << 10, le=1 << 29, description="Largest request."
    )
    drain_s: int = Field(
        default=30,
        ge=1,
        le=86_400,
        description="Seconds that running requests may take after SIGTERM.",
    )
    flag: tuple[str, ...] = Field(
        default=(),
        description="A further flag of `smg launch`, such as --flag=--tool-call-parser=qwen; "
        "repeatable.",
    )
    log_level: str = Field(
        default="info", description="Minimum log level: debug, info, warning or error."
    )
    log_style: LogStyle = Field(
        default=LogStyle.HUMAN, description="Log format: text lines, or one JSON object per line."
    )

    def check(self) -> None:
        """Check settings that depend on each other.

        Raises:
            ConfigError: settings contradict each other.
        """
        if self.log_level not in LEVELS:
            raise ConfigError(
                f"log level must be one of {', '.join(LEVELS)}, got {self.log_level!r}",
                field="log_level",
            )
        for field, path in (("tls_cert", self.tls_cert), ("tls_key", self.tls_key)):
            if path is not None and not path.is_file():
                raise ConfigError(f"{field}: no such file: {path}", field=field)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key must be given together", field="tls_cert")


def check_can_serve(listen: str, security: ChannelSecurity) -> None:
    """Raise ConfigError if no gateway can be in front of routers that require `security`."""
    parse_address(listen, field="http")
    check_installed()
    if security != PLAIN_CHANNEL:
        raise ConfigError(
            "--http cannot be used with TLS or tokens between the processes: the gateway "
            "presents neither to routers",
            field="http",
        )


def check_installed() -> None:
    """Raise ConfigError if the extra `http` is not installed."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the OpenAI gateway needs the package {missing[0]}: pip install 'baton[http]'",
            field="http",
        )


async def wait_ready(address: str, *, timeout_s: float) -> None:
    """Wait until the gateway at HOST:PORT has a serving router and its tokenizer.

    Raises:
        UnavailableError: that takes longer than `timeout_s`; the message names the missing part.
    """
    import httpx2  # every command would take longer to start

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
    """Return the arguments of `smg launch`, without secrets: process lists show arguments.

    Raises:
        ConfigError: the token file cannot be used.
    """
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
    """Return the keys of the clients and a random admin key, which is stored nowhere.

    The admin key closes the HTTP calls that add and remove routers.
    """
    keys = ["--control-plane-api-keys", f"baton:baton:admin:{secrets.token_hex(32)}"]
    if config.token_file is not None:
        for number, (name, token) in enumerate(read_tokens(config.token_file), 1):
            keys += ["--tenant-api-key", f"{name or f'client-{number}'}:{token}"]
    return keys


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"flag: {message}", field="flag")


def serve(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the extra is missing, or a setting is rejected.
        UnavailableError: the gateway cannot listen.
    """
    config.check()
    check_installed()
    from smg.router import Router
    from smg.router_args import RouterArgs

    listen, metrics_port = listeners_of(config)
    parser = _Parser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    given = RouterArgs.from_cli_args(
        parser.parse_args(arguments_of(config, listen, metrics_port)), use_router_prefix=False
    )
    _refuse_own_texts(given)
    os.environ["HF_ENDPOINT"] = _NO_HUB
    # it listens shortly after this; /readiness reports when it serves
    if config.announce is not None:
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
    """Raise ConfigError for flags that make the gateway render or read texts with its own files."""
    for flag in ("chat_template", "tokenizer_path", "model_path"):
        if getattr(given, flag):
            raise ConfigError(
                f"flag: --{flag.replace('_', '-')} is not allowed: routers render chats and read "
                "texts",
                field="flag",
            )


def listeners_of(config: GatewayConfig) -> tuple[Address, int]:
    """Return the address to listen on and the metrics port; choose ports that are left open."""
    listen = parse_address(config.listen, field="listen")
    if not listen.port:
        listen = Address(listen.host, _free_port(listen.host, taken=config.metrics_port))
    metrics_port = config.metrics_port or _free_port(config.metrics_host, taken=listen.port)
    return listen, metrics_port


def _free_port(host: str, *, taken: int | None) -> int:
    """Return a port that is free, other than the one `taken` by this gateway's other listener.

    The kernel may offer a port again as soon as its probe is closed.
    """
    try:
        while True:
            (port,) = free_ports(host, 1)
            if port != taken:
                return port
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}", field="listen") from error


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help="Serve OpenAI's HTTP API in front of one or more routers.")
@flags_of(GatewayConfig, section="gateway")
def gateway(flags: Flags, file: Path | None, checks_only: bool) -> None:  # noqa: FBT001
    """Run a gateway until it is stopped."""
    style = flags["log_style"]
    if style is LogStyle.JSON:  # before the settings are read, so that their errors are JSON, too
        configure(level="info", style=LogStyle.JSON, role="gateway")
    try:
        settings = load(GatewayConfig, section="gateway", flags=flags, file=file)
        configure(level=settings.log_level, style=settings.log_style, role="gateway")
        if checks_only:
            settings.check()
        else:
            serve(settings)
    except BatonError as error:
        report_end(f"gateway: {error}")
        raise typer.Exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED) from None


if __name__ == "__main__":
    app(prog_name="baton gateway")

"""The command line of a router process."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from router.app import serve
from router.config import GenerationConfigUse, RouterConfig
from router.text.control_tokens import UserControlTokens
from router.workers.policy import Policy
from runtime.config import load
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle, configure, report_end
from runtime.process.supervision import EXIT_CONFIG, run_process
from runtime.security.access import ClientCertificates

TARGET_HELP = (
    "HOST:PORT of a {} pool's leader; dns:///NAME:PORT for every address of a name; "
    "k8s:///[NAMESPACE/]SERVICE:PORT for the endpoints of a Kubernetes service; file:///PATH for a "
    "leader that announces itself in that file. Repeatable."
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def router(
    prefill: Annotated[list[str] | None, typer.Option(help=TARGET_HELP.format("prefill"))] = None,
    decode: Annotated[list[str] | None, typer.Option(help=TARGET_HELP.format("decode"))] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory; its config and tokenizer are loaded.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Model name for clients; default: the directory's name.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to serve on; port 0: any free port.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics here; 0: any free port.")
    ] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Address to serve /metrics on.")] = None,
    health_listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for probes without TLS.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate; one of its DNS names must be router.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Unencrypted PEM key of the certificate.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM certificates of the authority that signs the roles.")
    ] = None,
    client_certificates: Annotated[
        ClientCertificates | None,
        typer.Option(help="With TLS: whether clients must present a certificate of the authority."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of bearer tokens for clients, one per line.")
    ] = None,
    announce: Annotated[
        Path | None, typer.Option(help="Write a JSON file here once the router listens.")
    ] = None,
    policy: Annotated[Policy | None, typer.Option(help="Policy that chooses workers.")] = None,
    generation_config: Annotated[
        GenerationConfigUse | None,
        typer.Option(
            help="auto: sampling parameters that a request omits come from the model; none: from Baton."
        ),
    ] = None,
    priority_limits: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PRIORITY: most urgent priority of a client; *: of every other one."
        ),
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Maximum number of queued requests.")
    ] = None,
    max_connection_age_s: Annotated[
        float | None,
        typer.Option(
            help="Ask clients to reconnect after this many seconds, so that balancers spread them again."
        ),
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Seconds that running requests get after SIGTERM.")
    ] = None,
    max_message_bytes: Annotated[int | None, typer.Option(help="Largest request message.")] = None,
    reflection: Annotated[
        bool | None, typer.Option(help="Serve gRPC reflection to every client.")
    ] = None,
    channelz: Annotated[
        bool | None, typer.Option(help="Serve sockets and calls to clients that may watch workers.")
    ] = None,
    vllm_engine: Annotated[
        bool | None,
        typer.Option(help="Also serve vllm.grpc.engine.VllmEngine, for gateways that speak it."),
    ] = None,
    user_control_tokens: Annotated[
        UserControlTokens | None,
        typer.Option(help="Treatment of control tokens such as <|im_end|> in the texts of a chat."),
    ] = None,
    salt_by_client: Annotated[
        bool | None,
        typer.Option(
            help="Share cached prompts only among requests of one client, by its token or certificate."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with a [router] table; flags override it.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_style: Annotated[LogStyle | None, typer.Option(help="Log format: text or JSON.")] = None,
    otel_endpoint: Annotated[
        str | None, typer.Option(help="URL of the OTLP collector that receives traces.")
    ] = None,
    check_settings: Annotated[
        bool | None, typer.Option("--check-settings", help="Check the settings and exit.")
    ] = None,
) -> None:
    """Balance requests over prefill and decode workers and stream tokens to clients."""
    flags = {
        "prefill": prefill or None,
        "decode": decode or None,
        "model": model,
        "model_name": model_name,
        "listen": listen,
        "metrics_port": metrics_port,
        "announce": announce,
        "policy": policy,
        "generation_config": generation_config,
        "health_listen": health_listen,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_ca": tls_ca,
        "client_certificates": client_certificates,
        "token_file": token_file,
        "priority_limits": priority_limits or None,
        "max_waiting": max_waiting,
        "max_connection_age_s": max_connection_age_s,
        "max_message_bytes": max_message_bytes,
        "reflection": reflection,
        "channelz": channelz,
        "vllm_engine": vllm_engine,
        "metrics_host": metrics_host,
        "drain_s": drain_s,
        "salt_by_client": salt_by_client,
        "user_control_tokens": user_control_tokens,
        "log_level": log_level,
        "log_style": log_style,
        "otel_endpoint": otel_endpoint,
    }
    if log_style is LogStyle.JSON:  # configured early: errors of the settings are JSON lines, too
        configure(level="info", style=log_style, role="router")
    try:
        settings = load(RouterConfig, section="router", flags=flags, file=config)
        configure(level=settings.log_level, style=settings.log_style, role="router")
        settings.check()
    except ConfigError as error:
        report_end(f"router: {error}")
        raise typer.Exit(EXIT_CONFIG) from None
    if check_settings:
        raise typer.Exit
    raise typer.Exit(run_process("router", lambda stop: serve(settings, stop, on_start=_settle)))


def _settle() -> None:
    """Exempt the objects that exist now from garbage collection.

    Used in a process that only runs a router: a full collection would hold up every request for 50
    ms.
    """
    gc.collect()
    gc.freeze()

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
    "HOST:PORT of a {} pool's leader, dns:///NAME:PORT for all of a name, or "
    "k8s:///[NAMESPACE/]SERVICE:PORT for a Kubernetes service's endpoints, file:///PATH for one that "
    "announces itself there; repeat."
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def router(
    prefill: Annotated[list[str] | None, typer.Option(help=TARGET_HELP.format("prefill"))] = None,
    decode: Annotated[list[str] | None, typer.Option(help=TARGET_HELP.format("decode"))] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory; config and tokenizer are read.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="What clients call it; default: the directory.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to serve on; port 0: any free one.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics here; 0: any free port.")
    ] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Address /metrics is served on.")] = None,
    health_listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for probes without TLS.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate; a DNS name of it is router.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM key of the certificate, not encrypted.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM certificates of the roles' authority.")
    ] = None,
    client_certificates: Annotated[
        ClientCertificates | None,
        typer.Option(help="With TLS: whether clients must show one of the authority."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Bearer tokens clients must show, one per line.")
    ] = None,
    announce: Annotated[
        Path | None, typer.Option(help="Write a JSON file here once listening.")
    ] = None,
    policy: Annotated[Policy | None, typer.Option(help="How workers are chosen.")] = None,
    generation_config: Annotated[
        GenerationConfigUse | None,
        typer.Option(
            help="auto: sampling that a request leaves open is the model's own; none: it is Baton's default."
        ),
    ] = None,
    priority_limits: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PRIORITY: the most urgent priority of a client; *: of all others."),
    ] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Requests held back at most.")] = None,
    max_connection_age_s: Annotated[
        float | None,
        typer.Option(
            help="Ask clients to reconnect after so many seconds, so that balancers spread them again."
        ),
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Seconds SIGTERM leaves running requests.")
    ] = None,
    max_message_bytes: Annotated[int | None, typer.Option(help="Largest request.")] = None,
    reflection: Annotated[
        bool | None, typer.Option(help="Describe the services to whoever asks.")
    ] = None,
    channelz: Annotated[
        bool | None, typer.Option(help="Show sockets and calls to whoever may watch workers.")
    ] = None,
    vllm_engine: Annotated[
        bool | None,
        typer.Option(help="Serve vllm.grpc.engine.VllmEngine too, for gateways that know it."),
    ] = None,
    user_control_tokens: Annotated[
        UserControlTokens | None,
        typer.Option(
            help="What control tokens such as <|im_end|> in the texts of a chat are read as."
        ),
    ] = None,
    salt_by_client: Annotated[
        bool | None,
        typer.Option(
            help="Share cached prompts only among requests of one client, by its token or certificate."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with a [router] table; flags beat it.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_style: Annotated[LogStyle | None, typer.Option(help="For people or for machines.")] = None,
    otel_endpoint: Annotated[
        str | None, typer.Option(help="URL of an OTLP collector; traces go there.")
    ] = None,
    check_settings: Annotated[
        bool | None, typer.Option("--check-settings", help="Say whether the settings fit, and end.")
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
    if log_style is LogStyle.JSON:  # before the settings are read: their errors are lines, too
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
    """For a process that is a router and nothing else: what is there stays, and every later look of
    Python's collector through it would hold all requests up, for 50 ms."""
    gc.collect()
    gc.freeze()

"""`baton up`: a whole cluster on this machine, in the foreground."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.client import DEFAULT_TARGET, AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, demo_model
from baton.command_line import one_line_errors
from baton.connection import TlsCa, TlsCert, TlsKey, TlsName, TokenFile, connection
from baton.first_question import FirstQuestion
from baton.process import LogSink
from baton.render import StartPrinter, json_printer, log_printer
from baton.settings_check import check_settings
from baton.values import ModelInfo
from runtime.errors import BatonError
from runtime.observe.log import LogStyle, configure, styled_line
from runtime.process.standard_streams import reporting_full_disk
from runtime.process.supervision import StopSignal, interruptible, run_process
from runtime.security.access import PeerRole


def up(
    context: typer.Context,
    model: Annotated[
        Path | None, typer.Option(help="Model directory; default: the demo model.")
    ] = None,
    prefill: Annotated[int, typer.Option(help="Number of prefill pools.")] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode pools.")] = 1,
    prefill_pp: Annotated[
        int, typer.Option(help="Pipeline stages (processes) of each prefill pool.")
    ] = 1,
    decode_pp: Annotated[
        int, typer.Option(help="Pipeline stages (processes) of each decode pool.")
    ] = 1,
    prefill_tp: Annotated[
        int, typer.Option(help="Tensor-parallel ranks (processes) of each prefill stage.")
    ] = 1,
    decode_tp: Annotated[
        int, typer.Option(help="Tensor-parallel ranks (processes) of each decode stage.")
    ] = 1,
    prefill_dp_attention: Annotated[
        int, typer.Option(help="Data-parallel attention groups of each prefill stage.")
    ] = 1,
    decode_dp_attention: Annotated[
        int, typer.Option(help="Data-parallel attention groups of each decode stage.")
    ] = 1,
    prefill_partition: Annotated[
        str, typer.Option(help='Layers per prefill stage, such as "3,5", or balanced.')
    ] = "",
    decode_partition: Annotated[
        str, typer.Option(help='Layers per decode stage, such as "3,5", or balanced.')
    ] = "",
    routers: Annotated[
        int,
        typer.Option(help="Number of routers; all but the first take free ports."),
    ] = 1,
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the router; port 0 takes a free one.", show_default=DEFAULT_TARGET
        ),
    ] = None,
    memory_mb: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cache memory of each worker in MiB; default: a share of the free memory."
        ),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Maximum tokens of prompt and output together; default: the model's limit, or as "
            "many as fit into memory.",
        ),
    ] = None,
    http: Annotated[
        str, typer.Option(help="HOST:PORT for OpenAI's HTTP API; needs baton[http].")
    ] = "",
    numerics: Annotated[
        str | None, typer.Option(help="exact (same bits from every topology) or fast.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Weight type: model (the checkpoint's own) or int8 (eight bits a weight)."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the workers: cpu, cuda or cuda:N.")
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="Transport of the KV cache: auto, shm, tcp or cuda.")
    ] = None,
    transport_interface: Annotated[
        str | None,
        typer.Option(help="Network devices that UCX listens on.", show_default="loopback"),
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Draft model; enables speculative decoding in decode pools.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the tables router, prefill and decode.")
    ] = None,
    otel_endpoint: Annotated[
        str | None, typer.Option(help="URL of an OTLP collector that receives traces.")
    ] = None,
    preload: Annotated[
        bool,
        typer.Option(help="Load PyTorch once and fork the workers from that process (CPU only)."),
    ] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_style: Annotated[
        LogStyle | None,
        typer.Option(
            help="Log format: text, or JSON with every line of every process.", show_default="human"
        ),
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Run a whole cluster on this machine, in the foreground. Ctrl-C stops it; a process that dies
    is restarted."""
    configure(level="warning", style=log_style or LogStyle.HUMAN, role="baton")
    with one_line_errors():
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
    worker_flags = [
        *_flag("--numerics", numerics),
        *_flag("--weights", weights),
        *_flag("--device", device),
        *_flag("--transport", transport),
        *_flag("--transport-interface", transport_interface),
        *_flag("--draft", None if draft is None else str(draft)),
        *_flag("--otel-endpoint", otel_endpoint),
    ]
    settings = ClusterConfig(
        model=model or demo_model(),
        prefill=prefill,
        decode=decode,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_dp_attention=prefill_dp_attention,
        decode_dp_attention=decode_dp_attention,
        prefill_partition=prefill_partition,
        decode_partition=decode_partition,
        routers=routers,
        listen=listen,
        memory_mb=memory_mb,
        max_context=max_context,
        http=http,
        worker_flags=tuple(worker_flags),
        router_flags=tuple(_flag("--otel-endpoint", otel_endpoint)),
        config_file=config,
        one_core_each=device in (None, "cpu"),
        forks_workers=preload and device in (None, "cpu"),
        fork_server=context.obj,
        log_level=log_level,
        log_style=log_style,
        security=security,
    )

    sink = (
        json_printer(sys.stdout)
        if log_style is LogStyle.JSON
        else log_printer(Console(highlight=False))
    )

    async def run(stop: StopSignal) -> None:
        with reporting_full_disk():
            await interruptible(stop, _serve(settings, sink))

    raise typer.Exit(run_process("baton up", run))


def _flag(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


async def _serve(settings: ClusterConfig, sink: LogSink) -> None:
    """Run the cluster until cancelled."""

    def say(text: str) -> None:
        sink("baton", styled_line(settings.own_style, text, role="baton"))

    printer = StartPrinter(sink, own="baton")
    if settings.log_level == "debug":
        printer.ready()
    settings.check()
    await check_settings(settings)
    async with LocalCluster(settings, sink=printer) as cluster:
        printer.ready()
        for name, process in cluster.processes.items():
            if (where := process.announcement) is not None:
                say(f"{name}: {where.address}, metrics on port {where.metrics_port}")
        say(cluster.transport_text)
        say(f"metrics:  prometheus --config.file={cluster.write_scrape_config()}")
        target = (
            ""
            if cluster.addresses == (DEFAULT_TARGET,)
            else f" --target {','.join(cluster.addresses)}"
        )
        served: ModelInfo | None = None
        # clients may have to show a certificate or token that this command does not have
        with suppress(BatonError):
            async with AsyncBatonClient(
                cluster.address, security=settings.security.to(PeerRole.ROUTER)
            ) as client:
                served = await client.model_info()
        question = FirstQuestion.of(None if settings.model == demo_model() else served)
        say(f"ready: try  baton generate {question.words()} --temperature 0{target}")
        if settings.http and served is not None:
            say(f"over HTTP:  {question.curl(cluster.http_address, served.model)}")
        try:
            await cluster.wait_ended()
        except asyncio.CancelledError:
            say("stopping after running requests end; press Ctrl-C again to stop at once")
            raise

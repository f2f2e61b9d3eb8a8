"""`baton up`: a whole cluster on this machine, in the foreground."""

import asyncio
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import Field
from rich.console import Console

from baton.client import DEFAULT_TARGET, AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, ClusterSettings, demo_model
from baton.command_line import one_line_errors
from baton.connection import ConnectionFlags, TlsCa, TlsCert, TlsKey, TlsName, TokenFile
from baton.first_question import FirstQuestion
from baton.fork_server import ForkServer
from baton.gguf_models import local_checkpoint
from baton.process import LogSink
from baton.render import StartPrinter, json_printer, log_printer
from baton.settings_check import check_settings
from baton.values import ModelInfo
from runtime.config import load
from runtime.config_flags import Flags, command_of
from runtime.errors import BatonError
from runtime.observe.log import LogStyle, configure, styled_line
from runtime.process.standard_streams import reporting_full_disk
from runtime.process.supervision import StopSignal, interruptible, run_process
from runtime.security.access import PeerRole

# Settings of `baton up` that the workers check.
_OF_WORKERS = (
    "numerics",
    "weights",
    "device",
    "transport",
    "transport_interface",
    "draft",
    "otel_endpoint",
)


# Settings of the workers that `baton serve` has, too.
WorkerNumerics = Annotated[
    str | None, Field(description="Numerics: exact (same bits from every topology) or fast.")
]
WorkerWeights = Annotated[
    str | None,
    Field(
        description="Weight type: model (the checkpoint's own), int8 or int4 (eight or four bits a "
        "weight)."
    ),
]
WorkerDevice = Annotated[
    str | None, Field(description="Device of the workers: cpu, cuda or cuda:N.")
]
WorkerDraft = Annotated[
    Path | None,
    Field(
        description="Draft model, or suffix (drafts from the request's own text); enables "
        "speculative decoding in decode pools."
    ),
]


class UpConfig(ClusterSettings):
    """Settings of `baton up`: its flags."""

    numerics: WorkerNumerics = None
    weights: WorkerWeights = None
    device: WorkerDevice = None
    transport: str | None = Field(
        default=None, description="Transport of the KV cache: auto, shm, tcp or cuda."
    )
    transport_interface: Annotated[str | None, typer.Option(show_default="loopback")] = Field(
        default=None, description="Network devices that UCX listens on."
    )
    draft: WorkerDraft = None
    otel_endpoint: str | None = Field(
        default=None, description="URL of an OTLP collector that receives traces."
    )
    preload: bool = Field(
        default=True,
        description="Load PyTorch once and fork the workers from that process (CPU only).",
    )
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_name: TlsName = ""
    token_file: TokenFile = None

    def cluster(
        self, fork_server: ForkServer | None, *, http_keys: tuple[str, ...] = ()
    ) -> ClusterConfig:
        """Return the configuration of the cluster; `http_keys` are those of HTTP clients.

        Raises:
            ConfigError: a flag about TLS or tokens is missing, or its file cannot be used, or a GGUF
                file cannot be converted.
        """
        runs_on_cpu = self.device in (None, "cpu")
        settings = {name: getattr(self, name) for name in ClusterSettings.model_fields}
        return ClusterConfig(
            **{**settings, "model": local_checkpoint(self.model)},
            worker_flags=self._flags(*_OF_WORKERS),
            router_flags=self._flags("otel_endpoint"),
            one_core_each=runs_on_cpu,
            forks_workers=self.preload and runs_on_cpu,
            fork_server=fork_server,
            http_keys=http_keys,
            client_flags=self._flags("tls_ca", "tls_cert", "tls_key", "tls_name", "token_file"),
            security=ConnectionFlags(
                self.tls_ca, self.tls_cert, self.tls_key, self.tls_name, self.token_file
            ).security(),
        )

    def _flags(self, *names: str) -> tuple[str, ...]:
        """Return the flags for the settings that were given."""
        given = {name: getattr(self, name) for name in names}
        return tuple(
            word
            for name, value in given.items()
            if value not in (None, "")
            for word in (f"--{name.replace('_', '-')}", str(value))
        )


@command_of(UpConfig)
def up(context: typer.Context, flags: Flags) -> None:
    """Run a whole cluster on this machine, in the foreground. Ctrl-C stops it; a process that dies
    is restarted."""
    style = flags["log_style"]
    is_json = style is LogStyle.JSON
    configure(level="warning", style=LogStyle.JSON if is_json else LogStyle.HUMAN, role="baton")
    with one_line_errors():
        config = load(UpConfig, section="up", flags=flags).cluster(context.obj)
    run_cluster(config, name="baton up")


def run_cluster(config: ClusterConfig, *, name: str) -> NoReturn:
    """Run the cluster of a command until it is told to stop, and exit."""
    is_json = config.log_style is LogStyle.JSON
    sink = json_printer(sys.stdout) if is_json else log_printer(Console(highlight=False))

    async def run(stop: StopSignal) -> None:
        with reporting_full_disk():
            await interruptible(stop, _serve(config, sink))

    raise typer.Exit(run_process(name, run))


async def _serve(settings: ClusterConfig, sink: LogSink) -> None:
    """Run the cluster until cancelled."""

    def say(text: str) -> None:
        sink("baton", styled_line(settings.own_style, text, role="baton"))

    printer = StartPrinter(sink, own="baton")
    if settings.log_level == "debug":
        printer.ready()
    settings.check()
    fitted = settings.fitted()
    if fitted is not settings:
        say(
            "memory is short for two copies of the weights: starting one pool of both roles "
            "(--aggregated)"
        )
        settings = fitted
    await check_settings(settings)
    async with LocalCluster(settings, sink=printer) as cluster:
        printer.ready()
        for name, process in cluster.processes.items():
            if (where := process.announcement) is not None:
                say(f"{name}: {where.address}, metrics on port {where.metrics_port}")
        say(cluster.transport_text)
        say(f"metrics:  prometheus --config.file={cluster.write_scrape_config()}")
        if page := cluster.status_page:
            say(f"status:   {page}")
        further = list(settings.client_flags)
        if cluster.addresses != (DEFAULT_TARGET,):
            further += ["--target", ",".join(cluster.addresses)]
        served: ModelInfo | None = None
        # clients may have to show a certificate or token that this command does not have
        with suppress(BatonError):
            async with AsyncBatonClient(
                cluster.address, security=settings.security.to(PeerRole.ROUTER)
            ) as client:
                served = await client.model_info()
        question = FirstQuestion.of(None if settings.model == demo_model() else served)
        words = " ".join([question.words(), "--temperature 0", *map(shlex.quote, further)])
        say(f"ready: try  baton generate {words}")
        if settings.http and served is not None:
            has_keys = bool(settings.http_keys)
            say(
                f"over HTTP:  {question.curl(cluster.http_address, served.model, has_keys=has_keys)}"
            )
        try:
            await cluster.wait_ended()
        except asyncio.CancelledError:
            say("stopping after running requests end; press Ctrl-C again to stop at once")
            raise

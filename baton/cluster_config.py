"""Configuration of a local cluster, checked before any process starts."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Self

import typer
from pydantic import ConfigDict, Field, SkipValidation

from baton.client import DEFAULT_TARGET
from baton.fork_server import HERE, ForkServer, ProcessPlaces
from baton.gateway import check_can_serve
from baton.memory_plan import leaves_room
from baton.preflight import PROGRAMS, PoolShape, check_partition
from runtime.config import Config, parse_address
from runtime.errors import ConfigError
from runtime.model_files.adapter_folders import adapter_folders
from runtime.model_files.model_folder import check_model_folder
from runtime.observe.log import LogStyle
from runtime.process.host_memory import HostMemory, host_memory
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity

_MAX_PROCESSES = 64


def demo_model() -> Path:
    """Return the checkpoint that is included in Baton."""
    return Path(str(resources.files("demo") / "model"))


# Settings of `baton up` that `baton serve` has, too.
Aggregated = Annotated[
    bool,
    Field(
        description="One pool that prefills and decodes, in place of a prefill and a decode pool."
    ),
]
DecodePp = Annotated[int, Field(description="Pipeline stages (processes) of each decode pool.")]
MemoryMb = Annotated[
    int | None,
    Field(
        ge=1,
        description="Cache memory of each worker in MiB; default: a share of the free memory.",
    ),
]
MaxContext = Annotated[
    int | None,
    Field(
        ge=16,
        description="Maximum tokens of prompt and output together; default: the model's limit, or "
        "as many as fit into memory.",
    ),
]
Adapters = Annotated[
    Path | None,
    Field(
        description="Directory of LoRA adapters in PEFT's format, one per subfolder; requests name "
        "one as MODEL:ADAPTER."
    ),
]
DiskCacheFolder = Annotated[
    Path | None,
    Field(description="Directory for a copy of the workers' prefix caches, which outlives them."),
]
CacheServerUrl = Annotated[
    str | None,
    Field(
        description="Server for a copy of the workers' prefix caches, like redis://HOST:PORT; needs "
        "--cache-server-key."
    ),
]
CacheServerKey = Annotated[
    Path | None,
    Field(
        description="File with at least 32 random bytes that authenticate what is at the server."
    ),
]
LogLevel = Annotated[str, Field(description="Minimum log level: debug, info, warning or error.")]
# default: of each role's table in the file, and text for the cluster's own lines
ClusterLogStyle = Annotated[
    LogStyle | None,
    typer.Option(show_default=LogStyle.HUMAN.value),
    Field(description="Log format: text, or JSON with every line of every process."),
]


class ClusterSettings(Config):
    """Settings of a local cluster that are flags of `baton up`, too."""

    model: Path = Field(
        default_factory=demo_model, description="Model directory; default: the demo model."
    )
    prefill: int = Field(default=1, description="Number of prefill pools.")
    decode: int = Field(default=1, description="Number of decode pools.")
    worker: int = Field(
        default=0,
        description="Number of pools that prefill and decode, with one copy of the weights.",
    )
    aggregated: Aggregated = False
    prefill_pp: int = Field(
        default=1, description="Pipeline stages (processes) of each prefill pool."
    )
    decode_pp: DecodePp = 1
    worker_pp: int = Field(
        default=1, description="Pipeline stages (processes) of each pool of both roles."
    )
    prefill_tp: int = Field(
        default=1, description="Tensor-parallel ranks (processes) of each prefill stage."
    )
    decode_tp: int = Field(
        default=1, description="Tensor-parallel ranks (processes) of each decode stage."
    )
    worker_tp: int = Field(
        default=1,
        description="Tensor-parallel ranks (processes) of each stage of a pool of both roles.",
    )
    prefill_dp_attention: int = Field(
        default=1, description="Data-parallel attention groups of each prefill stage."
    )
    decode_dp_attention: int = Field(
        default=1, description="Data-parallel attention groups of each decode stage."
    )
    worker_dp_attention: int = Field(
        default=1,
        description="Data-parallel attention groups of each stage of a pool of both roles.",
    )
    prefill_partition: str = Field(
        default="", description='Layers per prefill stage, such as "3,5", or balanced.'
    )
    decode_partition: str = Field(
        default="", description='Layers per decode stage, such as "3,5", or balanced.'
    )
    worker_partition: str = Field(
        default="",
        description='Layers per stage of a pool of both roles, such as "3,5", or balanced.',
    )
    routers: int = Field(
        default=1, description="Number of routers; all but the first take free ports."
    )
    # default: the file's, else DEFAULT_TARGET
    listen: Annotated[str | None, typer.Option(show_default=DEFAULT_TARGET)] = Field(
        default=None, description="HOST:PORT of the router; port 0 takes a free one."
    )
    memory_mb: MemoryMb = None
    max_context: MaxContext = None
    adapters: Adapters = None
    disk_cache: DiskCacheFolder = None
    cache_server: CacheServerUrl = None
    cache_server_key: CacheServerKey = None
    model_name: str = Field(
        default="", description="Name of the model in the API; default: the folder's name."
    )
    model_alias: tuple[str, ...] = Field(
        default=(), description="Another name of the model in the API; repeatable."
    )
    http: str = Field(default="", description="HOST:PORT for OpenAI's HTTP API; needs baton[http].")
    metrics_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of the first router's /metrics and status page; other processes count up "
        "from it; 0: free ports.",
    )
    config_file: Annotated[Path | None, typer.Option("--config")] = Field(
        default=None, description="TOML file with the tables router, prefill, decode and worker."
    )
    log_level: LogLevel = "info"
    log_style: ClusterLogStyle = None


class ClusterConfig(ClusterSettings):
    """Configuration of a local cluster.

    `worker_flags` go to every prefill and decode process, `router_flags` to the routers. The first
    router ("router") listens at `listen`, the others ("router-1", ...) on ports of their own. If
    `http` is given, a gateway there serves OpenAI's API in front of all routers, to clients with one
    of `http_keys` if there are any.

    Without `one_core_each`, processes may use all cores. Workers on a GPU need that, because they
    compile kernels at startup and move bytes during computation. Otherwise the processes of a role
    in `cores` are pinned to one of its cores each, in turn, and the others as `core_places`
    decides.

    With `forks_workers`, prefill and decode processes are forks of a process that has loaded torch:
    of `fork_server`, which outlives the cluster, or of one that belongs to the cluster. Forks start
    faster, also after a failure.

    The cluster's own processes are shown `security` when their health is queried.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    one_core_each: bool = True
    cores: Mapping[str, Sequence[int]] = Field(default_factory=dict)
    ready_timeout_s: float = 180.0
    stop_grace_s: float = 8.0
    forks_workers: bool = True
    fork_server: SkipValidation[ForkServer | None] = None
    places: SkipValidation[ProcessPlaces] = HERE
    http_keys: tuple[str, ...] = ()
    client_flags: tuple[
        str, ...
    ] = ()  # that a client of the router needs, as `baton up` shows them
    security: SkipValidation[ChannelSecurity] = PLAIN_CHANNEL

    @property
    def shapes(self) -> tuple[PoolShape, ...]:
        """Return the pools of each kind that there is."""
        given = (
            ("--memory-mb", self.memory_mb),
            ("--max-context", self.max_context),
            ("--adapters", self.adapters),
            ("--disk-cache", self.disk_cache),
            ("--cache-server", self.cache_server),
            ("--cache-server-key", self.cache_server_key),
        )
        words = (word for flag, value in given if value is not None for word in (flag, str(value)))
        flags = (*self.worker_flags, *words)
        counts = self.counts
        return tuple(
            PoolShape(
                program,
                counts[program],
                getattr(self, f"{program}_pp"),
                getattr(self, f"{program}_partition"),
                flags,
                getattr(self, f"{program}_tp"),
                getattr(self, f"{program}_dp_attention"),
            )
            for program in PROGRAMS
            if counts[program]
        )

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of pools by their program."""
        if self.aggregated:
            return {"prefill": 0, "decode": 0, "worker": max(self.worker, 1)}
        return {program: getattr(self, program) for program in PROGRAMS}

    def fitted(self, memory: HostMemory | None = None) -> Self:
        """Return these settings, with one pool of both roles where two pools find no room.

        Applies to the default layout on the host only, if one pool fits. `memory` is that of this
        machine by default.
        """
        of_layout = [name for name in ClusterSettings.model_fields if name.startswith(PROGRAMS)]
        is_default = all(
            getattr(self, name) == ClusterSettings.model_fields[name].default
            for name in (*of_layout, "aggregated", "memory_mb", "config_file")
        )
        if not is_default or "--device" in self.worker_flags:
            return self
        memory = memory or host_memory()
        aggregated = self.model_copy(update={"aggregated": True})
        if leaves_room(self.shapes, self.model, memory) or not leaves_room(
            aggregated.shapes, self.model, memory
        ):
            return self
        return aggregated

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Return the names of the adapters, in order.

        Raises:
            ConfigError: the folder has none, or other things than adapters.
        """
        return (
            ()
            if self.adapters is None
            else tuple(folder.name for folder in adapter_folders(self.adapters))
        )

    @property
    def own_style(self) -> LogStyle:
        """Return the style of the lines about the cluster itself."""
        return self.log_style or LogStyle.HUMAN

    @property
    def shared_flags(self) -> tuple[str, ...]:
        """Return the flags that workers and routers share."""
        file = () if self.config_file is None else ("--config", str(self.config_file))
        style = () if self.log_style is None else ("--log-style", self.log_style.value)
        name = ("--model-name", self.model_name) if self.model_name else ()
        return ("--model", str(self.model), *name, "--log-level", self.log_level, *style, *file)

    def check(self) -> None:
        """Check the settings before any process starts.

        Raises:
            ConfigError: a setting is outside its limit; names both.
        """
        parse_address(self.listen or DEFAULT_TARGET, field="listen")
        if any(not alias or "=" in alias for alias in self.model_alias):
            raise ConfigError("--model-alias must not be empty or contain '='", field="model_alias")
        least = dict.fromkeys(PROGRAMS, 0 if self.counts["worker"] > 0 else 1) | {"worker": 0}
        sizes = [f"{program}_{size}" for size in ("pp", "tp") for program in PROGRAMS]
        for name in (*PROGRAMS, *sizes, "routers"):
            count: int = getattr(self, name)
            if not least.get(name, 1) <= count <= _MAX_PROCESSES:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be from {least.get(name, 1)} to {_MAX_PROCESSES}, "
                    f"got {count}",
                    field=name,
                )
        if self.aggregated and (self.prefill, self.decode) != (1, 1):
            raise ConfigError(
                "--aggregated replaces the prefill and decode pools: give --worker in place of "
                "--prefill and --decode",
                field="aggregated",
            )
        if (
            count := self.routers + sum(shape.num_processes for shape in self.shapes)
        ) > _MAX_PROCESSES:
            raise ConfigError(
                f"{count} processes requested (routers, and the stages and ranks of all pools), the "
                f"limit is {_MAX_PROCESSES}",
                field="processes",
            )
        check_model_folder(self.model)
        for shape in self.shapes:
            check_partition(shape, self.model)
            if shape.num_data_ranks < 1 or shape.num_ranks % shape.num_data_ranks:
                raise ConfigError(
                    f"--{shape.role}-dp-attention must divide --{shape.role}-tp {shape.num_ranks}, got "
                    f"{shape.num_data_ranks}",
                    field=f"{shape.role}_dp_attention",
                )
        if self.http:
            check_can_serve(self.http, self.security)

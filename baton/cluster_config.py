"""Configuration of a local cluster, checked before any process starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from baton.client import DEFAULT_TARGET
from baton.fork_server import HERE, ForkServer, ProcessPlaces
from baton.gateway import check_can_serve
from baton.preflight import PoolShape, check_partition
from runtime.config import parse_address
from runtime.errors import ConfigError
from runtime.model_files.model_folder import check_model_folder
from runtime.observe.log import LogStyle
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity

_MAX_PROCESSES = 64


@dataclass(frozen=True)
class ClusterConfig:
    """Configuration of a local cluster.

    `worker_flags` go to every prefill and decode process, `router_flags` to the routers. The first
    router ("router") listens at `listen`, the others ("router-1", ...) on ports of their own. If
    `http` is given, a gateway there serves OpenAI's API in front of all routers.

    Without `one_core_each`, processes may use all cores. Workers on a GPU need that, because they
    compile kernels at startup and move bytes during computation. Otherwise the processes of a role
    in `cores` are pinned to one of its cores each, in turn, and the others as `core_places`
    decides.

    With `forks_workers`, prefill and decode processes are forks of a process that has loaded torch:
    of `fork_server`, which outlives the cluster, or of one that belongs to the cluster. Forks start
    faster, also after a failure.
    """

    model: Path
    prefill: int = 1
    decode: int = 1
    prefill_pp: int = 1
    decode_pp: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_dp_attention: int = 1
    decode_dp_attention: int = 1
    prefill_partition: str = ""
    decode_partition: str = ""
    routers: int = 1
    listen: str | None = None  # None: of the file, else DEFAULT_TARGET
    memory_mb: int | None = None  # cache of each worker; None: a share of the free memory
    max_context: int | None = None
    http: str = ""
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    config_file: Path | None = None
    one_core_each: bool = True
    cores: Mapping[str, Sequence[int]] = field(default_factory=dict)
    log_level: str = "info"
    log_style: LogStyle | None = (
        None  # None: of each role's table in the file, and text for the cluster's own lines
    )
    ready_timeout_s: float = 180.0
    stop_grace_s: float = 8.0
    forks_workers: bool = True
    fork_server: ForkServer | None = None
    places: ProcessPlaces = HERE
    security: ChannelSecurity = (
        PLAIN_CHANNEL  # shown to the cluster's own processes to query their health
    )

    @property
    def shapes(self) -> tuple[PoolShape, ...]:
        """Return the pools of each role."""
        given = (("--memory-mb", self.memory_mb), ("--max-context", self.max_context))
        words = (word for flag, value in given if value is not None for word in (flag, str(value)))
        flags = (*self.worker_flags, *words)
        return (
            PoolShape(
                "prefill",
                self.prefill,
                self.prefill_pp,
                self.prefill_partition,
                flags,
                self.prefill_tp,
                self.prefill_dp_attention,
            ),
            PoolShape(
                "decode",
                self.decode,
                self.decode_pp,
                self.decode_partition,
                flags,
                self.decode_tp,
                self.decode_dp_attention,
            ),
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
        return ("--model", str(self.model), "--log-level", self.log_level, *style, *file)

    def check(self) -> None:
        """Check the settings before any process starts.

        Raises:
            ConfigError: a setting is outside its limit; names both.
        """
        parse_address(self.listen or DEFAULT_TARGET, field="listen")
        for name in (
            "prefill",
            "decode",
            "prefill_pp",
            "decode_pp",
            "prefill_tp",
            "decode_tp",
            "routers",
        ):
            count: int = getattr(self, name)
            if not 1 <= count <= _MAX_PROCESSES:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be from 1 to {_MAX_PROCESSES}, got {count}",
                    field=name,
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


def demo_model() -> Path:
    """Return the checkpoint that is included in Baton."""
    return Path(str(resources.files("demo") / "model"))

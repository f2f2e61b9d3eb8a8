"""What a local cluster consists of, checked before any of it starts."""

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
    """What to start. `worker_flags` go to every prefill and decode process, `router_flags` to the
    routers, of which the first listens at `listen` ("router") and the others on ports of their own
    ("router-1", ...). At `http`, if given, a gateway before all routers serves OpenAI's API.
    Without `one_core_each` processes have all cores: those on a GPU compile kernels as they start,
    and move bytes beside it. Else those of a role in `cores` keep to one of these each, in turn,
    and the others to what `core_places` leaves them.

    With `forks_workers` prefill and decode processes are forks of one that has loaded torch: of
    `fork_server`, which stays, or of one of the cluster's own. They start faster, and so does one that
    replaces a dead one."""

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
    listen: str | None = None  # None: that of the file, else DEFAULT_TARGET
    memory_mb: int | None = None  # cache of each worker; None: a share of what is free
    max_context: int | None = None
    http: str = ""
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    config_file: Path | None = None
    one_core_each: bool = True
    cores: Mapping[str, Sequence[int]] = field(default_factory=dict)
    log_level: str = "info"
    log_style: LogStyle | None = (
        None  # None: that of each role's table in the file, and lines for people here
    )
    ready_timeout_s: float = 180.0
    stop_grace_s: float = 8.0
    forks_workers: bool = True
    fork_server: ForkServer | None = None
    places: ProcessPlaces = HERE
    security: ChannelSecurity = (
        PLAIN_CHANNEL  # what the cluster shows its own processes to ask for their health
    )

    @property
    def shapes(self) -> tuple[PoolShape, ...]:
        """The pools of each role."""
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
        """Of workers and routers alike."""
        file = () if self.config_file is None else ("--config", str(self.config_file))
        style = () if self.log_style is None else ("--log-style", self.log_style.value)
        return ("--model", str(self.model), "--log-level", self.log_level, *style, *file)

    def check(self) -> None:
        """Raises ConfigError naming the setting and its limit, before anything is started."""
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
                f"{count} processes are asked for, routers and the stages and ranks of all pools, and "
                f"the limit is {_MAX_PROCESSES}",
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
    """The checkpoint that ships with Baton."""
    return Path(str(resources.files("demo") / "model"))

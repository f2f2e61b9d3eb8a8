"""The processes of a local cluster: names, flags, addresses and cores, before any starts."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.client import DEFAULT_TARGET
from baton.cluster_config import ClusterConfig
from baton.core_places import core_places
from baton.memory_plan import memory_flags
from baton.preflight import (
    PROGRAMS,
    PoolShape,
    binding_flags,
    check_apart,
    check_port,
    check_tls,
    consecutive_ports,
    free_ports,
    listen_address,
    metrics_ports,
    roles_of,
    transport_text,
)
from baton.process import ProcessSpec
from baton.waiting import GATEWAY_MODULE
from runtime.config import Address, parse_address, read_tables

GATEWAY = "gateway"


@dataclass(frozen=True)
class _Pool:
    shape: PoolShape
    index: int

    def name(self, rank: int) -> str:
        """Return the name of the process of this rank; ranks count stage by stage."""
        return f"{self.shape.role}-{self.index}" + (f".{rank}" if self.shape.pool_size > 1 else "")

    @property
    def names(self) -> list[str]:
        return [self.name(rank) for rank in range(self.shape.pool_size)]


class ClusterPlan:
    """The specs of a cluster's processes.

    Their announcements are files of the folder that the methods are given.
    """

    def __init__(self, config: ClusterConfig) -> None:
        """Check the settings, and plan the processes.

        Raises:
            ConfigError: a setting is not possible, or a port is taken.
        """
        config.check()
        self._config = config
        tables = {} if config.config_file is None else read_tables(config.config_file)
        check_tls(
            tables,
            {"router": config.router_flags, **{shape.role: shape.flags for shape in config.shapes}},
            config.security,
        )
        self._listen = listen_address(config.listen, tables, DEFAULT_TARGET)
        check_port(parse_address(self._listen), flag="--listen")
        if config.http:
            http = parse_address(config.http, field="--http")
            check_port(http, flag="--http")
            check_apart(http, parse_address(self._listen))
        self.router_names = ["router", *(f"router-{index}" for index in range(1, config.routers))]
        self._pools = [
            _Pool(shape, index) for shape in config.shapes for index in range(shape.count)
        ]
        self._tables = tables
        self._memory_flags = memory_flags(config.shapes, tables, config.model)
        self._binding_flags = {shape.role: binding_flags(shape, tables) for shape in config.shapes}
        names = {"router": self.router_names, **{role: self._names(role) for role in PROGRAMS}}
        if config.http:
            names[GATEWAY] = [GATEWAY]
        self._metrics_ports = (
            consecutive_ports(config.metrics_port, names)
            if config.metrics_port
            else metrics_ports(tables, names)
        )
        adapters = config.adapter_names if config.http else ()
        # Chosen here, because a router must have the same ones after a restart; and all at once,
        # because the kernel may offer a port again as soon as its probe is closed.
        ports = iter(free_ports("127.0.0.1", len(adapters) * len(self.router_names)))
        self._adapter_listens = {
            name: [(adapter, str(Address("127.0.0.1", next(ports)))) for adapter in adapters]
            for name in self.router_names
        }
        roles = {name: role for role in PROGRAMS for name in self._names(role)}
        self._cores = core_places(
            roles | dict.fromkeys(self.router_names, "router"), _usable_cores(), config.cores
        )

    @property
    def num_processes(self) -> int:
        """Return the number of workers and routers."""
        return sum(len(pool.names) for pool in self._pools) + len(self.router_names)

    @property
    def transport_text(self) -> str:
        """Return a text that says on which devices UCX listens."""
        return transport_text(self._config.shapes, self._tables)

    def workers(self, folder: Path) -> Iterator[ProcessSpec]:
        """Yield the stages of all pools: first the leaders, which announce themselves."""
        for pool in self._pools:
            yield self._worker(folder, pool, 0)
        for pool in self._pools:
            for rank in range(1, pool.shape.pool_size):
                yield self._worker(folder, pool, rank)

    def routers(self, folder: Path) -> Iterator[ProcessSpec]:
        """Yield the routers, which find the pools by the announcements of their leaders."""
        flags = ["--vllm-engine"] if self._config.http else []
        flags += self._config.router_flags
        flags += [flag for alias in self._config.model_alias for flag in ("--model-alias", alias)]
        for pool in self._pools:
            for role in roles_of(pool.shape):
                flags += [f"--{role}", f"file://{_announcement(folder, pool.name(0))}"]
        for name in self.router_names:
            own = [
                flag
                for adapter, address in self._adapter_listens[name]
                for flag in ("--adapter-listen", f"{adapter}={address}")
            ]
            yield self._role_process(folder, name, "router", [*flags, *own], leads=True)

    def gateway(self, folder: Path, *, routers: Sequence[str]) -> ProcessSpec:
        """Return the gateway in front of routers at these addresses; it ends after them.

        By then it has no requests to wait for, and it does not log failed ones.
        """
        config = self._config
        level = "warning" if config.log_level == "info" else config.log_level
        of_adapters = (
            address for listens in self._adapter_listens.values() for _, address in listens
        )
        flags = [flag for address in (*routers, *of_adapters) for flag in ("--router", address)]
        flags += ["--drain-s", "1", "--log-level", level]
        flags += ["--config", str(config.config_file)] if config.config_file else []
        flags += ["--log-style", config.log_style.value] if config.log_style is not None else []
        name = config.model_name or config.model.resolve().name
        flags += [f"--flag=--model-alias={alias}={name}" for alias in config.model_alias]
        if config.http_keys:
            flags += ["--token-file", str(_written(folder / "api-keys", config.http_keys))]
        return ProcessSpec(
            GATEWAY,
            GATEWAY_MODULE,
            tuple(flags),
            config.http,
            None,
            _announcement(folder, GATEWAY),
            leads=True,
            metrics_port=self._metrics_ports[GATEWAY],
        )

    def _names(self, role: str) -> list[str]:
        return [name for pool in self._pools if pool.shape.role == role for name in pool.names]

    def _worker(self, folder: Path, pool: _Pool, rank: int) -> ProcessSpec:
        shape = pool.shape
        flags = [*shape.process_flags(rank), *self._memory_flags[shape.role]]
        if Address(self._config.places.host(pool.name(rank)), 0).is_loopback:
            flags += self._binding_flags[shape.role]
        flags += ["--leader", f"file://{_announcement(folder, pool.name(0))}"] if rank else []
        return self._role_process(folder, pool.name(rank), shape.role, flags, leads=rank == 0)

    def _role_process(
        self, folder: Path, name: str, role: str, flags: Sequence[str], *, leads: bool
    ) -> ProcessSpec:
        config = self._config
        return ProcessSpec(
            name,
            role,
            (*config.shared_flags, *flags),
            self._listen if name == "router" else f"{config.places.host(name)}:0",
            self._cores[name] if config.one_core_each else None,
            _announcement(folder, name),
            leads,
            self._metrics_ports[name],
        )


def _written(path: Path, keys: Sequence[str]) -> Path:
    """Write keys that only this user may read; return the path."""
    path.touch(mode=0o600)
    path.write_text("\n".join(keys))
    return path


def _announcement(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _usable_cores() -> list[int]:
    return (
        sorted(os.sched_getaffinity(0))
        if sys.platform == "linux"
        else list(range(os.cpu_count() or 1))
    )

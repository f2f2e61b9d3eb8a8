"""Checks before `baton up` starts a process: settings file, ports, partitions.

The processes check their own settings in full (`settings_check.py`). The checks here concern all
processes together.
"""

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runtime.config import Address, parse_address, read_tables
from runtime.errors import ConfigError
from runtime.model_files.config import read_config, text_fields
from runtime.security.access import ChannelSecurity

PROGRAMS = ("prefill", "decode", "worker")  # of the pools; a worker has both roles
BALANCED = "balanced"  # workers divide the layers themselves (`pool.stage.config`)


@dataclass(frozen=True)
class PoolShape:
    """Pools of one program: `role` is prefill, decode, or worker, which does both.

    Number of pools and of their stages, partition of the layers (`BALANCED`, "" for even), further
    flags of each process, number of ranks that share a stage, and of data ranks.
    """

    role: str
    count: int
    num_stages: int
    partition: str
    flags: tuple[str, ...]
    num_ranks: int = 1
    num_data_ranks: int = 1

    @property
    def pool_size(self) -> int:
        """Return the number of processes of one pool."""
        return self.num_stages * self.num_ranks

    @property
    def num_processes(self) -> int:
        return self.count * self.pool_size

    def process_flags(self, rank: int) -> list[str]:
        """Return the flags of one process of a pool, without those for memory and addresses."""
        flags = ["--rank", str(rank), "--world-size", str(self.pool_size), *self.flags]
        flags += ["--tp", str(self.num_ranks)] if self.num_ranks > 1 else []
        flags += ["--dp-attention", str(self.num_data_ranks)] if self.num_data_ranks > 1 else []
        return [*flags, "--partition", self.partition] if self.partition else flags


def roles_of(shape: PoolShape) -> tuple[str, ...]:
    """Return the roles that a router gives the pools of this shape."""
    return ("prefill", "decode") if shape.role == "worker" else (shape.role,)


def check_tls(
    tables: Mapping[str, Mapping[str, object]],
    flags: Mapping[str, Sequence[str]],
    security: ChannelSecurity,
) -> None:
    """Raise ConfigError if the TLS settings of the processes and of this command do not match.

    `tables` of the settings file and `flags` are by role; `security` is that of this command.
    """
    speaks = {role: _speaks_tls(role, tables, given) for role, given in flags.items()}
    with_tls, without = (
        [role for role in speaks if speaks[role] is wanted] for wanted in (True, False)
    )
    if with_tls and without:
        raise ConfigError(
            f"{without[0]}.tls_cert is missing: [{with_tls[0]}] has one, and either all roles "
            "use TLS or none",
            field=f"{without[0]}.tls_cert",
        )
    store = security.certificates
    if with_tls and (store is None or not store.has_own):
        missing = "--tls-ca" if store is None else "--tls-cert"
        raise ConfigError(
            f"{missing} is missing: the settings file enables TLS, and this command asks the "
            "processes whether they serve: pass --tls-ca, --tls-cert and --tls-key, of an "
            "operator or a client of their authority",
            field=missing,
        )
    if store is not None and not with_tls:
        raise ConfigError(
            "--tls-ca was given (or BATON_TLS_CA is set), and no role has tls_cert: remove it, "
            "or give the roles certificates in the file of --config",
            field="--tls-ca",
        )


def _speaks_tls(
    role: str, tables: Mapping[str, Mapping[str, object]], flags: Sequence[str]
) -> bool:
    if "--config" in flags:  # the role's own file, which it reads instead of the common one
        tables = read_tables(Path(flags[flags.index("--config") + 1]))
    return bool(tables.get(role, {}).get("tls_cert")) or "--tls-cert" in flags


def check_partition(shape: PoolShape, model: Path) -> None:
    """Check the partition of a role against the model.

    Raises:
        ConfigError: a stage without a positive count, a sum other than the model's number of
            layers, or no such number in config.json.
    """
    if not shape.partition:
        return
    flag = f"--{shape.role}-partition {shape.partition}"
    if shape.partition == BALANCED:
        if shape.num_stages == 1:
            raise ConfigError(
                f"{flag} is for several stages, and --{shape.role}-pp is 1", field="partition"
            )
        return
    counts = [part.strip() for part in shape.partition.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in counts):
        raise ConfigError(
            f'{flag} must be numbers of layers, at least 1 each, like "3,5", or {BALANCED}',
            field="partition",
        )
    if len(counts) != shape.num_stages:
        raise ConfigError(
            f"{flag} is for {counted(len(counts), 'stage')}, and --{shape.role}-pp is "
            f"{shape.num_stages}",
            field="partition",
        )
    num_layers = text_fields(read_config(model)).get("num_hidden_layers")
    if isinstance(num_layers, int) and sum(map(int, counts)) != num_layers:
        raise ConfigError(
            f"{flag} sums to {sum(map(int, counts))}, the model has {counted(num_layers, 'layer')}",
            field="partition",
        )


def free_ports(host: str, count: int) -> list[int]:
    """Return different ports of a host that are free now; raise OSError if there are none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as probes:
        opened = [
            probes.enter_context(socket.create_server((host, 0), family=family))
            for _ in range(count)
        ]
        return [int(probe.getsockname()[1]) for probe in opened]


def check_port(address: Address, *, flag: str) -> None:
    """Raise ConfigError if no process can listen there.

    Another process may listen already, or the address is not of this machine. Port 0 is always
    free.
    """
    if not address.port:
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
            probe.listen(1)
    except socket.gaierror as error:
        raise ConfigError(f"{flag} {address}: {error.strerror}", field=flag.strip("-")) from None
    except OSError as error:
        advice = (
            "; is another cluster running? Use another port, or 0 for any"
            if error.errno == errno.EADDRINUSE
            else ""
        )
        raise ConfigError(
            f"{flag} {address}: {os.strerror(error.errno or 0)}{advice}", field=flag.strip("-")
        ) from None


def check_apart(http: Address, listen: Address) -> None:
    """Raise ConfigError if --http has the address of --listen."""
    hosts = {
        "127.0.0.1" if address.host == "localhost" else address.host for address in (http, listen)
    }
    if http.port and http.port == listen.port and (len(hosts) == 1 or hosts & {"0.0.0.0", "::"}):
        raise ConfigError(
            f"--http {http}: the router listens there (--listen {listen}); use another port, or "
            "0 for any",
            field="http",
        )


def port_of(table: Mapping[str, object], name: str, *, section: str) -> int | None:
    """Return a port of the file, None if it names none, or raise ConfigError."""
    value = table.get(name)
    if value is None or (
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 65535
    ):
        return value
    raise ConfigError(
        f"{section}.{name}: must be a port from 0 to 65535, got {value!r}", field=name
    )


def metrics_ports(
    tables: Mapping[str, Mapping[str, object]], names: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return the metrics port by process, 0 for any.

    The port in the file is that of the role's first process; the others count up from it. `names`
    holds the processes of each role.

    Raises:
        ConfigError: two processes would get the same port, or another process uses it.
    """
    ports: dict[str, int] = {}
    for role, processes in names.items():
        first = port_of(tables.get(role, {}), "metrics_port", section=role) or 0
        for index, name in enumerate(processes):
            ports[name] = port = first + index if first else 0
            other = next(
                (
                    known
                    for known, taken in ports.items()
                    if port and taken == port and known != name
                ),
                None,
            )
            if port > 65535 or other is not None:
                why = f"{other} uses it" if other is not None else "there is no such port"
                raise ConfigError(
                    f"{role}.metrics_port {first}: {name} would take {port}, and {why} (the processes of "
                    f"a role count up from it)",
                    field="metrics_port",
                )
            check_port(
                Address(str(tables.get(role, {}).get("metrics_host", "127.0.0.1")), port),
                flag=f"{role}.metrics_port",
            )
    return ports


def consecutive_ports(first: int, names: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the metrics port by process, counted up from `first` in the order of `names`.

    Raises:
        ConfigError: a port is taken, or there is no such port.
    """
    processes = [name for group in names.values() for name in group]
    ports = {name: first + index for index, name in enumerate(processes)}
    for name, port in ports.items():
        if port > 65535:
            raise ConfigError(
                f"--metrics-port {first}: {name} would take {port}, and there is no such port",
                field="metrics_port",
            )
        check_port(Address("127.0.0.1", port), flag="--metrics-port")
    return ports


def setting(shape: PoolShape, tables: Mapping[str, Mapping[str, object]], name: str) -> str:
    """Return the value of the flags or the file; empty if neither sets it."""
    flag = f"--{name.replace('_', '-')}"
    if flag in shape.flags:
        return shape.flags[shape.flags.index(flag) + 1]
    return str(tables.get(shape.role, {}).get(name) or "")


def binding_flags(shape: PoolShape, tables: Mapping[str, Mapping[str, object]]) -> tuple[str, ...]:
    """Return the flags that bind UCX to this machine, as gRPC is.

    None if flags, file or environment name the network devices.
    """
    if setting(shape, tables, "transport_interface") or "UCX_NET_DEVICES" in os.environ:
        return ()
    return ("--transport-interface", _loopback_device())


def transport_text(shapes: Sequence[PoolShape], tables: Mapping[str, Mapping[str, object]]) -> str:
    """Return a line that says where UCX listens."""
    chosen = {
        shape.role: setting(shape, tables, "transport_interface")
        or os.environ.get("UCX_NET_DEVICES", "")
        for shape in shapes
    }
    open_to_others = {
        role: devices
        for role, devices in chosen.items()
        if devices and devices != _loopback_device()
    }
    if not open_to_others:
        return "UCX listens on loopback alone (--transport-interface)"
    where = ", ".join(f"{devices} ({role})" for role, devices in open_to_others.items())
    return f"UCX listens on {where}: allow only the workers to reach its ports (docs/security.md)"


def _loopback_device() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def listen_address(
    flag: str | None, tables: Mapping[str, Mapping[str, object]], default: str
) -> str:
    """Return the address of the router: of the flag, else of the file, else the default.

    Raises:
        ConfigError: not an address.
    """
    listen = flag or str(tables.get("router", {}).get("listen") or default)
    return str(parse_address(listen, field="--listen" if flag else "router.listen"))


def counted(number: int, noun: str) -> str:
    """Return the number with the noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

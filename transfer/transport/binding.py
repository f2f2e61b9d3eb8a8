"""Network devices and TCP ports on which a transport listens, checked before it gets them.

If every port of its range is in use, UCX searches forever. An unknown device appears only as "no
transport". So both are checked first, and rejected with the name of the setting.
"""

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from runtime.errors import ConfigError

RDMA_DEVICES = Path("/sys/class/infiniband")
NETWORK_DEVICES = Path("/sys/class/net")
# see netdevice(7)
_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
_SIOCGIFADDR = 0x8915
_MAX_NAME = 15
INTERFACE_FIELD = "transport_interface"
PORTS_FIELD = "transport_ports"


@dataclass(frozen=True)
class NetworkBinding:
    """Restriction of a transport to devices and ports.

    `devices` are names, RDMA ones with their port ("mlx5_0:1"); empty allows all. `ports` are the
    first and the last; None allows any.
    """

    devices: tuple[str, ...] = ()
    ports: tuple[int, int] | None = None

    @classmethod
    def parse(cls, interface: str, ports: str) -> Self:
        """Parse "eth0" or "mlx5_0:1,eth0", and "7300-7363"; empty sets no restriction.

        Raises ConfigError.
        """
        devices = tuple(name.strip() for name in interface.split(",")) if interface else ()
        if not all(devices):
            raise ConfigError(
                f"{INTERFACE_FIELD} must be names separated by commas, got {interface!r}",
                field=INTERFACE_FIELD,
            )
        return cls(devices, parse_ports(ports) if ports else None)

    def places(self) -> "tuple[ListeningPlace, ...]":
        """Return the network devices on which the transport listens; without a setting, all that are up."""
        names = [name.partition(":")[0] for name in self.devices] or [
            name for _, name in socket.if_nameindex() if _flags(name) & _IFF_UP
        ]
        return tuple(
            ListeningPlace(name, _address(name), bool(_flags(name) & _IFF_LOOPBACK))
            for name in names
        )

    def check(self) -> None:
        """Raise ConfigError if a device does not exist here or no port of the range is free."""
        present = {name for _, name in socket.if_nameindex()}
        with contextlib.suppress(OSError):
            present.update(os.listdir(RDMA_DEVICES))
        for device in self.devices:
            if device.partition(":")[0] not in present:
                raise ConfigError(
                    f"{INTERFACE_FIELD}: there is no network device {device!r} here, only "
                    f"{', '.join(sorted(present))}",
                    field=INTERFACE_FIELD,
                )
        if self.ports is not None and not any(
            map(_is_free, range(self.ports[0], self.ports[1] + 1))
        ):
            raise no_free_port(self.ports)


ANYWHERE = NetworkBinding()


@dataclass(frozen=True)
class ListeningPlace:
    """Network device with its IPv4 address, or "" if it has none."""

    device: str
    address: str
    is_loopback: bool

    def __str__(self) -> str:
        return f"{self.device} ({self.address})" if self.address else self.device


def loopback_device() -> str:
    """Return the name of the loopback device."""
    return next((name for _, name in socket.if_nameindex() if _flags(name) & _IFF_LOOPBACK), "lo")


def _flags(device: str) -> int:
    """Return the flags of a network device in Linux, or 0 for any other name."""
    try:
        return int((NETWORK_DEVICES / device / "flags").read_text(), 16)
    except (OSError, ValueError):
        return 0


def _address(device: str) -> str:
    request = struct.pack("256s", device[:_MAX_NAME].encode())
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            return socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return ""


def parse_ports(text: str) -> tuple[int, int]:
    """Parse "LOW-HIGH", both inclusive. Raises ConfigError naming the setting and its limits."""
    low, dash, high = text.partition("-")
    if dash and low.isascii() and low.isdigit() and high.isascii() and high.isdigit():
        first = int(low)
        last = int(high)
        if 1 <= first <= last <= 65535:
            return first, last
    raise ConfigError(
        f"{PORTS_FIELD} must be LOW-HIGH with 1 <= LOW <= HIGH <= 65535, got {text!r}",
        field=PORTS_FIELD,
    )


def no_free_port(ports: tuple[int, int]) -> ConfigError:
    return ConfigError(
        f"{PORTS_FIELD}: no port of {ports[0]}-{ports[1]} is free (a port that had connections stays in use for "
        f"a minute); every process needs one port, or two in a pool with several stages",
        field=PORTS_FIELD,
    )


def _is_free(port: int) -> bool:
    """Return whether a port is free.

    It binds as UCX does: without SO_REUSEADDR, so a port with closing connections is in use.
    """
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True

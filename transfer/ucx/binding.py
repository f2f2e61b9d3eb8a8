"""Where UCX listens: on which network devices and in which TCP ports. Checked before UCX gets it.

UCX does not end its search when every port of its range is taken, it searches on for ever; and an unknown device only
shows as "no transport". So both are looked at first, and refused with the setting's name.
"""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from runtime.errors import ConfigError

RDMA_DEVICES = Path("/sys/class/infiniband")
INTERFACE_FIELD, PORTS_FIELD = "transport_interface", "transport_ports"


@dataclass(frozen=True)
class UcxBinding:
    """`devices` by name, RDMA ones with their port ("mlx5_0:1"); none: all. `ports`: first and last; None: any."""

    devices: tuple[str, ...] = ()
    ports: tuple[int, int] | None = None

    @classmethod
    def parse(cls, interface: str, ports: str) -> Self:
        """From "eth0" or "mlx5_0:1,eth0", and "7300-7363"; empty: no restriction. Raises ConfigError."""
        devices = tuple(name.strip() for name in interface.split(",")) if interface else ()
        if not all(devices):
            raise ConfigError(f"{INTERFACE_FIELD} must be names separated by commas, got {interface!r}",
                              field=INTERFACE_FIELD)
        return cls(devices, parse_ports(ports) if ports else None)

    @property
    def options(self) -> dict[str, str]:
        """UCX options by name without the UCX_ prefix; they beat the environment."""
        options = {"NET_DEVICES": ",".join(self.devices)} if self.devices else {}
        return options if self.ports is None else {**options, "TCP_PORT_RANGE": "{}-{}".format(*self.ports)}

    def check(self) -> None:
        """Raises ConfigError when a device does not exist here, or no port of the range is free."""
        present = {name for _, name in socket.if_nameindex()}
        with contextlib.suppress(OSError):
            present.update(os.listdir(RDMA_DEVICES))
        for device in self.devices:
            if device.partition(":")[0] not in present:
                raise ConfigError(f"{INTERFACE_FIELD}: there is no network device {device!r} here, only "
                                  f"{', '.join(sorted(present))}", field=INTERFACE_FIELD)
        if self.ports is not None and not any(map(_is_free, range(self.ports[0], self.ports[1] + 1))):
            raise no_free_port(self.ports)


ANYWHERE = UcxBinding()


def parse_ports(text: str) -> tuple[int, int]:
    """"LOW-HIGH", both included. Raises ConfigError naming the setting and its limits."""
    low, dash, high = text.partition("-")
    if dash and low.isascii() and low.isdigit() and high.isascii() and high.isdigit():
        first, last = int(low), int(high)
        if 1 <= first <= last <= 65535:
            return first, last
    raise ConfigError(f"{PORTS_FIELD} must be LOW-HIGH with 1 <= LOW <= HIGH <= 65535, got {text!r}", field=PORTS_FIELD)


def no_free_port(ports: tuple[int, int]) -> ConfigError:
    return ConfigError(f"{PORTS_FIELD}: no port of {ports[0]}-{ports[1]} is free (one that had connections is not for "
                       f"a minute); every process needs one, of a pool with several stages two", field=PORTS_FIELD)


def _is_free(port: int) -> bool:
    """As UCX binds: without SO_REUSEADDR, so a port with old connections still closing is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True

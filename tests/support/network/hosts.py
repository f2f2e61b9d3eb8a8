"""Hosts that can be cut off from each other: a network namespace each, all on one bridge.

    become_private()                               # or raises: a user namespace, in which this process may do all that
    with Network(("router", "prefill-0")) as network:
        network.host("prefill-0")                  # "10.77.0.3"
        network.cut("router", "prefill-0")         # packets that way are lost, without an error at either end
        network.mend()

What is lost goes, as the neighbor table of the sending host then says, to an Ethernet address that
no host has. Only `ip` (iproute2) and `unshare` (util-linux) are needed, and neither root nor a
firewall.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from runtime.errors import ConfigError

HUB = "10.77.0.1"
NOBODY = "02:00:00:00:00:99"
NAMESPACES = Path("/run/netns")
BRIDGE = "baton0"
_PRIVATE = "BATON_PRIVATE_NETWORK"
_CLONE_NEWNET, _CLONE_NEWNS, _MNT_DETACH = 0x40000000, 0x00020000, 2
_COMMAND_S = 30.0
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")


def is_private() -> bool:
    """Return whether the network namespace has only this process and its children."""
    return _PRIVATE in os.environ


def become_private(module: str) -> None:
    """Run `module` of the same command line again in private namespaces that end with it. Does not
    return.

    Raises:
        ConfigError: this machine does not allow it; the message says what is missing.
    """
    _try([*_UNSHARE, "ip", "link", "add", BRIDGE, "type", "bridge"])
    _try(
        [
            *_UNSHARE,
            "sh",
            "-c",
            "mount -t tmpfs none /run && ip netns add try && ip netns exec try true",
        ]
    )
    rerun_private(module)


def rerun_private(module: str) -> NoReturn:
    """Run `module` likewise without hosts in their own namespaces. Raises ConfigError."""
    _try([*_UNSHARE, "sh", "-c", "ip link set lo up && mount --bind /etc/hosts /etc/resolv.conf"])
    os.environ[_PRIVATE] = "1"
    os.execvp(_UNSHARE[0], [*_UNSHARE, sys.executable, "-m", module, *sys.argv[1:]])


def enter(name: str) -> None:
    """Move this process to the host: its interfaces, also as /sys shows them. Call before the first
    thread starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(NAMESPACES / name, os.O_RDONLY)
    _checked(libc.setns(handle, _CLONE_NEWNET), "setns")
    os.close(handle)
    _checked(libc.unshare(_CLONE_NEWNS), "unshare")
    libc.umount2(b"/sys", _MNT_DETACH)  # if not allowed, the new one is mounted on top
    _checked(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")


class Network:
    """Use as a context manager, in a private network."""

    def __init__(self, names: Sequence[str]) -> None:
        self._hosts = {name: f"10.77.0.{number}" for number, name in enumerate(names, 2)}
        self._cuts: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True, timeout=_COMMAND_S)
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{HUB}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for name, address in self._hosts.items():
            port = f"port{address.rpartition('.')[2]}"
            _ip("netns", "add", name)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", port, "master", BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Rely on the kernel: namespaces end with the last process in them."""

    def host(self, name: str) -> str:
        return self._hosts[name]

    def cut(self, source: str, destination: str) -> None:
        """Drop packets from `source` to `destination`. The other direction is another cut."""
        _ip(
            "-n",
            source,
            "neigh",
            "replace",
            self._hosts[destination],
            "lladdr",
            NOBODY,
            "dev",
            "eth0",
            "nud",
            "permanent",
        )
        self._cuts.append((source, destination))

    def mend(self) -> None:
        """Remove all cuts."""
        while self._cuts:
            source, destination = self._cuts.pop()
            _ip("-n", source, "neigh", "del", self._hosts[destination], "dev", "eth0")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=_COMMAND_S)


def _try(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} is not installed") from None
    if done.returncode != 0:
        raise ConfigError(
            f"no network of its own: {' '.join((done.stderr or done.stdout).split())}"
        )


def _checked(code: int, what: str) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), what)

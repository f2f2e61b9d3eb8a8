"""The rendezvous of link ends: a key-value store of torch.distributed, served by stage 0."""

import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from engine.pipeline.c10d import PrefixStore, Store, TCPStore
from runtime.errors import ConfigError

_BACKLOG = 128
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Rendezvous:
    """The address of the store, as a stage reaches it.

    The token keeps out stages that expect another store at this address. Neither the token nor the
    name of a room protects the store: a process that reaches it can list and change its contents.
    Only the stages of the pool may be able to reach it.
    """

    host: str
    port: int
    token: str

    def enter(self, room: str, timeout_s: float) -> Store:
        """Return a store for this room only, over its own connection.

        Its waits are limited to `timeout_s`.

        Raises:
            RuntimeError: no process serves the store.
        """
        store = TCPStore(
            self.host,
            self.port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        return PrefixStore(f"{self.token}/{room}", store)


class RendezvousHost:
    """A server of the store, which stops when the object is deleted.

    `place` is the address for its own process.
    """

    def __init__(self, host: str, ports: tuple[int, int] | None = None) -> None:
        """Listen on `host`, in any free port or the first free one of the range `ports`.

        `host` may be 0.0.0.0 or :: for all addresses.

        Raises:
            ConfigError: no port of the range is free, or `host` is no address of this machine.
        """
        listening = _listen(host, ports)
        reached = _LOOPBACK.get(host, host)
        self.place = Rendezvous(reached, int(listening.getsockname()[1]), secrets.token_hex(8))
        self._store = TCPStore(
            reached,
            self.place.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def _listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in [0] if ports is None else range(ports[0], ports[1] + 1):
        listening = socket.socket(family)
        with suppress(OSError):
            listening.bind((host, port))
            listening.listen(_BACKLOG)
            return listening
        listening.close()
    where = "any port" if ports is None else "a port of {}-{}".format(*ports)
    raise ConfigError(
        f"transport_ports: the stages cannot meet on {where} of {host}", field="transport_ports"
    )

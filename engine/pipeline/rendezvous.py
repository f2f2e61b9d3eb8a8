"""Where the two ends of a link find each other: a key-value store of torch.distributed, served by
stage 0."""

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
    """As a stage reaches it. The token keeps out stages that were given another store at the same
    address. Neither it nor the name of a room protects anything: a process that reaches the store
    can list and change what is in it. Only the stages of the pool may be able to reach it."""

    host: str
    port: int
    token: str

    def enter(self, room: str, timeout_s: float) -> Store:
        """A store for this room alone, over a connection of its own; its waits take no longer than
        that. Raises RuntimeError when no process serves it."""
        store = TCPStore(
            self.host,
            self.port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        return PrefixStore(f"{self.token}/{room}", store)


class RendezvousHost:
    """Serves the store for as long as it lives. `place` is how its own process reaches it."""

    def __init__(self, host: str, ports: tuple[int, int] | None = None) -> None:
        """Listens on `host` (0.0.0.0 or ::, everywhere), in any free port or the first free one of
        the range `ports`.

        Raises:
            ConfigError: no port of the range is free, or the host is not this machine's.
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

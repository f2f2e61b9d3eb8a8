"""Discovery of workers. A target names one worker, or a place that lists several:

    10.0.0.7:7000                       this address
    dns:///prefill.baton:7000           every address of the name, resolved again at an interval
    k8s:///baton/prefill:grpc           ready endpoints of a Kubernetes service, watched; port by
    name or number
    k8s:///prefill:grpc                 the same in the router's own namespace
    file:///run/prefill-0.json          the worker that announces itself in this file
    (`--announce`), once it does

A source only lists addresses; a worker's own reports decide whether it is usable. A source that
fails therefore keeps its last addresses, and never removes a worker without evidence.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from prometheus_client import Counter
from pydantic import AfterValidator

from runtime.clock import Deadline, LoopClock
from runtime.config import Address, accepted_by, parse_peer
from runtime.errors import ConfigError
from runtime.process.announce import announced_address, announcement_path

logger = logging.getLogger(__name__)

DNS = "dns:///"
KUBERNETES = "k8s:///"

OnTargets = Callable[[frozenset[str]], None]
Resolve = Callable[[str, int], Awaitable[list[str]]]

# Error codes for a name without addresses; other codes mean that the lookup itself failed.
_NO_SUCH_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


@dataclass(frozen=True)
class ServiceTarget:
    """A Kubernetes service. `namespace` is empty for the router's own; `port` is a name or a
    number.
    """

    namespace: str
    service: str
    port: str


@dataclass(frozen=True)
class DiscoveryOptions:
    """Options of discovery.

    `interval_s` is the pause between two DNS lookups. The Kubernetes API is the pod's own cluster
    unless `kubernetes_api` names another. `service_account` is the folder with token, ca.crt and
    namespace.
    """

    interval_s: float = 2.0
    kubernetes_api: str = ""
    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Source(Protocol):
    """Addresses of one target."""

    async def run(self, found: OnTargets) -> None:
        """Call `found` with all addresses at first and at every change, until cancelled."""
        ...


def parse_target(text: str, *, field: str = "target") -> Address | ServiceTarget | Path:
    """Parse a target; the address of a dns target holds a name.

    Raises:
        ConfigError: the target is malformed; the error names `field`.
    """
    if (file := announcement_path(text)) is not None:
        return file
    if text.startswith(DNS):
        try:
            return parse_peer(text.removeprefix(DNS), field=field)
        except ConfigError:
            raise ConfigError(
                f"{field} must be {DNS}NAME:PORT, got {text!r}", field=field
            ) from None
    if not text.startswith(KUBERNETES):
        return parse_peer(text, field=field)
    path, _, port = text.removeprefix(KUBERNETES).rpartition(":")
    namespace, _, service = path.rpartition("/")
    if not service or not port or "/" in namespace:
        raise ConfigError(
            f"{field} must be k8s:///[NAMESPACE/]SERVICE:PORT, got {text!r}", field=field
        )
    return ServiceTarget(namespace, service, port)


TargetField = Annotated[str, AfterValidator(accepted_by(parse_target))]


@dataclass(frozen=True)
class StaticSource:
    """A single fixed address."""

    address: str

    async def run(self, found: OnTargets) -> None:
        found(frozenset({self.address}))


@dataclass(frozen=True)
class FileSource:
    """The address that a process on this machine announces in a file. The process keeps it when it
    restarts.
    """

    path: Path

    async def run(self, found: OnTargets) -> None:
        found(frozenset({await announced_address(self.path)}))


async def resolve(name: str, port: int) -> list[str]:
    """Return every address of a name, as HOST:PORT.

    Raises:
        OSError: the lookup failed or found no address.
    """
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(Address(str(answer[4][0]), port)) for answer in answers]


@dataclass(frozen=True)
class DnsSource:
    """The addresses of a name, such as a headless service's.

    A failed lookup changes nothing. A name without any address changes nothing for `keep_s`: a name
    server that has just started has no names, while a worker that is gone shows that by its
    silence.
    """

    name: Address
    interval_s: float
    errors: Counter
    resolve: Resolve = resolve
    keep_s: float = 30.0

    async def run(self, found: OnTargets) -> None:
        known: frozenset[str] | None = None
        clock = LoopClock()
        deadline: Deadline | None = None  # to have addresses again
        while True:
            addresses = await self._look()
            if addresses or not known:
                deadline = None
            elif addresses is not None and deadline is None:
                deadline = Deadline.after(clock, self.keep_s)
                logger.warning(
                    "%s has no addresses any more, keeping the last ones for %g s",
                    self.name.host,
                    self.keep_s,
                )
            is_kept = deadline is not None and not deadline.is_over
            if addresses is not None and addresses != known and not is_kept:
                known = addresses
                found(addresses)
            await asyncio.sleep(self.interval_s)

    async def _look(self) -> frozenset[str] | None:
        """Return the addresses, or None if the lookup failed."""
        try:
            return frozenset(await self.resolve(self.name.host, self.name.port))
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                return frozenset()
            self._failed(error)
        except OSError as error:
            self._failed(error)
        return None

    def _failed(self, error: OSError) -> None:
        self.errors.labels("dns").inc()
        logger.warning("cannot resolve %s, keeping its last addresses: %s", self.name.host, error)

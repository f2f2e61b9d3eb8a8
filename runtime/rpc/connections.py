"""Limits on a server's connections by peer, and on the file descriptors that they use.

gRPC limits the total number of connections only, so one peer that opens all of them would lock out
all others. Here gRPC gets a higher limit, and a `ConnectionWatch` closes the excess connections of
the peer with the most:

    limits = ConnectionLimits.within(max_connections, raised_file_limit())      gRPC gets limits.accepted
    watch = ConnectionWatch(limits); watch.start({7000}); ...; watch.stop()

A peer is an IPv4 address, or the /64 network of an IPv6 address.
"""

import heapq
import logging
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from runtime.process.sockets import open_sockets
from runtime.security.access import network_of

logger = logging.getLogger(__name__)

# Descriptors for workers, stages, grammar processes, /metrics, health, transports and files.
RESERVED_FILES = 512
MAX_MARGIN = 1024  # connections beyond the limit that may arrive between two checks
LOOK_S = 0.5
BUSY_LOOK_S = 0.05
LOG_S = 60.0  # interval between two log lines about the same server


def raised_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # The kernel may allow less if the hard limit is infinite.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def files_for(max_connections: int) -> int:
    """Return the limit of open files that this number of connections needs."""
    return RESERVED_FILES + _accepted(max_connections)


def _accepted(max_connections: int) -> int:
    return max_connections + min(max_connections, MAX_MARGIN)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections: `kept` in total and `per_peer`.

    gRPC accepts up to `accepted` connections; the excess is closed.
    """

    kept: int
    accepted: int
    per_peer: int

    @classmethod
    def within(cls, max_connections: int, file_limit: int) -> Self:
        """Return the limits for the requested number of connections.

        They leave `RESERVED_FILES` descriptors free, but connections get at least a quarter.
        """
        available = max(file_limit - RESERVED_FILES, file_limit // 4)
        accepted = min(_accepted(max_connections), available)
        kept = max(1, min(max_connections, accepted * 3 // 4))
        return cls(kept, accepted, max(kept // 2, min(kept, 64)))


@dataclass
class _Connection:
    """Open connection. `is_closing`: it was shut down, and gRPC has not released it yet."""

    fd: int
    peer: bytes
    is_closing: bool = False


class ConnectionWatch:
    """Thread that checks this process's sockets, more often if there are many."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._ports: frozenset[int] = frozenset()
        self._connections: dict[int, _Connection] = {}  # by inode, in order of discovery
        self._others: set[int] = set()  # inodes of other sockets
        self._num_closed = 0
        self._logged_s = -LOG_S
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, ports: Iterable[int]) -> None:
        """Start to watch the connections to these ports of this process."""
        self._ports = frozenset(ports)
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        pause_s = LOOK_S
        while not self._is_over.wait(pause_s):
            is_busy = self.look(pause_s / 2) or len(self._connections) > self._limits.kept // 2
            pause_s = BUSY_LOOK_S if is_busy else LOOK_S

    def look(self, max_age_s: float = 0.0) -> int:
        """Close the excess connections and return their number.

        The list of sockets may be `max_age_s` seconds old.
        """
        self._find(max_age_s)
        excess = _excess(
            [
                (inode, each.peer)
                for inode, each in self._connections.items()
                if not each.is_closing
            ],
            self._limits,
        )
        for inode in excess:
            connection = self._connections[inode]
            connection.is_closing = True
            _shut_down(connection.fd, inode)
        self._num_closed += len(excess)
        if excess and time.monotonic() - self._logged_s >= LOG_S:
            logger.warning(
                "closing connections of the peer with the most",
                extra={
                    "peer": _shown(self._connections[excess[0]].peer),
                    "closed": self._num_closed,
                    "limit": self._limits.kept,
                },
            )
            self._logged_s = time.monotonic()
            self._num_closed = 0
        return len(excess)

    def _find(self, max_age_s: float) -> None:
        """Update the table of open connections."""
        known = self._connections
        self._connections = {}
        others = self._others
        self._others = set()
        found: dict[int, _Connection] = {}
        for fd, inode in open_sockets(max_age_s).items():
            if inode in known:
                known[inode].fd = fd
                found[inode] = known[inode]
            elif inode in others or (seen := self._seen(fd)) is None:
                self._others.add(inode)
            else:
                found[inode] = seen
        for inode in (
            *(old for old in known if old in found),
            *sorted(found.keys() - known.keys()),
        ):
            self._connections[inode] = found[inode]

    def _seen(self, fd: int) -> _Connection | None:
        """Return the connection of a descriptor, or None if it is not one to a watched port."""
        try:
            seen = socket.socket(fileno=fd)
        except OSError:
            return None
        try:
            port = seen.getsockname()[1] if seen.family in (socket.AF_INET, socket.AF_INET6) else 0
            return (
                _Connection(fd, network_of(seen.getpeername()[0])) if port in self._ports else None
            )
        except OSError:
            return None  # a listening socket, or already closed
        finally:
            seen.detach()  # gRPC owns it


def _excess(open_ones: Sequence[tuple[int, bytes]], limits: ConnectionLimits) -> list[int]:
    """Return the inodes of the excess connections: the newest ones of the peer with the most.

    `open_ones` has inodes and peers, the oldest first.
    """
    counts = Counter(peer for _, peer in open_ones)
    most = [(-count, peer) for peer, count in counts.items()]
    heapq.heapify(most)
    too_many: Counter[bytes] = Counter()
    total = len(open_ones)
    while most and (total > limits.kept or -most[0][0] > limits.per_peer):
        count, peer = most[0]
        heapq.heapreplace(most, (count + 1, peer))
        too_many[peer] += 1
        total -= 1
    excess = []
    for inode, peer in reversed(open_ones):
        if too_many[peer]:
            too_many[peer] -= 1
            excess.append(inode)
    return excess


def _shown(peer: bytes) -> str:
    if len(peer) == 4:
        return socket.inet_ntop(socket.AF_INET, peer)
    return socket.inet_ntop(socket.AF_INET6, peer + bytes(8)) + "/64"


def _shut_down(fd: int, inode: int) -> None:
    """Shut down the connection, which makes gRPC close it.

    Does nothing if the descriptor was reused for another socket.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as held:
        if os.fstat(held.fileno()).st_ino == inode:
            held.shutdown(socket.SHUT_RDWR)

"""Limit of TCP retransmission on the connections of one UCX worker.

UCX has no setting for it, and connections that a peer opened have no handle to close them by. A
receive from an unreachable peer would hold its memory for the quarter of an hour in which the
kernel retransmits.

Use it only for workers that are progressed at all times: a worker that does not read for longer
than the limit loses its connections too.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from runtime.process.sockets import open_sockets

UNACKNOWLEDGED_S = 5.0
# maximum age of the list in which new connections are found
LISTED_S = 1.0


class SocketLimits:
    """Limits of a worker's sockets (`TCP_USER_TIMEOUT`, see tcp(7)). Linux only.

    Data or a connect that is not acknowledged within `UNACKNOWLEDGED_S` fails the connection.

        with limits.listening(): ...     # the worker opens its ports
        with limits.connecting(): ...    # it connects
        limits.apply()                   # regularly, for connections that peers have opened
    """

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._seen: Mapping[int, int] = {}  # descriptor to inode

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the ports that are opened in the block as the worker's."""
        before = open_sockets()
        yield
        for descriptor in _new(before, open_sockets()):
            with suppress(OSError), _tcp(descriptor) as found:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._ports.add(found.getsockname()[1])

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Limit the connections that are opened in the block.

        A connection of another thread may be among them, which is rare and harmless. Raises OSError
        without a free descriptor.
        """
        before = open_sockets()
        yield
        for descriptor in _new(before, open_sockets()):
            with suppress(OSError), _tcp(descriptor) as found:
                _limit(found)

    def apply(self) -> None:
        """Limit the connections that arrived at the worker's ports since the last call.

        Without a free descriptor for the check, the next call finds them.
        """
        try:
            found = open_sockets(LISTED_S)
        except OSError:
            return
        for descriptor in _new(self._seen, found):
            with suppress(OSError), _tcp(descriptor) as accepted:
                if accepted.getsockname()[1] in self._ports:
                    _limit(accepted)
        self._seen = found


def _new(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    return [descriptor for descriptor, inode in after.items() if before.get(descriptor) != inode]


@contextmanager
def _tcp(descriptor: int) -> Iterator[socket.socket]:
    """Yield a second handle of a TCP socket.

    Raises OSError if it was closed meanwhile or is not a TCP socket.
    """
    copy = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with found:
        if (
            found.family not in (socket.AF_INET, socket.AF_INET6)
            or found.type != socket.SOCK_STREAM
        ):
            raise OSError("not TCP")
        yield found


def _limit(found: socket.socket) -> None:
    if not found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNACKNOWLEDGED_S * 1e3))

"""A limit for how long TCP may try in vain, on the connections of one UCX worker.

UCX has no setting for it, and its connections that a peer opens have no handle that could be
closed: a receive whose peer cannot be reached any more would hold its memory for the quarter of an
hour that the kernel sends again.

For workers only that are progressed at all times: who does not read for longer than the limit is
given up, too.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

UNACKNOWLEDGED_S = 5.0
_FOLDER = "/proc/self/fd"


class SocketLimits:
    """What is not acknowledged, or not connected, for `UNACKNOWLEDGED_S` has failed
    (`TCP_USER_TIMEOUT`, see tcp(7)). Linux only.

        with limits.listening(): ...     # the worker opens its ports
        with limits.connecting(): ...    # it connects
        limits.apply()                   # now and then, for those that others have opened
    """

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._seen: dict[int, str] = {}  # descriptors, and which sockets they were

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Ports that are opened in the block are the worker's."""
        before = _sockets()
        yield
        for descriptor in _new(before, _sockets()):
            with suppress(OSError), _tcp(descriptor) as found:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._ports.add(found.getsockname()[1])

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Connections that are opened in the block get the limit. Another thread's may be among
        them, which is so seldom that it does no harm. Raises OSError without a free descriptor."""
        before = _sockets()
        yield
        for descriptor in _new(before, _sockets()):
            with suppress(OSError), _tcp(descriptor) as found:
                _limit(found)

    def apply(self) -> None:
        """To what has come to the worker's ports since the last call. Without a free descriptor to
        look with, the next call finds it."""
        try:
            found = _sockets()
        except OSError:
            return
        for descriptor in _new(self._seen, found):
            with suppress(OSError), _tcp(descriptor) as accepted:
                if accepted.getsockname()[1] in self._ports:
                    _limit(accepted)
        self._seen = found


def _sockets() -> dict[int, str]:
    """Which sockets this process has open, by descriptor. Raises OSError without a free descriptor
    to look with."""
    found: dict[int, str] = {}
    for name in os.listdir(_FOLDER) if sys.platform == "linux" else ():
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(f"{_FOLDER}/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _new(before: dict[int, str], after: dict[int, str]) -> list[int]:
    return [descriptor for descriptor, target in after.items() if before.get(descriptor) != target]


@contextmanager
def _tcp(descriptor: int) -> Iterator[socket.socket]:
    """A second handle on it. Raises OSError for what is closed meanwhile, and for what is no TCP
    socket."""
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

"""A limit for how long TCP may try in vain.

UCX has no setting for it, and its connections that a peer opens have no handle that could be closed: a receive whose
peer cannot be reached any more would hold its memory for the quarter of an hour that the kernel sends again.
"""

import os
import socket
import sys
from contextlib import suppress

UNACKNOWLEDGED_S = 5.0
_FOLDER = "/proc/self/fd"


class SocketLimits:
    """Gives every TCP socket of this process that has no limit one of `UNACKNOWLEDGED_S` (`TCP_USER_TIMEOUT`, see
    tcp(7)): what is not acknowledged for so long, or not connected, has failed. gRPC's have their own. Linux only."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}  # descriptors, and which sockets they were

    def apply(self) -> None:
        """To those that are new."""
        if sys.platform != "linux":
            return
        found = {}
        for name in os.listdir(_FOLDER):
            with suppress(OSError):  # closed meanwhile
                found[name] = os.readlink(f"{_FOLDER}/{name}")
        new = [name for name, target in found.items() if target.startswith("socket:") and
               self._seen.get(name) != target]
        self._seen = found
        for name in new:
            with suppress(OSError):
                _limit(int(name))


def _limit(descriptor: int) -> None:
    """Raises OSError for what is closed, or no socket any more."""
    with socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return
        if not found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNACKNOWLEDGED_S * 1e3))

"""The open sockets of this process, listed once for all threads that watch some of them."""

import os
import stat
import sys
import threading
import time
from collections.abc import Mapping

_FOLDER = "/proc/self/fd"


class _SocketList:
    """The last list of the open sockets and its age."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: Mapping[int, int] = {}
        self._listed_s = float("-inf")

    def get(self, max_age_s: float) -> Mapping[int, int]:
        with self._lock:
            now = time.monotonic()
            if not max_age_s or now - self._listed_s > max_age_s:
                self._sockets = _list()
                self._listed_s = now
            return self._sockets


_LIST = _SocketList()


def open_sockets(max_age_s: float = 0.0) -> Mapping[int, int]:
    """Return the inodes of the open sockets of this process by descriptor. Linux only.

    A list that another thread made within `max_age_s` seconds is shared: with many servers and
    transports in a process, each of them would otherwise inspect the descriptors of all others. A
    descriptor of an older list may belong to another socket by now: check it before changing it.

    Raises OSError without a free descriptor for the listing.
    """
    return _LIST.get(max_age_s)


def _list() -> Mapping[int, int]:
    found: dict[int, int] = {}
    for name in os.listdir(_FOLDER) if sys.platform == "linux" else ():
        try:
            status = os.fstat(descriptor := int(name))
        except OSError:
            continue  # closed meanwhile, as is always the descriptor of the listing itself
        if stat.S_ISSOCK(status.st_mode):
            found[descriptor] = status.st_ino
    return found

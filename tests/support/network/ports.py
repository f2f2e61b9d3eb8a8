"""Ports that a test may count on."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_LOW, _HIGH = (
    23000,
    24000,
)  # below those the kernel assigns to any process at any time


@contextmanager
def taken_port(host: str) -> Iterator[int]:
    """Return a port with a listener; the ports before and after it are free."""
    for port in range(_LOW + 1, _HIGH, 3):
        with ExitStack() as sockets:
            # the middle one first: it is held to the end, so that another test passes over all
            # three
            try:
                taken, *others = (
                    sockets.enter_context(_bound(host, each)) for each in (port, port - 1, port + 1)
                )
            except OSError:
                continue
            for other in others:
                other.close()
            taken.listen()
            yield port
            return
    raise OSError(f"no three neighboring ports of {host} between {_LOW} and {_HIGH} are free")


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound

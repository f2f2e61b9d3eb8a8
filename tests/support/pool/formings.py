"""Formations of pools with a known key, shared with other processes."""

from transfer.transport.forming import Forming

KEY = bytes(range(32))


def forming_of(
    epoch: int, size: int, *, pool: str = "pool", session: int = 0, key: bytes = KEY
) -> Forming:
    """Return the formation `epoch` of a pool with this name. Its members are named by pool and
    rank."""
    return Forming(epoch, session or epoch, tuple(f"{pool}-{rank}" for rank in range(size)), key)

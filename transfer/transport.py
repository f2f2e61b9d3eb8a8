"""What moves bytes between two processes. One protocol, one contract suite (tests/transfer/contract.py)."""

from typing import Protocol


class Transport(Protocol):
    """Tagged messages between processes, straight from and into the caller's memory."""

    @property
    def address(self) -> bytes: ...

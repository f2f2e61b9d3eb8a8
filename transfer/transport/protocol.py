"""Transport of bytes between two processes: one protocol with one contract suite.

The suite is tests/transfer/contract.py.

A message has a 64-bit tag. Its low `TAG_OFFSET_BITS` number the messages of one session epoch; the
rest, its *prefix*, identifies the epoch. The receiver matches a message only after it has seen its
length, so a message of the wrong size never writes a byte. A receive that was cancelled before its
match ends at once, and its memory is no longer referenced. A matched receive ends with its message,
or when the connection to the peer is closed.

Buffers are host bytes; a transport for device memory (see `device.py`) accepts that as well. With
`Wakeup` another thread ends the wait of a transport's owner.
"""

import contextlib
import os
import select
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from engine.memory.layout import Buffer
from runtime.errors import BatonError, InternalError
from transfer.transport.refusals import RefusalReason

TAG_OFFSET_BITS = 24
NO_BYTES = memoryview(b"")


def tag_prefix(tag: int) -> int:
    """Return the part that all tags of one session epoch share."""
    return tag >> TAG_OFFSET_BITS


def host_bytes(buffer: Buffer) -> memoryview:
    """Return the buffer as host bytes. Raises InternalError for device memory."""
    if not isinstance(buffer, memoryview):
        raise InternalError(
            f"{type(buffer).__name__} is not host memory, and only host memory can be used here"
        )
    return buffer


class OperationState(StrEnum):
    """State of a send or a receive. All states except PENDING are final."""

    PENDING = "pending"
    DONE = "done"  # a send: the buffer may be reused; a receive: all bytes have arrived
    FAILED = "failed"  # `error` is the cause
    CANCELLED = "cancelled"  # by `cancel_receive`, before any byte was written


class Peer(Protocol):
    """Connection to another process."""

    @property
    def address(self) -> bytes: ...

    @property
    def alive(self) -> bool:
        """Return False once the connection has failed or was closed.

        It does not recover; `connect` makes a new one.
        """
        ...


class Berth:
    """Memory for one incoming message, borrowed only when the message has arrived.

    `borrow` returns None if no memory is free. The creator of the berth releases the memory when
    the receive has ended.
    """

    def __init__(self, num_bytes: int, borrow: Callable[[], memoryview | None]) -> None:
        self.nbytes = num_bytes
        self.borrow = borrow


class Operation:
    """One send or one receive.

    The transport may read or write `buffer` while the operation is PENDING, and never afterwards.

    `content`: the message's bytes on the host, once it is DONE. For device memory this is a copy,
    which may be read until the next `progress`.
    """

    __slots__ = ("buffer", "content", "error", "peer", "state", "tag")

    def __init__(self, peer: Peer, tag: int, buffer: Buffer) -> None:
        self.peer = peer
        self.tag = tag
        self.buffer = buffer
        self.content = buffer if isinstance(buffer, memoryview) else NO_BYTES
        self.state = OperationState.PENDING
        self.error: BatonError | None = None

    @property
    def num_bytes(self) -> int:
        return self.buffer.nbytes

    def has_memory(self) -> bool:
        """Borrow memory for an arrived message; return False if the berth has none. For transports."""
        if isinstance(self.buffer, Berth):
            memory = self.buffer.borrow()
            if memory is None:
                return False
            self.buffer = self.content = memory
        return True

    def finish(self, state: OperationState, error: BatonError | None = None) -> None:
        """End the operation. For transports."""
        self.state = state
        self.error = error


class Transport(Protocol):
    """Tagged messages directly from and into the caller's memory.

    Belongs to one thread, except for `address` and `wake`. Messages of one sender with one tag
    arrive in the order in which they were sent; otherwise there is no order.
    """

    @property
    def address(self) -> bytes:
        """Return the argument for `connect` in another process.

        It is a bearer capability, so it is sent only over gRPC.
        """
        ...

    @property
    def num_pending(self) -> int:
        """Return the number of operations that `progress` has not returned yet."""
        ...

    @property
    def refused(self) -> Mapping[RefusalReason, int]:
        """Return the number of rejected messages by reason. Thread-safe."""
        ...

    def connect(self, address: bytes) -> Peer:
        """Return the connection to this address, existing or new, without waiting for the peer.

        Raises:
            IncompatiblePeerError: it is not the address of a transport.
            PeerLostError: the address is not usable here.
        """
        ...

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Send the bytes of `buffer`.

        If the peer is gone, the operation is FAILED with PeerLostError.
        """
        ...

    def post_receive(self, peer: Peer, tag: int, buffer: Buffer | Berth) -> Operation:
        """Accept one message with exactly this tag and length into `buffer`.

        A message without a posted receive is rejected, although its sender sees it as sent. While a
        berth has no memory, its message waits, and other messages overtake it.

        `peer` is the sender. The operation is FAILED with HandoffError if the length differs
        (nothing is written), or with PeerLostError if the connection ends before the message.
        """
        ...

    def cancel_receive(self, operation: Operation) -> None:
        """Stop waiting for a message.

        The receive is CANCELLED if no message was matched yet; otherwise it ends with its message.
        """
        ...

    def retire(self, prefix: int) -> None:
        """Count messages with this tag prefix as late from now on, because its receives are over.

        The number of stored prefixes is limited.
        """
        ...

    def close_peer(self, peer: Peer) -> None:
        """Cut the connection.

        Every operation with this peer ends, and its buffers can no longer be read or written.
        """
        ...

    def progress(self) -> list[Operation]:
        """Do all work that needs no waiting; return the operations that ended since the last call.

        Each operation is returned exactly once.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `progress` may have work, `wake` was called, or the time is over."""
        ...

    def wake(self) -> None:
        """Make the current or the next `wait` return at once. Thread-safe."""
        ...

    def close(self) -> None:
        """Close every peer and release everything. Pending operations end without a report."""
        ...


class Wakeup:
    """An eventfd for `poll` that another thread makes readable.

    Calls while the owner is awake count as one. `set` is thread-safe; all other methods belong to
    the owner.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False
        # The flag and the descriptor change together: with the flag down and the descriptor
        # readable, every `sleep` would return at once, forever. The lock also keeps `set` from
        # writing to a descriptor that was closed and reused.
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @property
    def is_set(self) -> bool:
        return self._is_set

    def watch(self, fd: int) -> None:
        """Make `wait` also return when this descriptor is readable."""
        self._poll.register(fd, select.POLLIN)

    def set(self) -> None:
        # Only the first call since the last `clear` costs a system call. The owner clears first and
        # then checks its queues, so no call is lost; at worst one `wait` returns too early.
        if self._is_set:
            return
        with self._lock:
            if self._fd >= 0:
                self._is_set = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            self._is_set = False
            os.eventfd_read(self._fd)

    def sleep(self, timeout_s: float) -> None:
        """Sleep until set, until a watched descriptor is readable, or until the time is over."""
        self._poll.poll(max(0.0, timeout_s) * 1000)

    def wait(self, timeout_s: float) -> None:
        """Sleep, then clear."""
        self.sleep(timeout_s)
        self.clear()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

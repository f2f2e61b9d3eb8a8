"""What moves bytes between two processes. One protocol, one contract suite
(tests/transfer/contract.py).

A message has a 64-bit tag. Its low `TAG_OFFSET_BITS` number the messages of one session's epoch;
the rest, its *prefix*, is the epoch's. The receiving side matches a message only after it has seen
its length, so a message of the wrong size never writes a byte, and a receive that was cancelled
before it was matched is over at once: nothing refers to its memory any more. A matched receive ends
with its message, or when the peer's connection is closed.

Buffers are host bytes; a transport for a device's memory (see `device.py`) takes that as well.
`Wakeup` is how another thread ends the wait of a transport's owner.
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
    """What all tags of one session's epoch share."""
    return tag >> TAG_OFFSET_BITS


def host_bytes(buffer: Buffer) -> memoryview:
    """For what reaches nothing else. Raises InternalError for a device's memory."""
    if not isinstance(buffer, memoryview):
        raise InternalError(
            f"{type(buffer).__name__} is not host memory, and nothing else is reached here"
        )
    return buffer


class OperationState(StrEnum):
    """Of a send or a receive. Whatever is not PENDING is final."""

    PENDING = "pending"
    DONE = "done"  # a send: the buffer may be reused; a receive: all bytes are there
    FAILED = "failed"  # `error` is the cause
    CANCELLED = "cancelled"  # by `cancel_receive`, before any byte was written


class Peer(Protocol):
    """A connection to another process."""

    @property
    def address(self) -> bytes: ...

    @property
    def alive(self) -> bool:
        """False once the connection has failed or was closed; it does not come back, `connect`
        makes a new one."""
        ...


class Berth:
    """Memory for one incoming message, borrowed only once the message is there. `borrow` returns
    None while none is free; the maker of the berth gives the memory back when the receive has
    ended."""

    def __init__(self, num_bytes: int, borrow: Callable[[], memoryview | None]) -> None:
        self.nbytes = num_bytes
        self.borrow = borrow


class Operation:
    """One send or one receive. While it is PENDING the transport may read or write `buffer`;
    afterwards never again.

    `content`: the message's bytes on the host, once it is DONE. Those of a device's memory are a
    copy, which may be read until the next `progress`.
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
        """For transports, when the message is there: False while its berth has none for it."""
        if isinstance(self.buffer, Berth):
            memory = self.buffer.borrow()
            if memory is None:
                return False
            self.buffer = self.content = memory
        return True

    def finish(self, state: OperationState, error: BatonError | None = None) -> None:
        """For transports: the operation is over."""
        self.state = state
        self.error = error


class Transport(Protocol):
    """Tagged messages straight from and into the caller's memory.

    Belongs to one thread, but for `address` and `wake`. Messages of one sender with one tag arrive
    in the order they were sent; otherwise there is no order.
    """

    @property
    def address(self) -> bytes:
        """What `connect` takes in another process. A bearer capability: it travels only over the
        gRPC plane."""
        ...

    @property
    def num_pending(self) -> int:
        """Operations that were returned by `send` or `post_receive` and not yet by `progress`."""
        ...

    @property
    def refused(self) -> Mapping[RefusalReason, int]:
        """How many messages were refused, by reason. Any thread."""
        ...

    def connect(self, address: bytes) -> Peer:
        """The connection to this address, made or found. Returns before the peer has answered.

        Raises:
            PeerLostError: the address is not usable here.
        """
        ...

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Send the bytes of `buffer`. A peer that is gone makes the operation FAILED with
        PeerLostError."""
        ...

    def post_receive(self, peer: Peer, tag: int, buffer: Buffer | Berth) -> Operation:
        """Accept one message with exactly this tag and exactly this length into `buffer`, from now
        on: a message that no receive waits for is refused, though its sender sees it as sent. While
        a berth has no memory, its message waits where it is, and other messages pass it.

        `peer` is who is going to send it. FAILED with HandoffError when the length differs (nothing
        is written), with PeerLostError when the connection ends before the message.
        """
        ...

    def cancel_receive(self, operation: Operation) -> None:
        """Stop waiting. CANCELLED if no message was matched yet; else it ends as the message
        does."""
        ...

    def retire(self, prefix: int) -> None:
        """Count messages with this tag prefix as late from now on: its receives are over. Prefixes
        are kept within a bound."""
        ...

    def close_peer(self, peer: Peer) -> None:
        """Cut the connection. Every operation with this peer ends, and nothing can read or write
        its buffers after."""
        ...

    def progress(self) -> list[Operation]:
        """Do what can be done without waiting; the operations that ended since the last call, each
        exactly once."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `progress` may have something to do, `wake` was called, or the time is up."""
        ...

    def wake(self) -> None:
        """Make the present or the next `wait` return at once. From any thread."""
        ...

    def close(self) -> None:
        """Close every peer and free everything. Pending operations end; they are not reported any
        more."""
        ...


class Wakeup:
    """A file descriptor that another thread can make readable; calls while the owner is awake count
    as one. An eventfd for `poll`. `set` may be called from any thread, everything else by the
    owner."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False
        # The flag and the descriptor change together: were the flag down and the descriptor
        # readable, every `sleep` would return at once, for ever. And `set` never writes to a
        # descriptor that was closed and reused.
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @property
    def is_set(self) -> bool:
        return self._is_set

    def watch(self, fd: int) -> None:
        """Let `wait` also return when this descriptor is readable."""
        self._poll.register(fd, select.POLLIN)

    def set(self) -> None:
        # Only the first call since the last `clear` pays for a system call. The owner clears first
        # and looks at its queues after, so no call is lost; at worst one `wait` returns for
        # nothing.
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
        """Until set, a watched descriptor is readable or the time is up."""
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

"""A transport inside one process with injected faults, to make UCX behavior visible and
repeatable.

It copies when the receiver takes the message, as a rendezvous does. So the source memory is read
late, the destination is written late, and the operations of both ends stay pending until then.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum

from engine.memory.layout import Buffer
from runtime.clock import Clock
from runtime.errors import BatonError, HandoffError, IncompatiblePeerError, PeerLostError
from transfer.transport.matching import MessageMatcher
from transfer.transport.protocol import Berth, Operation, OperationState, Peer, Wakeup, host_bytes
from transfer.transport.refusals import RefusalReason, Refusals

ADDRESS_PREFIX = b"memory-"


class Fault(StrEnum):
    """The fault of one message."""

    NONE = "none"
    DROP = "drop"  # completes for the sender but never arrives
    # Matched with its receive, but the bytes are written only after `MemoryNetwork.release`.
    DELAY = "delay"
    FLIP = "flip"  # one bit of a byte in the middle is flipped in transit
    DUPLICATE = "duplicate"  # arrives twice
    DIE = "die"  # the sending process dies instead of sending it


FaultHook = Callable[[int, int], Fault]
"""Maps (tag, num_bytes) of a message before it is sent to its fault."""


class MemoryPeer:
    """A connection from one transport of a network to another."""

    def __init__(self, address: bytes) -> None:
        self.address = address
        self.alive = True


class _MessageInFlight:
    """A message between `send` and its matched receive.

    `operation` is the sender's. A duplicate has its own `copy`.
    """

    def __init__(
        self,
        sender: "MemoryTransport",
        operation: Operation,
        fault: Fault,
        copy: bytes | None = None,
    ) -> None:
        self.sender = sender
        self.operation = operation
        self.fault = fault
        self.copy = copy


class MemoryNetwork:
    """A network of the transports of one process.

    `fault` may be set at any time; None delivers everything.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.fault: FaultHook | None = None
        self.delaying = True
        self._transports: dict[bytes, MemoryTransport] = {}
        self._next_address = 0

    def transport(self, clock: Clock) -> "MemoryTransport":
        """Return a new transport on this network."""
        with self.lock:
            address = b"%s%d" % (ADDRESS_PREFIX, self._next_address)
            self._next_address += 1
            self._transports[address] = MemoryTransport(self, address, clock)
            return self._transports[address]

    def find(self, address: bytes) -> "MemoryTransport | None":
        return self._transports.get(address)

    def remove(self, address: bytes) -> None:
        """Remove the process at this address; connections to it fail."""
        with self.lock:
            self._transports.pop(address, None)
            for transport in self._transports.values():
                transport.peer_gone(address)

    def release(self) -> None:
        """Write delayed messages, and all later ones, without delay."""
        with self.lock:
            self.delaying = False
            for transport in self._transports.values():
                transport.wake()


class MemoryTransport:
    """An in-memory implementation of `Transport`.

    All state is guarded by the network's lock, which is simple but not fast.
    """

    def __init__(self, network: MemoryNetwork, address: bytes, clock: Clock) -> None:
        self.address = address
        self._network = network
        self._refusals = Refusals("memory transport")
        self._matcher: MessageMatcher[_MessageInFlight] = MessageMatcher(self._refusals)
        self._inbox: deque[_MessageInFlight] = deque()
        self._delayed: list[tuple[Operation, _MessageInFlight]] = []
        self._sending: set[Operation] = set()
        self._ended: list[Operation] = []
        self._peers: dict[bytes, MemoryPeer] = {}
        self._num_pending = 0
        self._wakeup = Wakeup()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    @property
    def refused(self) -> Mapping[RefusalReason, int]:
        """Return the number of rejected messages, by reason."""
        return self._refusals.counts

    def connect(self, address: bytes) -> MemoryPeer:
        if not address.startswith(ADDRESS_PREFIX):
            raise IncompatiblePeerError(f"{address!r} is not the address of a memory transport")
        with self._network.lock:
            peer = self._peers.get(address)
            if peer is None or not peer.alive:
                if self._network.find(address) is None:
                    raise PeerLostError(f"no transport at {address!r}")
                peer = self._peers[address] = MemoryPeer(address)
            return peer

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        operation = Operation(peer, tag, host_bytes(buffer))
        with self._network.lock:
            self._num_pending += 1
            target = self._network.find(peer.address)
            fault = self._network.fault(tag, buffer.nbytes) if self._network.fault else Fault.NONE
            if fault is Fault.DIE:
                self.die()
            if not peer.alive or target is None or fault is Fault.DIE:
                self._end(
                    operation, OperationState.FAILED, PeerLostError(f"{peer.address!r} is gone")
                )
            elif fault is Fault.DROP:
                self._end(operation, OperationState.DONE)
            else:
                self._sending.add(operation)
                target.accept(_MessageInFlight(self, operation, fault))
                if fault is Fault.DUPLICATE:
                    target.accept(
                        _MessageInFlight(self, operation, Fault.NONE, bytes(operation.content))
                    )
        return operation

    def post_receive(self, peer: Peer, tag: int, buffer: Buffer | Berth) -> Operation:
        operation = Operation(
            peer, tag, buffer if isinstance(buffer, Berth) else host_bytes(buffer)
        )
        with self._network.lock:
            self._num_pending += 1
            if not peer.alive:
                self._end(
                    operation, OperationState.FAILED, PeerLostError(f"{peer.address!r} is gone")
                )
                return operation
            self._matcher.post(operation)
        return operation

    def cancel_receive(self, operation: Operation) -> None:
        with self._network.lock:
            is_cancelled, discarded = self._matcher.cancel(operation)
            self._discard(discarded)
            if is_cancelled:
                self._end(operation, OperationState.CANCELLED)

    def retire(self, prefix: int) -> None:
        with self._network.lock:
            self._matcher.retire(prefix)

    def close_peer(self, peer: Peer) -> None:
        with self._network.lock:
            self.peer_gone(peer.address)
            self._peers.pop(peer.address, None)

    def progress(self) -> list[Operation]:
        with self._network.lock:
            while self._inbox:
                message = self._inbox.popleft()
                operation, discarded = self._matcher.arrive(
                    message.operation.tag, message.operation.num_bytes, message
                )
                self._discard(discarded)
                if operation is not None:
                    self._take(operation, message)
            for operation, message in self._matcher.fed():
                self._take(operation, message)
            if self._delayed and not self._network.delaying:
                delayed = self._delayed
                self._delayed = []
                for operation, message in delayed:
                    self._write(operation, message)
            ended = self._ended
            self._ended = []
            self._num_pending -= len(ended)
            return ended

    def wait(self, timeout_s: float) -> None:
        if not self._inbox and not self._ended:
            self._wakeup.wait(timeout_s)

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        with self._network.lock:
            for address in list(self._peers):
                self.peer_gone(address)
            self._network.remove(self.address)
            self._discard([*self._inbox, *self._matcher.clear()])
            self._inbox.clear()
            self._wakeup.close()

    def die(self) -> None:
        """Act as after SIGKILL: sent messages never arrive, and connections of peers fail."""
        for address in list(self._peers):
            self.peer_gone(address)
        self._network.remove(self.address)

    def accept(self, message: _MessageInFlight) -> None:
        """Add a message; called by the sending transport under the network's lock."""
        self._inbox.append(message)
        self.wake()

    def peer_gone(self, address: bytes) -> None:
        """End all operations with this peer; called under the network's lock."""
        peer = self._peers.get(address)
        if peer is None or not peer.alive:
            return
        peer.alive = False
        error = PeerLostError(f"{address!r} is gone")
        delayed = [operation for operation, _ in self._delayed if operation.peer is peer]
        self._delayed = [pair for pair in self._delayed if pair[0].peer is not peer]
        sending = [operation for operation in self._sending if operation.peer is peer]
        self._sending.difference_update(sending)
        lost, discarded = self._matcher.cancel_peer(peer)
        self._discard(discarded)
        for operation in [*lost, *delayed, *sending]:
            self._end(operation, OperationState.FAILED, error)
        self.wake()

    def _take(self, operation: Operation, message: _MessageInFlight) -> None:
        if message.operation.num_bytes != operation.num_bytes:
            self._discard([message])
            self._end(
                operation,
                OperationState.FAILED,
                HandoffError(
                    f"a message of {message.operation.num_bytes} bytes came for a receive of {operation.num_bytes}"
                ),
            )
        elif message.fault is Fault.DELAY and self._network.delaying:
            self._delayed.append((operation, message))
        else:
            self._write(operation, message)

    def _write(self, operation: Operation, message: _MessageInFlight) -> None:
        if message.copy is None and message.operation.state is not OperationState.PENDING:
            # The sender has closed its end, so its memory must not be read any more.
            self._end(
                operation, OperationState.FAILED, PeerLostError("the sender closed the connection")
            )
            return
        operation.content[:] = (
            host_bytes(message.operation.buffer) if message.copy is None else message.copy
        )
        if message.fault is Fault.FLIP:
            operation.content[operation.num_bytes // 2] ^= 1
        self._discard([message])
        self._end(operation, OperationState.DONE)

    def sent(self, operation: Operation) -> None:
        """Complete a send whose bytes have left.

        Called by the receiving transport under the network's lock.
        """
        if operation in self._sending:
            self._sending.remove(operation)
            self._end(operation, OperationState.DONE)

    def _discard(self, messages: list[_MessageInFlight]) -> None:
        for message in messages:
            if message.copy is None:
                message.sender.sent(message.operation)

    def _end(
        self, operation: Operation, state: OperationState, error: BatonError | None = None
    ) -> None:
        operation.finish(state, error)
        self._ended.append(operation)
        self.wake()

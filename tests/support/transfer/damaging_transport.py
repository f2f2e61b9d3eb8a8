"""A transport that damages what it sends, after its digest was made."""

from collections.abc import Callable, Mapping

from engine.memory.layout import Buffer
from transfer.transport.protocol import Berth, Operation, Peer, Transport
from transfer.transport.refusals import RefusalReason


def flip(bit: int) -> Callable[[memoryview], memoryview]:
    """Return a copy with one bit changed."""

    def damage(buffer: memoryview) -> memoryview:
        copy = bytearray(buffer)
        copy[bit // 8 % len(copy)] ^= 1 << bit % 8
        return memoryview(copy)

    return damage


def flip_in_the_middle(buffer: memoryview) -> memoryview:
    return flip(8 * (len(buffer) // 2) + 4)(buffer)


def send_damaged(
    send: Callable[[Peer, int, Buffer], Operation],
    peer: Peer,
    tag: int,
    buffer: Buffer,
    damage: Callable[[memoryview], memoryview] = flip_in_the_middle,
) -> Operation:
    """Send a damaged copy; the sender digests the original."""
    assert isinstance(buffer, memoryview)
    operation = send(peer, tag, damage(buffer))
    operation.content = buffer
    return operation


class DamagingTransport:
    """Passes everything on to `inner`; the message with tag t is replaced by `damage[t]` of it."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.damage: dict[int, Callable[[memoryview], memoryview]] = {}

    @property
    def address(self) -> bytes:
        return self.inner.address

    @property
    def num_pending(self) -> int:
        return self.inner.num_pending

    @property
    def refused(self) -> Mapping[RefusalReason, int]:
        return self.inner.refused

    def connect(self, address: bytes) -> Peer:
        return self.inner.connect(address)

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        if tag not in self.damage:
            return self.inner.send(peer, tag, buffer)
        return send_damaged(self.inner.send, peer, tag, buffer, self.damage[tag])

    def post_receive(self, peer: Peer, tag: int, buffer: Buffer | Berth) -> Operation:
        return self.inner.post_receive(peer, tag, buffer)

    def cancel_receive(self, operation: Operation) -> None:
        self.inner.cancel_receive(operation)

    def retire(self, prefix: int) -> None:
        self.inner.retire(prefix)

    def close_peer(self, peer: Peer) -> None:
        self.inner.close_peer(peer)

    def progress(self) -> list[Operation]:
        return self.inner.progress()

    def wait(self, timeout_s: float) -> None:
        self.inner.wait(timeout_s)

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()

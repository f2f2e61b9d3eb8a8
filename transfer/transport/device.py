"""A transport for pools in a device's memory, over one for host memory: what moves crosses pinned
host buffers.

    sending     a buffer is free ─▶ records copied there ─▶ sent ─▶ DONE: digested there ─▶ buffer free
    receiving   message is there and a buffer free ─▶ received ─▶ copied to the records ─▶ DONE: digested ─▶ free

Where the transport below reaches the device (UCX with cuda_copy and cuda_ipc), the records
themselves are given to it, and what is copied to the host is only for the digest, while they are
being sent and after they were received.

An operation is PENDING until the last copy that concerns it is over. So what holds of the transport
below holds of the device's memory, too: an operation that has ended touches nothing any more, and a
session whose operations have all ended is drained. What is in host memory (trailers) passes through
untouched, and the bytes on the wire are those that host pools send: either side may have its pools
where it likes.

Nothing can end a copy that a device does not end. Then the transport fails as a whole, and with it
the process.
"""

import time
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from engine.memory.layout import Buffer
from runtime.clock import Clock
from runtime.errors import BatonError, InternalError, PeerLostError
from transfer.transport.protocol import Berth, Operation, OperationState, Peer, Transport
from transfer.transport.refusals import RefusalReason

COPY_POLL_S = 50e-6
COPY_LIMIT_S = 10.0


class Route(StrEnum):
    """How a device's bytes travel."""

    PINNED = "pinned"  # through host buffers, which any transport reaches
    DIRECT = "direct"  # the transport below reaches the device's memory


class Loan(Protocol):
    """A pinned host buffer, lent for one message. Copies run by themselves; one at a time."""

    @property
    def content(self) -> memoryview:
        """As many bytes as were requested."""
        ...

    def fetch(self, source: Buffer) -> None:
        """Start copying from the device into the buffer."""
        ...

    def store(self, target: Buffer) -> None:
        """Start copying from the buffer to the device."""
        ...

    def is_settled(self) -> bool:
        """Whether the copy is over. Never waits."""
        ...

    def release(self) -> None:
        """Give the buffer back; the copy is over."""
        ...


class Staging(Protocol):
    """The pinned buffers of one device, each large enough for any message of its pools."""

    @property
    def num_buffers(self) -> int:
        """At least 2."""
        ...

    def check_thread(self) -> None:
        """Raises InternalError in a thread that is not the one prepared for this device."""
        ...

    def borrow(self, num_bytes: int) -> Loan | None:
        """None while all are lent."""
        ...


class _Crossing:
    """One message on its way between a device's records and the transport below."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.loan: Loan | None = None
        self.copying_since_s = 0.0
        self.is_copied = False
        self.sent: Operation | None = None  # below, once it has ended

    @property
    def lent(self) -> Loan:
        assert self.loan is not None
        return self.loan


class DeviceTransport:
    """See `Transport`. Sends take at most half of the buffers, so that two pools that send to each
    other never wait for each other."""

    def __init__(
        self,
        inner: Transport,
        staging: Staging,
        clock: Clock,
        *,
        route: Route = Route.PINNED,
        copy_limit_s: float = COPY_LIMIT_S,
    ) -> None:
        self._inner = inner
        self._staging = staging
        self._clock = clock
        self._copy_limit_s = copy_limit_s
        self._route = route
        self._num_sends = 0  # that have a buffer
        self._max_sends = staging.num_buffers // 2
        self._unsent: deque[_Crossing] = deque()  # sends that wait for a buffer
        self._fetching: deque[_Crossing] = deque()
        self._storing: deque[_Crossing] = (
            deque()
        )  # to the device, or from it what was received there
        self._landed: deque[_Crossing] = deque()  # received on the device, waiting for a buffer
        self._sending: dict[Operation, _Crossing] = {}  # by operation below
        self._receiving: dict[Operation, _Crossing] = {}
        self._below: dict[Operation, Operation] = {}  # receives: ours to the one below
        self._ended: list[Operation] = []
        self._read: list[
            Loan
        ] = []  # of operations that were reported: may be read until the next `progress`
        self._num_pending = 0
        self._is_checked = False

    @property
    def address(self) -> bytes:
        return self._inner.address

    @property
    def num_pending(self) -> int:
        return (
            self._num_pending + self._inner.num_pending - len(self._sending) - len(self._receiving)
        )

    @property
    def refused(self) -> Mapping[RefusalReason, int]:
        return self._inner.refused

    def connect(self, address: bytes) -> Peer:
        return self._inner.connect(address)

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        if isinstance(buffer, memoryview):
            return self._inner.send(peer, tag, buffer)
        operation = Operation(peer, tag, buffer)
        self._num_pending += 1
        self._unsent.append(_Crossing(operation))
        self._fetch()
        return operation

    def post_receive(self, peer: Peer, tag: int, buffer: Buffer | Berth) -> Operation:
        if isinstance(buffer, memoryview | Berth):
            return self._inner.post_receive(peer, tag, buffer)
        crossing = _Crossing(Operation(peer, tag, buffer))
        self._num_pending += 1

        def borrow() -> memoryview | None:
            crossing.loan = self._staging.borrow(buffer.nbytes)
            return None if crossing.loan is None else crossing.loan.content

        direct = self._route is Route.DIRECT
        below = self._inner.post_receive(
            peer, tag, buffer if direct else Berth(buffer.nbytes, borrow)
        )
        self._receiving[below] = crossing
        self._below[crossing.operation] = below
        return crossing.operation

    def cancel_receive(self, operation: Operation) -> None:
        self._inner.cancel_receive(self._below.get(operation, operation))

    def retire(self, prefix: int) -> None:
        self._inner.retire(prefix)

    def close_peer(self, peer: Peer) -> None:
        self._inner.close_peer(peer)
        kept = deque[_Crossing]()
        for crossing in self._unsent:
            if crossing.operation.peer is peer:
                self._lost(crossing)
            else:
                kept.append(crossing)
        self._unsent = kept

    def progress(self) -> list[Operation]:
        """Raises InternalError when a copy takes longer than the limit: the device hangs."""
        if not self._is_checked:
            self._staging.check_thread()
            self._is_checked = True
        for loan in self._read:
            loan.release()
        self._read.clear()
        for crossing in self._settled(self._fetching):
            crossing.is_copied = True
            if self._route is Route.PINNED:
                self._send_below(crossing, crossing.lent.content)
            elif crossing.sent is not None:
                self._end_send(crossing, crossing.sent)
        for below in self._inner.progress():
            self._on_below(below)
        for crossing in self._settled(self._storing):
            self._end(crossing, OperationState.DONE)
        self._fetch_landed()
        self._fetch()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        if self._fetching or self._storing:
            time.sleep(min(timeout_s, COPY_POLL_S))  # a copy's end wakes no thread
        elif not self._ended:
            self._inner.wait(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        """Raises InternalError when copies do not end within the limit: they may still touch the
        device's memory."""
        self._inner.close()
        while self._fetching or self._storing:
            for copies in (self._fetching, self._storing):
                self._read += [crossing.lent for crossing in self._settled(copies)]
            time.sleep(COPY_POLL_S)
        crossings = {*self._sending.values(), *self._receiving.values()}
        for loan in {
            *self._read,
            *(crossing.loan for crossing in crossings if crossing.loan is not None),
        }:
            loan.release()  # a direct send's is in both
        self._read.clear()
        self._sending.clear()
        self._receiving.clear()

    def _fetch(self) -> None:
        """Start the copies of sends as far as there are buffers, in order."""
        while self._unsent and self._num_sends < self._max_sends:
            crossing = self._unsent[0]
            operation = crossing.operation
            if operation.peer.alive:
                crossing.loan = self._staging.borrow(operation.num_bytes)
                if crossing.loan is None:
                    return
                self._num_sends += 1
                self._start_fetch(crossing, self._fetching)
                if self._route is Route.DIRECT:
                    self._send_below(crossing, operation.buffer)
            else:
                self._lost(crossing)
            self._unsent.popleft()

    def _fetch_landed(self) -> None:
        """Start the copies that digests are taken of."""
        while self._landed:
            self._landed[0].loan = self._staging.borrow(self._landed[0].operation.num_bytes)
            if self._landed[0].loan is None:
                return
            self._start_fetch(self._landed.popleft(), self._storing)

    def _start_fetch(self, crossing: _Crossing, copies: deque[_Crossing]) -> None:
        crossing.lent.fetch(crossing.operation.buffer)
        crossing.copying_since_s = self._clock.now()
        copies.append(crossing)

    def _send_below(self, crossing: _Crossing, buffer: Buffer) -> None:
        operation = crossing.operation
        self._sending[self._inner.send(operation.peer, operation.tag, buffer)] = crossing

    def _settled(self, copies: deque[_Crossing]) -> list[_Crossing]:
        """Those whose copies are over; they were started in this order, and end in it."""
        settled = []
        while copies and copies[0].lent.is_settled():
            settled.append(copies.popleft())
        if copies and self._clock.now() - copies[0].copying_since_s > self._copy_limit_s:
            raise InternalError(
                f"the device has not ended a copy of {copies[0].operation.num_bytes} bytes within "
                f"{self._copy_limit_s} s"
            )
        return settled

    def _on_below(self, below: Operation) -> None:
        """An operation of the transport below has ended: one of ours goes on, or it is passed on as
        it is."""
        received = self._receiving.pop(below, None)
        crossing = received or self._sending.pop(below, None)
        if crossing is None:
            self._ended.append(below)
        elif received is None:
            crossing.sent = below
            if crossing.is_copied:
                self._end_send(crossing, below)
        elif below.state is not OperationState.DONE:
            self._end(crossing, below.state, below.error)
        elif self._route is Route.DIRECT:
            self._landed.append(crossing)
        else:
            crossing.lent.store(crossing.operation.buffer)
            crossing.copying_since_s = self._clock.now()
            self._storing.append(crossing)

    def _end_send(self, crossing: _Crossing, below: Operation) -> None:
        self._num_sends -= 1
        self._end(crossing, below.state, below.error)

    def _lost(self, crossing: _Crossing) -> None:
        self._end(
            crossing, OperationState.FAILED, PeerLostError("the connection to the peer is gone")
        )

    def _end(
        self, crossing: _Crossing, state: OperationState, error: BatonError | None = None
    ) -> None:
        operation = crossing.operation
        if crossing.loan is not None:
            operation.content = crossing.loan.content
            self._read.append(crossing.loan)
        self._below.pop(operation, None)
        self._num_pending -= 1
        operation.finish(state, error)
        self._ended.append(operation)

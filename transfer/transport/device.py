"""Transport for pools in device memory, on top of one for host memory.

Messages pass through pinned buffers:

    sending     a buffer is free ─▶ records copied there ─▶ sent ─▶ DONE: digested there ─▶ buffer free
    receiving   message is there and a buffer free ─▶ received ─▶ copied to the records ─▶ DONE: digested ─▶ free

If the inner transport can access the device (UCX with cuda_copy and cuda_ipc), it gets the records
themselves. Then records are copied to the host only for their digest, while they are being sent and
after they were received.

An operation is PENDING until its last copy is over. So the guarantees of the inner transport also
hold for the device's memory: an operation that has ended accesses no memory, and a session whose
operations have all ended is drained. Messages in host memory (trailers) pass through unchanged. The
bytes on the wire are the same as those of host pools, so each side may place its pools on either.

A copy that the device does not end cannot be ended otherwise. Then the transport fails as a whole,
and the process with it.
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

# A copy of one item takes a few microseconds, a sleep at least 50. So the thread sleeps only after
# the oldest copy has taken longer than this: the device's copy engine is busy then.
COPY_SPIN_S = 50e-6
COPY_POLL_S = 50e-6
COPY_LIMIT_S = 10.0


class Route(StrEnum):
    """Path of a device's bytes."""

    PINNED = "pinned"  # through host buffers, which any transport can access
    DIRECT = "direct"  # the inner transport can access the device's memory


class Loan(Protocol):
    """Pinned host buffer, borrowed for one message. Copies are asynchronous, one at a time."""

    @property
    def content(self) -> memoryview:
        """Return the buffer's memory, with the requested number of bytes."""
        ...

    def fetch(self, source: Buffer) -> None:
        """Start to copy from the device into the buffer."""
        ...

    def store(self, target: Buffer) -> None:
        """Start to copy from the buffer to the device."""
        ...

    def is_settled(self) -> bool:
        """Return whether the copy is over. Never waits."""
        ...

    def release(self) -> None:
        """Return the buffer; the copy must be over."""
        ...


class Staging(Protocol):
    """Pinned buffers of one device, each large enough for any message of its pools."""

    @property
    def num_buffers(self) -> int:
        """Return the number of buffers, at least 2."""
        ...

    def check_thread(self) -> None:
        """Raise InternalError in a thread that was not prepared for this device."""
        ...

    def borrow(self, num_bytes: int) -> Loan | None:
        """Borrow a buffer, or return None while all are in use."""
        ...


class _Crossing:
    """One message between a device's records and the inner transport."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.loan: Loan | None = None
        self.copying_since_s = 0.0
        self.is_copied = False
        self.sent: Operation | None = None  # operation of the inner transport, once it has ended

    @property
    def lent(self) -> Loan:
        assert self.loan is not None
        return self.loan


class DeviceTransport:
    """`Transport` for device memory.

    Sends use at most half of the buffers, so that two pools that send to each other cannot
    deadlock.
    """

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
        self._num_sends = 0  # number of sends with a buffer
        self._max_sends = staging.num_buffers // 2
        self._unsent: deque[_Crossing] = deque()  # sends that wait for a buffer
        self._fetching: deque[_Crossing] = deque()
        # Copies to the device, or from it for the digest of received records.
        self._storing: deque[_Crossing] = deque()
        self._received: deque[_Crossing] = deque()  # received on the device, waiting for a buffer
        self._sending: dict[Operation, _Crossing] = {}  # by inner operation
        self._receiving: dict[Operation, _Crossing] = {}
        self._below: dict[Operation, Operation] = {}  # receives: outer to inner operation
        self._ended: list[Operation] = []
        # Buffers of reported operations, which may be read until the next `progress`.
        self._read: list[Loan] = []
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
        """Implement `Transport.progress`.

        Raises InternalError if a copy exceeds its time limit, because the device hangs.
        """
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
        ended = self._ended
        self._ended = []
        return ended

    def wait(self, timeout_s: float) -> None:
        if self._fetching or self._storing:
            self._wait_for_copies(timeout_s)
        elif not self._ended:
            self._inner.wait(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        """Implement `Transport.close`.

        Raises InternalError if copies do not end within the limit: they may still access the
        device's memory.
        """
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
            loan.release()  # the loan of a direct send is in both
        self._read.clear()
        self._sending.clear()
        self._receiving.clear()

    def _fetch(self) -> None:
        """Start the copies of sends in order while buffers are free."""
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
        """Start the copies from which digests are computed."""
        while self._received:
            self._received[0].loan = self._staging.borrow(self._received[0].operation.num_bytes)
            if self._received[0].loan is None:
                return
            self._start_fetch(self._received.popleft(), self._storing)

    def _start_fetch(self, crossing: _Crossing, copies: deque[_Crossing]) -> None:
        crossing.lent.fetch(crossing.operation.buffer)
        crossing.copying_since_s = self._clock.now()
        copies.append(crossing)

    def _send_below(self, crossing: _Crossing, buffer: Buffer) -> None:
        operation = crossing.operation
        self._sending[self._inner.send(operation.peer, operation.tag, buffer)] = crossing

    def _wait_for_copies(self, timeout_s: float) -> None:
        """Wait a little, because the end of a copy wakes no thread."""
        oldest_s = min(
            copies[0].copying_since_s for copies in (self._fetching, self._storing) if copies
        )
        if self._clock.now() - oldest_s < COPY_SPIN_S:
            time.sleep(0)  # unlike sched_yield, it lets the engine's thread have the interpreter
        else:
            time.sleep(min(timeout_s, COPY_POLL_S))

    def _settled(self, copies: deque[_Crossing]) -> list[_Crossing]:
        """Remove and return the crossings whose copies are over; copies end in start order."""
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
        """Process an ended operation of the inner transport.

        It continues an outer operation, or is passed on unchanged.
        """
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
            self._received.append(crossing)
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

"""The transport between processes: UCX tag messages through UCXX's core API, without asyncio and
without threads.

Receives are not posted to UCX ahead of time. Every message shows up as unexpected first; it is
probed, its length compared, and only then received straight into the caller's memory. Messages
above 8 KiB are rendezvous, so nothing has been copied when the probe sees them. This gives what
UCX's posted receives cannot: a receive that is not matched can be given up at once, and a late or
foreign message is refused with not a byte written while its sender still completes.

Measured (UCX 1.21, host memory, SIGKILL or SIGSTOP of the source in mid-message, shared memory and
TCP): closing the endpoint with `close_blocking` ends every matched receive within a millisecond,
also those that are not tied to the endpoint, and no byte is written afterwards even when the
stopped source continues. The non-blocking `close` does not end them. Without a close, a killed
source ends its receives at once over TCP and within about a second over shared memory (keepalive;
the process must have been reaped by its parent).
"""

import logging
import os
import time
from collections.abc import Callable, Mapping

from engine.memory.layout import Buffer
from runtime.clock import Clock
from runtime.errors import BatonError, HandoffError, PeerLostError
from transfer.transport.matching import MessageMatcher
from transfer.transport.protocol import Berth, Operation, OperationState, Peer, Wakeup
from transfer.transport.refusals import RefusalReason, Refusals
from transfer.ucx.address import frame_address, unframe_address
from transfer.ucx.api import UcxEndpoint, UcxLibrary, UcxProbe, UcxRequest
from transfer.ucx.binding import ANYWHERE, UcxBinding
from transfer.ucx.settings import (
    HANDOFF_OPTIONS,
    RENDEZVOUS_BYTES,
    TransportProfile,
    close_endpoint,
    create_worker,
)
from transfer.ucx.silence import PEER_SILENCE_S, SilentPeers
from transfer.ucx.sockets import SocketLimits

logger = logging.getLogger(__name__)

SPIN_S = 50e-6
SHARED_CORE_S = 30e-6
ACTIVE_WAIT_S = 1e-3  # shared memory does not report that a full queue has room again
PEER_CHECK_S, SOCKET_CHECK_S = 0.02, 1.0
MAX_PROGRESS_STEPS = 64


class UcxPeer:
    """An endpoint to another process's worker."""

    def __init__(self, address: bytes, endpoint: UcxEndpoint) -> None:
        self.address = address
        self.endpoint = endpoint
        self._is_closed = False

    @property
    def alive(self) -> bool:
        return not self._is_closed and bool(self.endpoint.alive)

    def close(self) -> None:
        """Force the endpoint closed: outstanding requests end, late bytes have nowhere to go."""
        if not self._is_closed:
            self._is_closed = True
            close_endpoint(self.endpoint)


class UcxTransport:
    """See `Transport`."""

    def __init__(
        self,
        *,
        profile: TransportProfile,
        clock: Clock,
        binding: UcxBinding = ANYWHERE,
        spin_s: float = SPIN_S,
        on_refused: Callable[[RefusalReason], object] = lambda reason: None,
    ) -> None:
        """`on_refused` is given why a message was not taken. Raises ConfigError when UCX cannot
        work here."""
        self._ucx = UcxLibrary()
        self._sockets = SocketLimits()
        with self._sockets.listening():
            self._context, self._worker = create_worker(
                self._ucx, profile, "handoff", HANDOFF_OPTIONS, binding
            )
        self.address = frame_address(self._worker.address.tobytes())
        self._clock = clock
        self._spin_s = spin_s
        self._refusals = Refusals("items of handoffs", on_refused)
        self._matcher: MessageMatcher[UcxProbe] = MessageMatcher(self._refusals)
        self._peers: dict[bytes, UcxPeer] = {}
        self._active: list[tuple[Operation, UcxRequest]] = []
        self._discards: list[UcxRequest] = []
        self._ended: list[Operation] = []
        self._num_pending = 0
        self._next_peer_check_s = 0.0
        self._next_socket_check_s = 0.0
        self._moved: set[Peer] = set()  # peers of which a message has ended since the last check
        self._silent: SilentPeers[Peer] = SilentPeers(clock)
        self._any_tag = (self._ucx.tag(0), self._ucx.no_tag_mask)
        self._scratch = self._ucx.array(bytearray(1))
        self._wakeup = Wakeup()
        self._wakeup.watch(self._worker.epoll_file_descriptor)

    @property
    def num_pending(self) -> int:
        return self._num_pending

    @property
    def refused(self) -> Mapping[RefusalReason, int]:
        """How many messages were refused, by reason."""
        return self._refusals.counts

    def connect(self, address: bytes) -> UcxPeer:
        peer = self._peers.get(address)
        if peer is not None and peer.alive:
            return peer
        if peer is not None:
            self.close_peer(peer)
        raw = unframe_address(address)
        try:
            with self._sockets.connecting():
                endpoint = self._worker.create_endpoint_from_worker_address(
                    self._ucx.address(raw), endpoint_error_handling=True
                )
        except (self._ucx.error, OSError) as error:
            raise PeerLostError(f"cannot connect to the peer's transfer worker: {error}") from error
        peer = self._peers[address] = UcxPeer(address, endpoint)
        return peer

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        assert isinstance(peer, UcxPeer)
        operation = Operation(peer, tag, buffer)
        self._num_pending += 1
        if not peer.alive:
            self._end(
                operation,
                OperationState.FAILED,
                PeerLostError("the connection to the peer is gone"),
            )
            return operation
        self._active.append(
            (operation, peer.endpoint.tag_send(self._ucx.array(buffer), self._ucx.tag(tag)))
        )
        return operation

    def post_receive(self, peer: Peer, tag: int, buffer: Buffer | Berth) -> Operation:
        operation = Operation(peer, tag, buffer)
        self._num_pending += 1
        if not peer.alive:
            self._end(
                operation,
                OperationState.FAILED,
                PeerLostError("the connection to the peer is gone"),
            )
            return operation
        self._matcher.post(operation)
        return operation

    def cancel_receive(self, operation: Operation) -> None:
        is_cancelled, discarded = self._matcher.cancel(operation)
        self._discard(discarded)
        if is_cancelled:
            self._end(operation, OperationState.CANCELLED)

    def retire(self, prefix: int) -> None:
        self._matcher.retire(prefix)

    def close_peer(self, peer: Peer) -> None:
        assert isinstance(peer, UcxPeer)
        peer.close()
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        lost, discarded = self._matcher.cancel_peer(peer)
        self._discard(discarded)
        for operation in lost:
            self._end(
                operation,
                OperationState.FAILED,
                PeerLostError("the connection to the peer is gone"),
            )

    def progress(self) -> list[Operation]:
        for _ in range(MAX_PROGRESS_STEPS):
            if not self._worker.progress_once():
                break
        while (message := self._worker.tag_probe(*self._any_tag, remove=True)).matched:
            operation, discarded = self._matcher.arrive(
                message.sender_tag.value, message.length, message
            )
            if operation is not None:
                self._take(operation, message)
            self._discard(discarded)
        for operation, message in self._matcher.fed():
            self._take(operation, message)
        self._collect()
        now = self._clock.now()
        if now >= self._next_peer_check_s:
            self._next_peer_check_s = now + PEER_CHECK_S
            for peer in [peer for peer in self._peers.values() if not peer.alive]:
                self.close_peer(peer)
            self._cut_off_silent_peers()
        if now >= self._next_socket_check_s:
            self._next_socket_check_s = now + SOCKET_CHECK_S
            self._sockets.apply()
        ended, self._ended = self._ended, []
        self._num_pending -= len(ended)
        return ended

    def _cut_off_silent_peers(self) -> None:
        """So that what is under way ends, and goes on elsewhere."""
        moved, self._moved = self._moved, set()
        for peer in self._silent.over_limit(
            {operation.peer for operation, _ in self._active if operation.peer.alive}, moved
        ):
            logger.warning(
                "a peer has moved no byte for %g s though messages are under way: it is cut off",
                PEER_SILENCE_S,
            )
            self.close_peer(peer)

    def wait(self, timeout_s: float) -> None:
        if self._ended or self._wakeup.is_set:
            self._wakeup.clear()
            return
        if self._active and self._spin():
            return
        if self._worker.arm():
            self._wakeup.wait(min(timeout_s, ACTIVE_WAIT_S) if self._active else timeout_s)

    def _spin(self) -> bool:
        """Look out for a moment without sleeping: the next message is microseconds away, and going
        to sleep would cost more than it saves. Whether there is something to do."""
        now = self._clock.now()
        spin_until_s = now + self._spin_s
        while now < spin_until_s:
            if self._worker.progress_once() or self._wakeup.is_set:
                return True
            os.sched_yield()  # the peer may need this very core to go on
            yielded_at_s, now = now, self._clock.now()
            if now - yielded_at_s > SHARED_CORE_S:
                # Another process works on this core, likely the peer. Schedulers leave two that
                # only yield to each other where they are, but wake a sleeper on an idle core.
                time.sleep(SHARED_CORE_S)
        return False

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self.close_peer(peer)
        self._discard(self._matcher.clear())
        self._worker.progress()
        self._active.clear()
        self._discards.clear()
        self._wakeup.close()

    def _take(self, operation: Operation, message: UcxProbe) -> None:
        if message.length != operation.num_bytes:
            self._end(
                operation,
                OperationState.FAILED,
                HandoffError(
                    f"a message of {message.length} bytes came for a receive of {operation.num_bytes}"
                ),
            )
            self._discard([message])
            return
        request = self._worker.tag_recv_with_handle(self._ucx.array(operation.buffer), message)
        self._active.append((operation, request))

    def _discard(self, messages: list[UcxProbe]) -> None:
        # Into one byte: UCX drops what does not fit, and reports to a rendezvous sender that it is
        # done.
        self._discards += [
            self._worker.tag_recv_with_handle(self._scratch, message) for message in messages
        ]

    def _collect(self) -> None:
        """Sort out the requests that have ended."""
        still_active = []
        for operation, request in self._active:
            if request.completed:
                self._finish(operation, request)
            else:
                still_active.append((operation, request))
        self._active = still_active
        if self._discards:
            self._discards = [request for request in self._discards if not request.completed]

    def _finish(self, operation: Operation, request: UcxRequest) -> None:
        if (
            operation.num_bytes >= RENDEZVOUS_BYTES
        ):  # what is smaller may have got no further than into a queue
            self._moved.add(operation.peer)
        try:
            request.check_error()
        except self._ucx.error as error:
            self._end(
                operation,
                OperationState.FAILED,
                PeerLostError(f"the connection to the peer failed: {error}"),
            )
        else:
            self._end(operation, OperationState.DONE)

    def _end(
        self, operation: Operation, state: OperationState, error: BatonError | None = None
    ) -> None:
        operation.finish(state, error)
        self._ended.append(operation)

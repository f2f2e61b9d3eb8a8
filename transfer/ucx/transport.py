"""Transport between processes: UCX tag messages with UCXX's core API, without asyncio or threads.

Receives are not posted to UCX in advance. Every message first appears as unexpected; it is probed,
its length is compared, and only then is it received directly into the caller's memory. Messages
above 8 KiB use rendezvous, so no byte has been copied when the probe sees them. This has two
advantages over UCX's posted receives. An unmatched receive can be cancelled at once. A late or
foreign message is rejected before it writes a byte, while its sender still completes.

Measured (UCX 1.21, host memory, SIGKILL or SIGSTOP of the source in the middle of a message, shared
memory and TCP): closing the endpoint with `close_blocking` ends every matched receive within a
millisecond, also those that are not tied to the endpoint. No byte is written afterwards, even when
the stopped source continues. The non-blocking `close` does not end them. Without a close, a killed
source ends its receives at once over TCP and within about a second over shared memory (keepalive;
the process must have been reaped by its parent).

An endpoint that UCX itself found broken cannot be closed any more (UCXX then ignores `close`), and a
send on it may never complete. Such a send counts as failed: it only reads memory, and the peer
accepts nothing that it does not authenticate. A receive does not end before UCX says so.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.memory.layout import Buffer
from runtime.clock import Clock
from runtime.errors import BatonError, HandoffError, IncompatiblePeerError, PeerLostError
from transfer.transport.binding import ANYWHERE, NetworkBinding
from transfer.transport.matching import MessageMatcher
from transfer.transport.protocol import Berth, Operation, OperationState, Peer, Wakeup
from transfer.transport.refusals import RefusalReason, Refusals
from transfer.ucx.address import frame_address, unframe_address
from transfer.ucx.api import UcxEndpoint, UcxLibrary, UcxProbe, UcxRequest
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
PEER_CHECK_S = 0.02
SOCKET_CHECK_S = 1.0
MAX_PROGRESS_STEPS = 64


class UcxPeer:
    """Endpoint to another process's worker."""

    def __init__(self, address: bytes, endpoint: UcxEndpoint) -> None:
        self.address = address
        self.endpoint = endpoint
        self._is_closed = False

    @property
    def alive(self) -> bool:
        return not self._is_closed and bool(self.endpoint.alive)

    def close(self) -> None:
        """Force the endpoint closed: pending requests end, and late bytes are dropped."""
        if not self._is_closed:
            self._is_closed = True
            close_endpoint(self.endpoint)


@dataclass(eq=False, slots=True)
class _Active:
    """Operation that UCX has not completed."""

    operation: Operation
    request: UcxRequest
    is_send: bool


class UcxTransport:
    """`Transport` over UCX."""

    def __init__(
        self,
        *,
        profile: TransportProfile,
        clock: Clock,
        binding: NetworkBinding = ANYWHERE,
        spin_s: float = SPIN_S,
        on_refused: Callable[[RefusalReason], object] = lambda reason: None,
    ) -> None:
        """Create the transport.

        `on_refused` gets the reason of each rejected message. Raises ConfigError if UCX cannot work
        here.
        """
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
        self._active: list[_Active] = []
        self._orphans: list[_Active] = []  # sends that have failed here and not in UCX
        self._discards: list[UcxRequest] = []
        self._ended: list[Operation] = []
        self._num_pending = 0
        self._next_peer_check_s = 0.0
        self._next_socket_check_s = 0.0
        self._moved: set[Peer] = set()  # peers with a message that ended since the last check
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
        """Return the number of rejected messages by reason."""
        return self._refusals.counts

    def connect(self, address: bytes) -> UcxPeer:
        peer = self._peers.get(address)
        if peer is not None and peer.alive:
            return peer
        if peer is not None:
            self.close_peer(peer)
        try:
            raw = unframe_address(address)
        except ValueError as error:
            raise IncompatiblePeerError(str(error)) from None
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
        request = peer.endpoint.tag_send(self._ucx.array(buffer), self._ucx.tag(tag))
        self._active.append(_Active(operation, request, is_send=True))
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
        self._collect()
        for operation in [*lost, *self._give_up_sends(peer)]:
            self._end(
                operation,
                OperationState.FAILED,
                PeerLostError("the connection to the peer is gone"),
            )

    def _give_up_sends(self, peer: UcxPeer) -> list[Operation]:
        """Return the sends to a closed peer that UCX has not completed; keep their memory for it."""
        kept: list[_Active] = []
        given_up: list[_Active] = []
        for active in self._active:
            is_lost = active.is_send and active.operation.peer is peer
            (given_up if is_lost else kept).append(active)
        self._active = kept
        self._orphans += given_up
        return [active.operation for active in given_up]

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
        ended = self._ended
        self._ended = []
        self._num_pending -= len(ended)
        return ended

    def _cut_off_silent_peers(self) -> None:
        """Close the connections of silent peers, so that their requests move elsewhere."""
        moved = self._moved
        self._moved = set()
        for peer in self._silent.over_limit(
            {active.operation.peer for active in self._active if active.operation.peer.alive}, moved
        ):
            logger.warning(
                "closing the connection to a peer that moved no byte for %g s although messages are in flight",
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
        """Poll for a moment without sleeping; return whether there is work.

        The next message is microseconds away, so that a sleep would cost more than it saves.
        """
        now = self._clock.now()
        spin_until_s = now + self._spin_s
        while now < spin_until_s:
            if self._worker.progress_once() or self._wakeup.is_set:
                return True
            os.sched_yield()  # the peer may need this core to continue
            yielded_at_s = now
            now = self._clock.now()
            if now - yielded_at_s > SHARED_CORE_S:
                # Another process uses this core, probably the peer. Schedulers leave two processes
                # that only yield to each other on one core, but wake a sleeper on an idle one.
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
        self._orphans.clear()
        self._discards.clear()
        self._wakeup.close()

    def _take(self, operation: Operation, message: UcxProbe) -> None:
        if message.length != operation.num_bytes:
            self._end(
                operation,
                OperationState.FAILED,
                HandoffError(
                    f"a message of {message.length} bytes arrived for a receive of {operation.num_bytes}"
                ),
            )
            self._discard([message])
            return
        request = self._worker.tag_recv_with_handle(self._ucx.array(operation.buffer), message)
        self._active.append(_Active(operation, request, is_send=False))

    def _discard(self, messages: list[UcxProbe]) -> None:
        # Receive into one byte: UCX drops the rest, and reports completion to a rendezvous sender.
        self._discards += [
            self._worker.tag_recv_with_handle(self._scratch, message) for message in messages
        ]

    def _collect(self) -> None:
        """Process the requests that have ended."""
        still_active = []
        for active in self._active:
            if active.request.completed:
                self._finish(active.operation, active.request)
            else:
                still_active.append(active)
        self._active = still_active
        if self._discards:
            self._discards = [request for request in self._discards if not request.completed]
        if self._orphans:
            self._orphans = [orphan for orphan in self._orphans if not orphan.request.completed]

    def _finish(self, operation: Operation, request: UcxRequest) -> None:
        # A smaller message may only have entered a queue.
        if operation.num_bytes >= RENDEZVOUS_BYTES:
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

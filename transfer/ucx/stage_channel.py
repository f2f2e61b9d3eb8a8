"""Frames between the stages of a pool over UCX: the `FrameChannel` between processes.

Frames of any size are sent eagerly: `send` gives the frame to UCX and returns. So a stage that
continues to compute (and does not progress UCX meanwhile) does not delay the stage that waits for
its frame. A thread sends the part that does not fit into the queues between the two
(`pending_sends.py`). `send` waits only if many large frames are pending.

While batches are in flight, a stage spins for a frame (`SpinThenSleep`), because a wake-up costs
more than most waits between busy stages. A stage that waits for longer sleeps.

Only frames of the pool's current forming are accepted (`transfer/transport/forming.py`). A frame
with an unknown tag is discarded unread and counted. A frame with a valid tag that was received
before is discarded too. A damaged frame, or one with missing predecessors, fails the stage that
sent it. No frame can arrive before its receiver is connected: the leader sends only when all
members are.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from runtime.errors import DeadlineError, IntegrityError, InternalError, PeerLostError
from transfer.transport.binding import ANYWHERE, NetworkBinding
from transfer.transport.forming import HEAD_BYTES, EarlierTags, Forming, FrameSeals
from transfer.transport.protocol import Wakeup
from transfer.transport.refusals import RefusalReason, Refusals
from transfer.transport.spin import RestlessRounds, SpinThenSleep
from transfer.ucx.address import frame_address, unframe_address
from transfer.ucx.api import UcxEndpoint, UcxLibrary, UcxProbe, UcxRequest
from transfer.ucx.pending_sends import PendingSend, PendingSends
from transfer.ucx.settings import (
    STAGE_CHANNEL_OPTIONS,
    TransportProfile,
    close_endpoint,
    create_worker,
)

SEND_SPIN_S = 50e-6
SEND_WAIT_S = 1e-4  # shared memory does not report that a full queue has room again
RECEIVE_WAIT_S = 0.1  # interval between checks of the peers' health
MAX_QUEUED_FRAMES = 1024
PENDING_BYTES = 64 << 20  # limit of pending frames, or two of the largest
_INTEGRITY = {
    RefusalReason.DAMAGED: "authenticator",
    RefusalReason.SKIPPED: "others before it are missing",
}
# Steps of UCX's progress between two checks for frames, so that a flood of foreign messages does
# not block the owner's wait.
MAX_STEPS = 256


class UcxStageChannel:
    """`FrameChannel` over UCX.

    Belongs to the engine thread, except for `wake`, `fail` and `address`.
    """

    head_bytes = HEAD_BYTES

    def __init__(
        self,
        *,
        rank: int,
        max_frame_bytes: int,
        profile: TransportProfile,
        binding: NetworkBinding = ANYWHERE,
        on_sent: Callable[[int], object] = lambda num_bytes: None,
        on_refused: Callable[[RefusalReason], object] = lambda reason: None,
    ) -> None:
        """Create the channel.

        `on_sent` gets the number of bytes of each sent frame, `on_refused` the reason of each
        rejected one. Raises ConfigError if UCX cannot work here.
        """
        self._rank = rank
        self._on_sent = on_sent
        self._max_frame_bytes = max_frame_bytes
        self._refusals = Refusals("frames between stages", on_refused)
        self._spinner = SpinThenSleep()
        self._ucx = UcxLibrary()
        self._context, self._worker = create_worker(
            self._ucx, profile, "stage channel", STAGE_CHANNEL_OPTIONS, binding
        )
        self._pending = PendingSends(
            self._worker, max_bytes=max(PENDING_BYTES, 2 * max_frame_bytes)
        )
        self.address = frame_address(self._worker.address.tobytes())
        self._any_tag = (self._ucx.tag(0), self._ucx.no_tag_mask)
        self._epoch = 0
        self._seals: FrameSeals | None = None
        self._earlier = EarlierTags()
        self._endpoints: dict[int, tuple[bytes, UcxEndpoint]] = {}
        self._inboxes: dict[int, deque[UcxProbe]] = {}
        self._discards: list[UcxRequest] = []
        self._scratch = self._ucx.array(bytearray(1))
        self._buffer = bytearray(1)
        self._whole_buffer = self._ucx.array(self._buffer)
        self._lost: dict[int, str] = {}
        self._lost_lock = threading.Lock()
        self._wakeup = Wakeup()
        self._wakeup.watch(self._worker.epoll_file_descriptor)

    @property
    def refused(self) -> Mapping[RefusalReason, int]:
        """Return the number of rejected frames by reason."""
        return self._refusals.counts

    def connect(self, addresses: Sequence[bytes], forming: Forming) -> None:
        """Form the pool and end the previous forming.

        `addresses` are by rank, including this stage's own.

        Raises:
            PeerLostError: an address is not usable here.
            InternalError: the epoch is not newer than the current one.
        """
        if not self._epoch < forming.epoch:
            raise InternalError(f"pool epoch must be above {self._epoch}, got {forming.epoch}")
        with self._pending.using:
            self._form(addresses, forming)

    def _form(self, addresses: Sequence[bytes], forming: Forming) -> None:
        self._pending.abandon()
        self._dispatch()
        for frames in self._inboxes.values():
            self._discard(frames)
        self._inboxes = {rank: deque() for rank in range(len(addresses)) if rank != self._rank}
        if self._seals is not None:
            self._earlier.add(self._seals.tags)
        self._epoch, self._seals = forming.epoch, FrameSeals(forming, self._rank)
        for rank, (address, endpoint) in list(self._endpoints.items()):
            if rank >= len(addresses) or address != addresses[rank] or not endpoint.alive:
                close_endpoint(self._endpoints.pop(rank)[1])
        with self._lost_lock:
            self._lost.clear()
        for rank in self._inboxes:
            if rank not in self._endpoints:
                self._endpoints[rank] = (addresses[rank], self._connect(addresses[rank]))

    def send(self, rank: int, frame: bytearray, *, timeout_s: float) -> None:
        """Send a frame and take ownership of it: the caller must not change it any more.

        Raises PeerLostError if the peer is gone, and InternalError for a frame over the limit.
        Raises DeadlineError, now or in a later call, if the peer did not accept a frame within its
        `timeout_s`. Then the connection is cut, so that the frame is no longer read.
        """
        if len(frame) > self._max_frame_bytes:
            raise InternalError(
                f"a frame of {len(frame)} bytes to stage {rank}; the limit is {self._max_frame_bytes}"
            )
        if self._seals is None:
            raise PeerLostError(f"stage {rank} is not connected: the pool has not formed yet")
        with self._pending.using:
            self._check(rank)
            deadline_s = time.monotonic() + timeout_s  # a float, as every frame has one
            while self._pending.any and not self._pending.has_room(len(frame)):
                self._dispatch()
                self._check(rank)
                self._pause(deadline_s)
            self.put(
                rank,
                self._seals.seal(rank, frame),
                frame,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
            )
        self._on_sent(len(frame))

    def put(
        self, rank: int, tag: int, frame: bytearray, *, deadline_s: float, timeout_s: float
    ) -> None:
        """Give a sealed frame to UCX. Part of `send`; tests override it to damage sealed frames."""
        request = self._endpoints[rank][1].tag_send(self._ucx.array(frame), self._ucx.tag(tag))
        spin_until_s = time.monotonic() + SEND_SPIN_S
        while not request.completed and (
            self._worker.progress_once() or time.monotonic() < spin_until_s
        ):
            pass
        if request.completed:
            self._check_request(rank, request)
        else:
            self._pending.add(PendingSend(rank, request, frame, deadline_s, timeout_s))

    def receive(self, rank: int, *, timeout_s: float) -> memoryview | None:
        """Return the next frame from `rank` without its head, valid until the next call.

        Returns None if no frame arrived in time or `wake` was called.

        Raises:
            PeerLostError: the stage is gone; frames that arrived before the loss are still
                returned.
            IntegrityError: the frame is not the one that was sent next. The stage counts as lost.
            DeadlineError: as in `send`.
        """
        deadline_s = time.monotonic() + timeout_s  # a float, as every frame has one
        with self._pending.using:
            while True:
                if not self._inboxes.get(rank):
                    self._dispatch()
                if not self._inboxes.get(rank) and not self._wait(rank, deadline_s):
                    return None
                frame = self._take(rank, self._inboxes[rank].popleft())
                if self._is_due(rank, frame):
                    return frame[HEAD_BYTES:]

    def _is_due(self, rank: int, frame: memoryview) -> bool:
        """Return whether the frame is the next one; others are discarded. Raises IntegrityError."""
        assert self._seals is not None, "no frame arrives before the pool has formed"
        reason = self._seals.open(rank, frame)
        if reason is None:
            return True
        what = f"a frame of {len(frame)} bytes from stage {rank}"
        self._refusals.add(reason, what)
        if reason is RefusalReason.REPLAYED:
            return False
        self._lose(
            rank,
            f"stage {rank} sent a damaged frame"
            if reason is RefusalReason.DAMAGED
            else f"frames of stage {rank} are missing",
        )
        raise IntegrityError(f"{what}: what arrived is not what was sent ({_INTEGRITY[reason]})")

    def _wait(self, rank: int, deadline_s: float) -> bool:
        """Wait for a frame from `rank`; return False at the deadline or after `wake`."""
        self._spinner.begin()
        restless = RestlessRounds()
        while True:
            self._check(rank)
            if self._wakeup.is_set:
                self._wakeup.clear()
                self._check(rank)
                return False
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                self._spinner.timed_out()
                return False
            if self._spinner.lasts():
                os.sched_yield()
            elif self._pending.any:
                self._wakeup.sleep(min(SEND_WAIT_S, remaining_s))
            elif restless.is_nap_due:
                restless.nap(remaining_s)
            else:
                restless.add()
                if self._worker.arm():
                    self._wakeup.sleep(min(RECEIVE_WAIT_S, remaining_s))
            if self._dispatch():
                restless.clear()
            if self._inboxes.get(rank):
                self._spinner.succeeded()
                return True

    def check(self, rank: int) -> None:
        """Raise PeerLostError if this stage is known to be gone. Its arrived frames remain queued."""
        with self._pending.using:
            self._dispatch()
            self._check(rank)

    def wake(self) -> None:
        """Make a `receive` that waits in the owner's thread return early. Thread-safe."""
        self._wakeup.set()

    def fail(self, rank: int, reason: str) -> None:
        """Mark a stage as lost by the membership: the owner's waits raise PeerLostError.

        Thread-safe.
        """
        with self._lost_lock:
            self._lost.setdefault(rank, reason)
        self._wakeup.set()

    def close(self) -> None:
        self._pending.close()
        for _, endpoint in self._endpoints.values():
            close_endpoint(endpoint)
        self._endpoints.clear()
        for frames in self._inboxes.values():
            self._discard(frames)
        self._inboxes.clear()
        self._worker.progress()
        self._wakeup.close()

    def _connect(self, address: bytes) -> UcxEndpoint:
        try:
            return self._worker.create_endpoint_from_worker_address(
                self._ucx.address(unframe_address(address)), endpoint_error_handling=True
            )
        except (self._ucx.error, ValueError) as error:
            raise PeerLostError(f"cannot connect to a stage: {error}") from error

    def _dispatch(self) -> bool:
        """Progress UCX and sort arrived frames; return False if UCX had no work."""
        moved = False
        for _ in range(MAX_STEPS):
            if not self._worker.progress_once():
                break
            moved = True
        while (frame := self._worker.tag_probe(*self._any_tag, remove=True)).matched:
            self._sort(frame.sender_tag.value, frame)
        if self._discards:
            self._discards = [request for request in self._discards if not request.completed]
        if self._pending.any:
            self._look_at_sends()
        return moved

    def _look_at_sends(self) -> None:
        """Check the pending sends.

        Raises PeerLostError if one failed, DeadlineError if one was not accepted in time.
        """
        for send in self._pending.take_completed():
            self._check_request(send.rank, send.request)
        overdue = self._pending.overdue()
        if overdue is not None:
            text = (
                f"stage {overdue.rank} did not accept a frame of {len(overdue.frame)} bytes within "
                f"{overdue.timeout_s:g} s"
            )
            self._lose(overdue.rank, text)
            raise DeadlineError(text)

    def _pause(self, deadline_s: float) -> None:
        """Sleep briefly. Raises DeadlineError after the deadline."""
        if time.monotonic() >= deadline_s:
            raise DeadlineError("too many frames are pending because stages do not accept them")
        time.sleep(SEND_WAIT_S)

    def _sort(self, tag: int, frame: UcxProbe) -> None:
        rank = None if self._seals is None else self._seals.sender(tag)
        if rank is None:
            self._refusals.add(self._reason(tag), f"{frame.length} bytes under tag {tag:#018x}")
            self._discard([frame])
            return
        inbox = self._inboxes[rank]
        if frame.length > self._max_frame_bytes or len(inbox) >= MAX_QUEUED_FRAMES:
            what = f"a frame of {frame.length} bytes after {len(inbox)} others"
            self._refusals.add(RefusalReason.OVERSIZED, f"{what} from stage {rank}")
            self._discard([frame])
            self._lose(
                rank,
                f"stage {rank} sent {what}; the limits are {self._max_frame_bytes} bytes and "
                f"{MAX_QUEUED_FRAMES} frames",
            )
        else:
            inbox.append(frame)

    def _reason(self, tag: int) -> RefusalReason:
        """Return the reason to reject a frame whose tag no member uses to send to this one."""
        if self._seals is not None and tag in self._seals.tags:
            return RefusalReason.CROSSED
        return RefusalReason.EARLIER if tag in self._earlier else RefusalReason.FOREIGN

    def _take(self, rank: int, frame: UcxProbe) -> memoryview:
        """Receive a frame that has begun to arrive."""
        length = frame.length
        if len(self._buffer) < length:
            self._buffer = bytearray(min(self._max_frame_bytes, 2 * length))
            self._whole_buffer = self._ucx.array(self._buffer)
        request = self._worker.tag_recv_with_handle(self._whole_buffer, frame)
        while not request.completed:
            if not self._worker.progress_once():
                os.sched_yield()  # the sender may need this core to continue
                self._check(rank)
        self._check_request(rank, request)
        return memoryview(self._buffer)[:length]

    def _discard(self, frames: Sequence[UcxProbe] | deque[UcxProbe]) -> None:
        # Receive into one byte: UCX drops the rest.
        self._discards += [
            self._worker.tag_recv_with_handle(self._scratch, frame) for frame in frames
        ]

    def _check_request(self, rank: int, request: UcxRequest) -> None:
        try:
            request.check_error()
        except self._ucx.error as error:
            self._lose(rank, f"the connection to stage {rank} failed: {error}")
            self._check(rank)

    def _lose(self, rank: int, reason: str) -> None:
        with self._lost_lock:
            self._lost.setdefault(rank, reason)
        if rank in self._endpoints:
            close_endpoint(self._endpoints.pop(rank)[1])
        self._pending.abandon(rank)

    def _check(self, rank: int) -> None:
        """Raise PeerLostError if this stage is known to be gone."""
        if rank in self._endpoints and not self._endpoints[rank][1].alive:
            self._lose(rank, f"the connection to stage {rank} has ended")
        if rank in self._lost:
            self._lose(rank, self._lost[rank])
            raise PeerLostError(self._lost[rank])
        if rank not in self._endpoints:
            raise PeerLostError(f"stage {rank} is not part of pool epoch {self._epoch}")

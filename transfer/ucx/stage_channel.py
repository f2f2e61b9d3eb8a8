"""Frames between the stages of a pool over UCX: the `FrameChannel` between processes.

Frames are sent eagerly, whatever their size: `send` gives the frame to UCX and returns, so a stage that goes on to
compute (and does not progress UCX meanwhile) does not hold up the one that waits for its frame. What does not fit into
the queues between the two goes on beside (`pending_sends.py`); only when many large frames wait does `send` wait, too.

While batches are in flight a frame is waited for awake (`Vigil`): to be woken costs more than most waits between stages
that are busy. A stage that waits for longer sleeps.

Tags carry the pool epoch and the sender's rank. Frames of an older epoch are thrown away; those of a newer one (it
reached a peer earlier) wait until it reaches this stage, too.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from runtime.errors import DeadlineError, InternalError, PeerLostError
from transfer.transport.protocol import Wakeup
from transfer.ucx.address import frame_address, unframe_address
from transfer.ucx.api import UcxEndpoint, UcxLibrary, UcxProbe, UcxRequest
from transfer.ucx.binding import ANYWHERE, UcxBinding
from transfer.ucx.pending_sends import PendingSend, PendingSends
from transfer.ucx.settings import STAGE_CHANNEL_OPTIONS, TransportProfile, close_endpoint, create_worker

SEND_SPIN_S = 50e-6
SEND_WAIT_S = 1e-4  # shared memory does not report that a full queue has room again
RECEIVE_WAIT_S = 0.1  # between looks at the peers' health
RESTLESS_ROUNDS = 16  # count: so many times in a row UCX says that there is something to do, and there is nothing
RESTLESS_NAP_S = 2e-3
MAX_QUEUED_FRAMES = 1024
PENDING_BYTES = 64 << 20  # of frames on their way, or two of the largest
_RANK_BITS = 16
_EPOCH_LIMIT = 1 << (64 - _RANK_BITS)
LEAST_S = 50e-6
LONGEST_S = 20e-3  # what a sleeper loses of a longer wait does not count
NUM_WAITS = 8  # count: the stages of a pool wait for each other in turn, now long, now not at all
ROOM = 2  # a wait may take so many times the longest of them
HELD_UP_S = 30e-6  # between two looks: somebody else had the core
OTHERS_SHARE, OTHERS_S = 0.1, 1e-3  # of a core, and at once: what has more needs it; a kernel or a host takes less
SHARED_FOR_S = 0.1  # who shares a core sleeps, and is woken sooner


class Vigil:
    """The waits of one stage for what is not there yet. While batches are in flight waits are short, and a stage stays
    awake for as long as the last ones took; where none comes any more, or other processes want the core, it sleeps.

        vigil.begin()
        while nothing has come:
            yield the core if vigil.lasts() else sleep
        vigil.rewarded()                                     # or vigil.in_vain()
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic,
                 cpu_clock: Callable[[], float] = time.process_time) -> None:
        """`cpu_clock`: seconds of cores that the threads of this process have had, together."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._waits_s: deque[float] = deque(maxlen=NUM_WAITS)
        self._began_s = self._looked_s = self._until_s = self._shared_until_s = 0.0
        self._counted_s = self._counted_cpu_s = 0.0  # where others' time was last added up
        self._others_s = self._others_at_s = 0.0  # what they had beyond their share, and when

    def begin(self) -> None:
        self._began_s = self._looked_s = self._counted_s = self._clock()
        self._counted_cpu_s = self._cpu_clock()
        self._until_s = self._began_s + max(LEAST_S, ROOM * max(self._waits_s, default=0.0))

    def lasts(self) -> bool:
        """Whether to stay awake; to be asked between two looks for a frame."""
        now = self._clock()
        if now - self._looked_s > HELD_UP_S:
            self._count_others(now)
        self._looked_s = now
        return self._shared_until_s <= now < self._until_s

    def _count_others(self, now: float) -> None:
        """Add what the threads of this process have not had of the core."""
        cpu_s = self._cpu_clock()
        others_s = now - self._counted_s - (cpu_s - self._counted_cpu_s)
        self._counted_s, self._counted_cpu_s = now, cpu_s
        self._others_s = others_s + max(0.0, self._others_s - OTHERS_SHARE * (now - self._others_at_s))
        self._others_at_s = now
        if self._others_s > OTHERS_S:
            self._shared_until_s = now + SHARED_FOR_S

    def rewarded(self) -> None:
        """What was waited for is here."""
        waited_s = self._clock() - self._began_s
        if waited_s <= LONGEST_S:
            self._waits_s.append(waited_s)

    def in_vain(self) -> None:
        """It did not come in time: the stages are idle."""
        self._waits_s.clear()


class UcxStageChannel:
    """See `engine.pipeline.channel.FrameChannel`. Belongs to the engine thread, but for `wake`, `fail`, `address`."""

    def __init__(self, *, rank: int, max_frame_bytes: int, profile: TransportProfile,
                 binding: UcxBinding = ANYWHERE,
                 on_sent: Callable[[int], object] = lambda num_bytes: None) -> None:
        """`on_sent` is given the bytes of each frame that left. Raises ConfigError when UCX cannot work here."""
        self._rank = rank
        self._on_sent = on_sent
        self._max_frame_bytes = max_frame_bytes
        self._vigil = Vigil()
        self._ucx = UcxLibrary()
        self._context, self._worker = create_worker(self._ucx, profile, "stage channel", STAGE_CHANNEL_OPTIONS, binding)
        self._pending = PendingSends(self._worker, max_bytes=max(PENDING_BYTES, 2 * max_frame_bytes))
        self.address = frame_address(self._worker.address.tobytes())
        self._any_tag = (self._ucx.tag(0), self._ucx.no_tag_mask)
        self._epoch = 0
        self._endpoints: dict[int, tuple[bytes, UcxEndpoint]] = {}
        self._inboxes: dict[int, deque[UcxProbe]] = {}
        self._early: list[tuple[int, int, UcxProbe]] = []  # (epoch, rank, frame)
        self._discards: list[UcxRequest] = []
        self._scratch = self._ucx.array(bytearray(1))
        self._buffer = bytearray(1)
        self._whole_buffer = self._ucx.array(self._buffer)
        self._lost: dict[int, str] = {}
        self._lost_lock = threading.Lock()
        self._wakeup = Wakeup()
        self._wakeup.watch(self._worker.epoll_file_descriptor)

    def connect(self, addresses: Sequence[bytes], pool_epoch: int) -> None:
        """Form the pool: `addresses` by rank, this stage's own included. Ends the epoch before.

        Raises:
            PeerLostError: an address is not usable here.
            InternalError: the epoch is not newer than the present one.
        """
        if not self._epoch < pool_epoch < _EPOCH_LIMIT:
            raise InternalError(f"pool epoch must be above {self._epoch}, got {pool_epoch}")
        with self._pending.using:
            self._form(addresses, pool_epoch)

    def _form(self, addresses: Sequence[bytes], pool_epoch: int) -> None:
        self._pending.abandon()
        self._dispatch()
        for frames in self._inboxes.values():
            self._discard(frames)
        self._inboxes = {rank: deque() for rank in range(len(addresses)) if rank != self._rank}
        self._epoch = pool_epoch
        for rank, (address, endpoint) in list(self._endpoints.items()):
            if rank >= len(addresses) or address != addresses[rank] or not endpoint.alive:
                close_endpoint(self._endpoints.pop(rank)[1])
        with self._lost_lock:
            self._lost.clear()
        for rank in self._inboxes:
            if rank not in self._endpoints:
                self._endpoints[rank] = (addresses[rank], self._connect(addresses[rank]))
        early, self._early = self._early, []
        for epoch, rank, frame in early:
            self._sort(epoch, rank, frame)

    def send(self, rank: int, frame: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Takes the frame over: it must not be changed any more. Raises PeerLostError when the peer is gone,
        InternalError for a frame over the limit; DeadlineError, now or in a later call, when the peer did not take a
        frame within its `timeout_s` (the connection is cut then, so that the frame is not read any more)."""
        if len(frame) > self._max_frame_bytes:
            raise InternalError(f"a frame of {len(frame)} bytes to stage {rank}; the limit is {self._max_frame_bytes}")
        deadline_s = time.monotonic() + timeout_s
        with self._pending.using:
            self._check(rank)
            while self._pending.any and not self._pending.has_room(len(frame)):
                self._dispatch()
                self._check(rank)
                self._pause(deadline_s)
            tag = self._ucx.tag(self._epoch << _RANK_BITS | self._rank)
            request = self._endpoints[rank][1].tag_send(self._ucx.array(frame), tag)
            spin_until_s = time.monotonic() + SEND_SPIN_S
            while not request.completed and (self._worker.progress_once() or time.monotonic() < spin_until_s):
                pass
            if request.completed:
                self._check_request(rank, request)
            else:
                self._pending.add(PendingSend(rank, request, frame, deadline_s, timeout_s))
        self._on_sent(len(frame))

    def receive(self, rank: int, *, timeout_s: float) -> memoryview | None:
        """The next frame from `rank`, valid until the next call; None when none came in time or `wake` was called.
        Raises PeerLostError (frames that came before the loss are still handed out), DeadlineError as `send`."""
        with self._pending.using:
            if not self._inboxes.get(rank):
                self._dispatch()
            if not self._inboxes.get(rank) and not self._wait(rank, time.monotonic() + timeout_s):
                return None
            return self._take(rank, self._inboxes[rank].popleft())

    def _wait(self, rank: int, deadline_s: float) -> bool:
        """Until a frame has come from `rank`, or `wake`: then, and in the end, False."""
        self._vigil.begin()
        num_restless = 0
        while True:
            self._check(rank)
            if self._wakeup.is_set:
                self._wakeup.clear()
                self._check(rank)
                return False
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._vigil.in_vain()
                return False
            if self._vigil.lasts():
                os.sched_yield()
            elif self._pending.any:
                self._wakeup.sleep(min(SEND_WAIT_S, left_s))
            elif num_restless >= RESTLESS_ROUNDS:
                # Over TCP a connection that its peer does not answer keeps UCX's descriptor readable all the while.
                time.sleep(min(RESTLESS_NAP_S, left_s))
                num_restless = RESTLESS_ROUNDS - 1  # one look, and again: sixteen take as long as the nap
            else:
                num_restless += 1
                if self._worker.arm():
                    self._wakeup.sleep(min(RECEIVE_WAIT_S, left_s))
            if self._dispatch():
                num_restless = 0
            if self._inboxes.get(rank):
                self._vigil.rewarded()
                return True

    def check(self, rank: int) -> None:
        """Raises PeerLostError when this stage is known to be gone; what has arrived from it still waits."""
        with self._pending.using:
            self._dispatch()
            self._check(rank)

    def wake(self) -> None:
        """Make a `receive` that waits in the owner's thread return early. From any thread."""
        self._wakeup.set()

    def fail(self, rank: int, reason: str) -> None:
        """This stage is gone, by the membership: its owner's waits end with PeerLostError. From any thread."""
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
            return self._worker.create_endpoint_from_worker_address(self._ucx.address(unframe_address(address)),
                                                                    endpoint_error_handling=True)
        except self._ucx.error as error:
            raise PeerLostError(f"cannot connect to a stage: {error}") from error

    def _dispatch(self) -> bool:
        """Progress, and sort what has arrived. False when UCX had nothing to do."""
        moved = False
        while self._worker.progress_once():
            moved = True
        while (frame := self._worker.tag_probe(*self._any_tag, remove=True)).matched:
            tag = frame.sender_tag.value
            self._sort(tag >> _RANK_BITS, tag & ((1 << _RANK_BITS) - 1), frame)
        if self._discards:
            self._discards = [request for request in self._discards if not request.completed]
        if self._pending.any:
            self._look_at_sends()
        return moved

    def _look_at_sends(self) -> None:
        """Raises PeerLostError when one failed, DeadlineError when one was not taken in time."""
        for send in self._pending.take_completed():
            self._check_request(send.rank, send.request)
        overdue = self._pending.overdue()
        if overdue is not None:
            text = f"stage {overdue.rank} did not take a frame of {len(overdue.frame)} bytes within " \
                   f"{overdue.timeout_s:g} s"
            self._lose(overdue.rank, text)
            raise DeadlineError(text)

    def _pause(self, deadline_s: float) -> None:
        """Raises DeadlineError when it is over."""
        if time.monotonic() >= deadline_s:
            raise DeadlineError("too many frames wait for the stages to take them")
        time.sleep(SEND_WAIT_S)

    def _sort(self, epoch: int, rank: int, frame: UcxProbe) -> None:
        inbox = self._inboxes.get(rank)
        if epoch > self._epoch and len(self._early) < MAX_QUEUED_FRAMES:
            self._early.append((epoch, rank, frame))
        elif epoch != self._epoch or inbox is None:
            self._discard([frame])
        elif frame.length > self._max_frame_bytes or len(inbox) >= MAX_QUEUED_FRAMES:
            self._discard([frame])
            self._lose(rank, f"stage {rank} sent a frame of {frame.length} bytes behind {len(inbox)} others; the "
                             f"limits are {self._max_frame_bytes} bytes and {MAX_QUEUED_FRAMES} frames")
        else:
            inbox.append(frame)

    def _take(self, rank: int, frame: UcxProbe) -> memoryview:
        """Receive a frame that has (at least begun to) come."""
        length = frame.length
        if len(self._buffer) < length:
            self._buffer = bytearray(min(self._max_frame_bytes, 2 * length))
            self._whole_buffer = self._ucx.array(self._buffer)
        request = self._worker.tag_recv_with_handle(self._whole_buffer, frame)
        while not request.completed:
            if not self._worker.progress_once():
                os.sched_yield()  # the sender may need this very core to go on
                self._check(rank)
        self._check_request(rank, request)
        return memoryview(self._buffer)[:length]

    def _discard(self, frames: Sequence[UcxProbe] | deque[UcxProbe]) -> None:
        # Into one byte: UCX drops what does not fit.
        self._discards += [self._worker.tag_recv_with_handle(self._scratch, frame) for frame in frames]

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
        """Raises PeerLostError when this stage is known to be gone."""
        if rank in self._endpoints and not self._endpoints[rank][1].alive:
            self._lose(rank, f"the connection to stage {rank} has ended")
        if rank in self._lost:
            self._lose(rank, self._lost[rank])
            raise PeerLostError(self._lost[rank])
        if rank not in self._endpoints:
            raise PeerLostError(f"stage {rank} is not part of pool epoch {self._epoch}")

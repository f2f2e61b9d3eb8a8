"""A `StageChannel` over a `FrameChannel`: tensors travel within the frame, or over links if given.

The frame is sent first and lists the tensors that follow over the link. During every wait, the
frame channel is asked whether the neighbor is alive: it is notified of a lost process, a device is
not.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from engine.core.time_limits import FrameLimit
from engine.pipeline import frames as wire
from engine.pipeline.channel import FrameChannel, Packet
from engine.pipeline.frames import Frame, TensorRoute, TensorSpec
from engine.pipeline.links import MESSAGE_TIMEOUT_S, OPEN_TIMEOUT_S, P2PLinks, PendingLink, Transfer
from runtime.errors import DeadlineError, IntegrityError, InternalError, PeerLostError

logger = logging.getLogger(__name__)

MAX_MESSAGES_UNDER_WAY = 16
_LOOK_S = 0.05  # between two checks of the neighbor


class TensorChannel:
    """A `StageChannel` over frames, and over links if given."""

    def __init__(
        self,
        frames: FrameChannel,
        *,
        max_bytes: int,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
        on_sent: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """Create a channel for packets of up to `max_bytes`; `frames` must accept as many.

        After a frame, its tensors may take `message_timeout_s`, because a device sends them only
        when it has computed them. The limit grows if such waits are usually long (`FrameLimit`).
        `on_sent` is called with the size in bytes of each message that was sent over a link.
        """
        self._frames = frames
        self._max_bytes = max_bytes
        self._message_limit = FrameLimit(message_timeout_s)
        self._on_sent = on_sent
        self._links: P2PLinks | None = None
        self._under_way: deque[Transfer] = deque()

    def use(self, links: P2PLinks | None) -> None:
        """Send tensors over `links` from here on, or within the frames if it is None.

        Transfers on the previous links are dropped.
        """
        if self._links is not None:
            self._links.abort()
        self._under_way.clear()
        self._links = links

    def send(self, rank: int, packet: Packet, *, timeout_s: float) -> None:
        """Implement `StageChannel.send`.

        Tensors are copied before they are sent, because a captured graph writes to the same memory
        again.

        Raises:
            InternalError: the packet is over the limit, or has tensors for a stage that is not the
                next.
        """
        run_bytes = wire.bytes_of(packet.tensors)
        num_bytes = len(packet.record) + run_bytes
        if num_bytes > self._max_bytes:
            raise InternalError(
                f"a packet of {num_bytes} bytes to stage {rank}; the limit is {self._max_bytes}"
            )
        if self._links is None or not packet.tensors:
            self._frames.send(
                rank,
                wire.write(TensorRoute.WITHIN, packet, self._frames.head_bytes),
                timeout_s=timeout_s,
            )
            return
        pending = self._links.to(rank)
        if pending is None:
            raise InternalError(f"tensors go to the next stage only, not to stage {rank}")
        self._frames.check(rank)
        # This waits only once per pool, before it serves.
        self._wait(rank, pending, pending.wait, time.monotonic() + OPEN_TIMEOUT_S)
        deadline_s = time.monotonic() + timeout_s  # a float, as every message has one
        try:
            self._make_room(rank, pending, deadline_s)
        except DeadlineError as error:
            raise DeadlineError(f"{error}, within {timeout_s:g} s") from error
        flat = torch.empty(run_bytes, dtype=torch.uint8, device=self._links.device)
        wire.fill(flat, packet.tensors)
        self._frames.send(
            rank,
            wire.write(TensorRoute.BESIDE, packet, self._frames.head_bytes),
            timeout_s=max(0.0, deadline_s - time.monotonic()),
        )
        self._under_way.append(pending.link.send(flat))
        self._on_sent(flat.numel())

    def receive(self, rank: int, *, timeout_s: float) -> Packet | None:
        """Implement `StageChannel.receive`.

        After the frame, the host waits for the tensors on the link: nothing may be computed from a
        failed message.
        """
        data = self._frames.receive(rank, timeout_s=timeout_s)
        if data is None:
            return None
        frame = self._read(rank, data)
        if frame.route is TensorRoute.WITHIN or not frame.specs:
            tensors = wire.copied(frame)
        else:
            tensors = wire.cut(self._arrived(rank, frame.specs), frame.specs)
        return Packet(frame.record, tensors, frame.kind, frame.sequence)

    def wake(self) -> None:
        self._frames.wake()

    def close(self) -> None:
        self.use(None)
        self._frames.close()

    def _read(self, rank: int, data: memoryview) -> Frame:
        """Parse a frame. An error makes the stage lost, because its later frames cannot be trusted.

        The pool must form again.
        """
        try:
            return wire.read(data)
        except IntegrityError as error:
            self._frames.fail(rank, f"stage {rank} sent a damaged frame")
            raise IntegrityError(f"from stage {rank}: {error}") from error

    def _arrived(self, rank: int, specs: tuple[TensorSpec, ...]) -> Tensor:
        num_bytes = wire.run_bytes(specs)
        pending = None if self._links is None else self._links.coming_from(rank)
        if pending is None or num_bytes > self._max_bytes:
            raise InternalError(
                f"stage {rank} announced {num_bytes} bytes of tensors, which cannot arrive here"
            )
        try:
            self._wait(rank, pending, pending.wait, time.monotonic() + OPEN_TIMEOUT_S)
            began_s = time.monotonic()
            flat, transfer = pending.link.receive(num_bytes)
            self._wait(rank, pending, transfer.wait, began_s + self._message_limit.seconds)
            self._message_limit.measured(time.monotonic() - began_s)
        except DeadlineError as error:
            raise PeerLostError(str(error)) from error
        return flat

    def _make_room(self, rank: int, pending: PendingLink, deadline_s: float) -> None:
        """Drop completed transfers, and wait for the oldest one if too many are in transfer."""
        while self._under_way and (
            len(self._under_way) >= MAX_MESSAGES_UNDER_WAY or self._under_way[0].wait(0)
        ):
            self._wait(rank, pending, self._under_way[0].wait, deadline_s)
            self._under_way.popleft()

    def _wait(
        self, rank: int, pending: PendingLink, done: Callable[[float], bool], deadline_s: float
    ) -> None:
        """Wait until `done(seconds)` returns True.

        On an error the link is closed and the stage counts as lost, because a transfer may be
        incomplete.

        Raises:
            PeerLostError: the stage or the link failed.
            DeadlineError: `deadline_s` passed.
        """
        try:
            while not done(min(_LOOK_S, max(0.0, deadline_s - time.monotonic()))):
                self._frames.check(rank)
                if time.monotonic() >= deadline_s:
                    raise DeadlineError(f"tensors to or from stage {rank} did not arrive in time")
        except (RuntimeError, PeerLostError, DeadlineError) as error:
            pending.abort()
            # The error names addresses, so it is logged and not passed on.
            logger.warning("the link to or from stage %d failed: %s", rank, error)
            self._frames.fail(rank, f"the link to or from stage {rank} failed")
            if isinstance(error, DeadlineError):
                raise
            self._frames.check(rank)

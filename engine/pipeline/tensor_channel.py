"""A `StageChannel` over a `FrameChannel`: tensors within the frame, or beside it once links were
given.

The frame goes first and lists what is on its way beside it. Whatever is waited for, the frame
channel is checked: does the neighbour still live? That channel is notified of a death, a device
never is.
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
_LOOK_S = 0.05  # between looks at the neighbour's health


class TensorChannel:
    """See `engine.pipeline.channel.StageChannel`."""

    def __init__(
        self,
        frames: FrameChannel,
        *,
        max_bytes: int,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
        on_sent: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """A packet may have `max_bytes`; `frames` must take as much. Tensors are waited for
        `message_timeout_s` once their frame is here, or longer where such waits are long by nature
        (`FrameLimit`): a device sends them when it has computed them. `on_sent` is given the bytes
        of each message that went beside its frame."""
        self._frames = frames
        self._max_bytes = max_bytes
        self._message_limit = FrameLimit(message_timeout_s)
        self._on_sent = on_sent
        self._links: P2PLinks | None = None
        self._under_way: deque[Transfer] = deque()

    def use(self, links: P2PLinks | None) -> None:
        """From here on tensors go over these links, or within the frames. What the links before
        carry is dropped."""
        if self._links is not None:
            self._links.abort()
        self._under_way.clear()
        self._links = links

    def send(self, rank: int, packet: Packet, *, timeout_s: float) -> None:
        """See `StageChannel.send`. Tensors are copied before they leave: a captured graph writes to
        the same memory again. Raises InternalError for a packet over the limit, or with tensors for
        another than the next stage."""
        specs = wire.specs_of(packet.tensors)
        num_bytes = len(packet.record) + wire.run_bytes(specs)
        if num_bytes > self._max_bytes:
            raise InternalError(
                f"a packet of {num_bytes} bytes to stage {rank}; the limit is {self._max_bytes}"
            )
        if self._links is None or not specs:
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
        self._wait(
            rank, pending, pending.wait, time.monotonic() + OPEN_TIMEOUT_S
        )  # once per pool, before it serves
        deadline_s = time.monotonic() + timeout_s
        try:
            self._make_room(rank, pending, deadline_s)
        except DeadlineError as error:
            raise DeadlineError(f"{error}, within {timeout_s:g} s") from error
        flat = torch.empty(wire.run_bytes(specs), dtype=torch.uint8, device=self._links.device)
        wire.fill(flat, packet.tensors)
        self._frames.send(
            rank,
            wire.write(TensorRoute.BESIDE, packet, self._frames.head_bytes),
            timeout_s=max(0.0, deadline_s - time.monotonic()),
        )
        self._under_way.append(pending.link.send(flat))
        self._on_sent(flat.numel())

    def receive(self, rank: int, *, timeout_s: float) -> Packet | None:
        """See `StageChannel.receive`. Once the frame is here the host waits for what is on its way
        beside it: nothing may be computed from a message that failed."""
        data = self._frames.receive(rank, timeout_s=timeout_s)
        if data is None:
            return None
        frame = self._read(rank, data)
        tensors: tuple[Tensor, ...] = ()
        if frame.specs:
            flat = (
                _copied(frame)
                if frame.route is TensorRoute.WITHIN
                else self._arrived(rank, frame.specs)
            )
            tensors = wire.cut(flat, frame.specs)
        return Packet(frame.record, tensors, frame.kind, frame.sequence)

    def wake(self) -> None:
        self._frames.wake()

    def close(self) -> None:
        self.use(None)
        self._frames.close()

    def _read(self, rank: int, data: memoryview) -> Frame:
        """The stage is lost when this raises: what else it sends cannot be trusted, and the pool
        has to form anew."""
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
                f"stage {rank} announced {num_bytes} bytes of tensors where none can come"
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
        """Drop what has got across; wait for the oldest when too much is under way."""
        while self._under_way and (
            len(self._under_way) >= MAX_MESSAGES_UNDER_WAY or self._under_way[0].wait(0)
        ):
            self._wait(rank, pending, self._under_way[0].wait, deadline_s)
            self._under_way.popleft()

    def _wait(
        self, rank: int, pending: PendingLink, done: Callable[[float], bool], deadline_s: float
    ) -> None:
        """Until `done(seconds)`. Raises PeerLostError when it never will be, DeadlineError on time;
        the link is cut and the stage lost then, since what was under way may be half there."""
        try:
            while not done(min(_LOOK_S, max(0.0, deadline_s - time.monotonic()))):
                self._frames.check(rank)
                if time.monotonic() >= deadline_s:
                    raise DeadlineError(f"tensors to or from stage {rank} did not get across")
        except (RuntimeError, PeerLostError, DeadlineError) as error:
            pending.abort()
            logger.warning(
                "the link to or from stage %d failed: %s", rank, error
            )  # which names addresses
            self._frames.fail(rank, f"the link to or from stage {rank} failed")
            if isinstance(error, DeadlineError):
                raise
            self._frames.check(rank)


def _copied(frame: Frame) -> Tensor:
    flat = torch.empty(len(frame.run), dtype=torch.uint8)
    flat.numpy().data[:] = frame.run
    return flat

"""The channels between the stages of a pool. The worker injects them.

A *packet* is a record (bytes on the host) and its tensors, which are on the stage's device. A
`FrameChannel` carries frames: over UCX between processes, through mailboxes within one. A
`StageChannel` carries packets over it, each as one frame (`engine/pipeline/frames.py`). Tensors are
part of the frame. If every stage has its own device, they travel from device to device instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

FrameBytes = bytes | bytearray | memoryview


class PacketKind(IntEnum):
    """The kind of a packet, which also determines its receiver."""

    BATCH = 1  # to the next stage
    RESULT = 2  # from the last stage to stage 0
    ERROR = 3  # a stage could not run a batch; forwarded to stage 0
    PART = 4  # between ranks of a stage: one rank's part of a product
    FAULT = 5  # between ranks of a stage: the rank could not run the batch


@dataclass(frozen=True)
class Packet:
    """One message from stage to stage. `sequence` is the number of its batch."""

    record: FrameBytes
    tensors: tuple[Tensor, ...] = ()
    kind: PacketKind = PacketKind.BATCH
    sequence: int = 0


class StageChannel(Protocol):
    """A connection of one process to all other stages of its pool.

    Packets arrive whole, and in order per sender. Frames may be sent to any stage, tensors only to
    the next. A channel belongs to one thread, the engine thread. `send` rejects packets above the
    limit agreed at construction before it sends any part of them.
    """

    def send(self, rank: int, packet: Packet, *, timeout_s: float) -> None:
        """Send a packet, and return when its record and tensors may be overwritten.

        Tensors may be overwritten by work that is launched from then on.

        Raises:
            PeerLostError: the peer is lost.
            DeadlineError: `timeout_s` passed.
        """
        ...

    def receive(self, rank: int, *, timeout_s: float) -> Packet | None:
        """Return the next packet from `rank`, or None on timeout.

        Its record is valid until the next call. Its tensors are complete and belong to the caller.

        Raises:
            PeerLostError: the stage is lost.
            IntegrityError: the bytes differ from those sent. The message names stage and frame. The
                stage counts as lost from then on.
        """
        ...

    def wake(self) -> None:
        """Make a waiting `receive` of the owner's thread return early.

        Other threads may make no other call.
        """
        ...

    def close(self) -> None: ...


class PartPiece(NamedTuple):
    """A message between ranks of a stage within batch `sequence`.

    It holds bytes of the sender's part of exchange `number` (PART), or the reason why the sender
    could not run the batch (FAULT).
    """

    kind: PacketKind
    sequence: int
    number: int
    data: bytearray | memoryview


class PartChannel(Protocol):
    """A connection between the ranks of a stage. Pieces arrive in order per sender."""

    @property
    def max_bytes(self) -> int:
        """Return the size limit of a piece. Longer parts are sent in several pieces."""
        ...

    def begin(self, sequence: int) -> None:
        """Begin a batch. Pieces of earlier batches are dropped."""
        ...

    def send(self, ranks: Sequence[int], piece: PartPiece, *, timeout_s: float) -> None:
        """Send a piece to several ranks, and return when its bytes may be overwritten.

        It raises the errors of `StageChannel.send`.
        """
        ...

    def receive(self, rank: int, into: memoryview, *, timeout_s: float) -> PartPiece | None:
        """Return the next piece, as `StageChannel.receive` does.

        Its bytes are in `into` if the sizes are equal. Otherwise they belong to the caller.
        """
        ...

    def abandon(self) -> None:
        """Make waits of the owner's thread return early or raise PeerLostError.

        The pool is broken. Any thread may call it.
        """
        ...


class FrameChannel(Protocol):
    """A `StageChannel` for frames only. Between processes, it authenticates them."""

    @property
    def head_bytes(self) -> int:
        """Return the number of bytes at the start of each frame that the channel uses.

        The channel fills them in on sending, and removes them on receipt.
        """
        ...

    def send(self, rank: int, frame: bytearray, *, timeout_s: float) -> None: ...

    def receive(self, rank: int, *, timeout_s: float) -> memoryview | None:
        """Return the next frame, as `StageChannel.receive` returns a packet."""
        ...

    def check(self, rank: int) -> None:
        """Check the connection to `rank`.

        Raises:
            PeerLostError: `rank` is known to be lost.
        """
        ...

    def fail(self, rank: int, reason: str) -> None:
        """Mark `rank` as lost: waits for it end with PeerLostError. Any thread may call it."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

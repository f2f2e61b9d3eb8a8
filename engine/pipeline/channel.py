"""How one stage hands a batch to the next. The worker injects it.

A *packet* is a record (bytes, made on the host) and the tensors that belong to it, which lie where
the stage computes. A `FrameChannel` carries frames: UCX between processes, mailboxes within one. A
`StageChannel` carries packets over it, each as one frame (`engine/pipeline/frames.py`), the tensors
within the frame or, where every stage has a device of its own, beside it from device to device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

FrameBytes = bytes | bytearray | memoryview


class PacketKind(IntEnum):
    """What a packet is, and who gets it."""

    BATCH = 1  # to the next stage
    RESULT = 2  # last stage to stage 0
    ERROR = 3  # a stage could not run a batch; passed on to stage 0
    PART = 4  # between the ranks of a stage: what one has of a product
    FAULT = 5  # likewise: it could not run the batch


@dataclass(frozen=True)
class Packet:
    """What goes from stage to stage at once. `sequence` is the number of the batch it is about."""

    record: FrameBytes
    tensors: tuple[Tensor, ...] = ()
    kind: PacketKind = PacketKind.BATCH
    sequence: int = 0


class StageChannel(Protocol):
    """One process's way to every other stage of its pool. Packets arrive whole, in order per
    sender.

    Frames may go to any stage, tensors only to the next. A channel belongs to one thread (the
    engine thread). Packets larger than the limit agreed at construction are refused by `send`
    before anything leaves.
    """

    def send(self, rank: int, packet: Packet, *, timeout_s: float) -> None:
        """Returns when record and tensors may be overwritten (tensors by work launched from here
        on). Raises PeerLostError when the peer is gone, DeadlineError on time."""
        ...

    def receive(self, rank: int, *, timeout_s: float) -> Packet | None:
        """The next packet from `rank`, its record valid until the next call, its tensors complete
        and the caller's own; None when none came in time. Raises PeerLostError; IntegrityError
        naming the stage and the frame for bytes that are not those that were sent, after which the
        stage counts as lost."""
        ...

    def wake(self) -> None:
        """Make a `receive` that waits in the owner's thread return early. The one call other
        threads may make."""
        ...

    def close(self) -> None: ...


class PartPiece(NamedTuple):
    """What a rank of a stage sends to others within batch `sequence`: bytes of its part of exchange
    `number` (PART), or why it could not run the batch (FAULT)."""

    kind: PacketKind
    sequence: int
    number: int
    data: bytearray | memoryview


class PartChannel(Protocol):
    """Between the ranks of a stage. Pieces arrive in order per sender."""

    @property
    def max_bytes(self) -> int:
        """Of a piece; longer parts go in several."""
        ...

    def begin(self, sequence: int) -> None:
        """A batch begins; what others have sent for those before it is of no use any more."""
        ...

    def send(self, ranks: Sequence[int], piece: PartPiece, *, timeout_s: float) -> None:
        """To several ranks; returns when its bytes may be overwritten. Raises as
        `StageChannel.send`."""
        ...

    def receive(self, rank: int, into: memoryview, *, timeout_s: float) -> PartPiece | None:
        """As `StageChannel.receive`; its bytes lie in `into` where they are as many, else they are
        the caller's own."""
        ...

    def abandon(self) -> None:
        """The pool is broken: waits of the owner's thread return early, or raise PeerLostError.
        From any thread."""
        ...


class FrameChannel(Protocol):
    """See `StageChannel`, of frames only. Where frames travel between processes, the channel
    authenticates them."""

    @property
    def head_bytes(self) -> int:
        """How many bytes at the start of each frame are the channel's own: it fills them in, and
        hands frames out without them."""
        ...

    def send(self, rank: int, frame: bytearray, *, timeout_s: float) -> None: ...

    def receive(self, rank: int, *, timeout_s: float) -> memoryview | None:
        """As `StageChannel.receive`, of the frame."""
        ...

    def check(self, rank: int) -> None:
        """Raises PeerLostError when `rank` is known to be gone."""
        ...

    def fail(self, rank: int, reason: str) -> None:
        """`rank` is gone: waits for it end with PeerLostError. From any thread."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

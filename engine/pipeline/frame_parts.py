"""Parts of products as frames of the stage channel."""

from collections.abc import Sequence

from engine.pipeline import records
from engine.pipeline.channel import PacketKind, PartPiece, StageChannel
from runtime.errors import IntegrityError

MAX_PART_BYTES = 16 << 20  # limit of one frame of the stage channel


class FrameParts:
    """A `PartChannel` over the stage channel."""

    max_bytes = MAX_PART_BYTES

    def __init__(self, channel: StageChannel) -> None:
        self._channel = channel

    def begin(self, sequence: int) -> None:
        """Do nothing: pieces of earlier batches are recognized when they are received."""

    def send(self, ranks: Sequence[int], piece: PartPiece, *, timeout_s: float) -> None:
        packet = records.pack_piece(piece)
        for rank in ranks:
            self._channel.send(rank, packet, timeout_s=timeout_s)

    def receive(self, rank: int, into: memoryview, *, timeout_s: float) -> PartPiece | None:
        packet = self._channel.receive(rank, timeout_s=timeout_s)
        if packet is not None and packet.kind not in (PacketKind.PART, PacketKind.FAULT):
            raise IntegrityError(
                f"from stage {rank}: {packet.kind.name.lower()} of batch {packet.sequence}, but a "
                f"part is due"
            )
        return None if packet is None else records.unpack_piece(packet, into)

    def abandon(self) -> None:
        self._channel.wake()

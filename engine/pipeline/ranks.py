"""The ranks that share a stage, as one of them sees them: what each has computed of a product goes to all.

The leader plans each batch once, for all: it sends the batch to the other ranks of stage 0, and rank r of a stage hands
it on to rank r of the next. So every rank runs the same batches in the same order, and exchanges the same parts in the
same order: nobody votes. Parts are packets of the stage channel, counted within their batch; one that is not the next
due breaks the pool, and so does one that does not come in time.

A rank that cannot run a batch sends the others a fault in place of its next part: the batch fails on all of them, and
what they still had on the way for it is dropped with the next one.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.core.batch import ForwardBatch
from engine.core.layer_range import ONLY_RANK, TensorRank
from engine.core.time_limits import StepLimit
from engine.pipeline import records
from engine.pipeline.channel import Packet, PacketKind, StageChannel
from runtime.errors import DeadlineError, IntegrityError, InternalError, PeerLostError

BROKEN_POOL = (PeerLostError, IntegrityError, DeadlineError)  # not the batch is at fault
MAX_PART_BYTES = 16 << 20  # of one packet; longer parts go in several
_LOOK_S = 1.0
_SHARE_OF_STEP = 0.75  # of the time a step may take: a wait for another rank ends before this one counts as hung


class StageRanks:
    """Satisfies `engine.contracts.model.Ranks`. Belongs to the engine thread, but for `abandon`."""

    def __init__(self, own: TensorRank = ONLY_RANK, *, stage: int = 0, step_limit_s: float = 0.0) -> None:
        """`stage`: whose ranks they are. A part is waited for most of the time that a step may
        take (`StepLimit`)."""
        self.own = own
        self._stage = stage
        self._first = stage * own.size  # in the pool
        self._others = [self._first + rank for rank in range(own.size) if rank != own.rank]
        self._limit = StepLimit(step_limit_s)
        self._channel: StageChannel | None = None
        self._sequence = self._number = 0  # of the batch, and of the exchange within it
        self._is_abandoned = threading.Event()

    def use(self, channel: StageChannel) -> None:
        """From here on the others are reached by this channel, which was connected for a new epoch of the pool."""
        self._channel = channel
        self._sequence = 0
        self._is_abandoned.clear()

    def abandon(self) -> None:
        """The pool is broken: a wait for another rank ends with PeerLostError. Any thread."""
        self._is_abandoned.set()
        if self._channel is not None:
            self._channel.wake()

    def lead(self, sequence: int, batch: ForwardBatch) -> None:
        """On the leader: the batch to the other ranks of its stage. Raises PeerLostError and DeadlineError."""
        packet = records.pack_input(sequence, batch) if self._others else None
        for rank in self._others:
            if packet is not None:
                self._send(rank, packet)

    @contextmanager
    def step(self, sequence: int) -> Iterator[None]:
        """Around all that is done for a batch; whatever is raised within reaches the other ranks, unless the pool is
        broken."""
        self._sequence, self._number = sequence, 0
        began_s = time.monotonic()
        try:
            yield
        except BROKEN_POOL:
            raise
        except Exception as error:
            fault = records.pack_error(sequence, str(error), kind=PacketKind.FAULT)
            for rank in self._others:
                self._send(rank, fault)
            raise
        self._limit.observe(time.monotonic() - began_s)

    def gather(self, part: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """See `Ranks.gather`."""
        rows = [len(part)] * self.own.size if counts is None else counts
        self._number += 1
        for rank in self._others:
            self._send_part(rank, part)
        return [part if rank == self.own.rank else self._receive(rank, rows[rank]) for rank in range(self.own.size)]

    def collect(self, part: Tensor) -> list[Tensor] | None:
        """See `Ranks.collect`."""
        self._number += 1
        if self.own.rank > 0:
            self._send_part(self._first, part)
            return None
        return [part, *(self._receive(rank, len(part)) for rank in range(1, self.own.size))]

    def _send_part(self, rank: int, part: Tensor) -> None:
        at_once = max(1, MAX_PART_BYTES // max(1, part[:1].nbytes))
        for start in range(0, max(1, len(part)), at_once):
            self._send(rank, Packet(records.part_record(self._number), (part[start:start + at_once],), PacketKind.PART,
                                    self._sequence))

    def _send(self, rank: int, packet: Packet) -> None:
        if self._channel is None:
            raise InternalError(f"stage {self._stage} has {self.own.size} ranks and no channel between them")
        self._channel.send(rank, packet, timeout_s=self._wait_s)

    def _receive(self, rank: int, num_rows: int) -> Tensor:
        """A rank's part of the present exchange, of `num_rows` rows."""
        deadline_s = time.monotonic() + self._wait_s
        found = [self._receive_rows(rank, deadline_s)]
        while (count := sum(map(len, found))) < num_rows:
            found.append(self._receive_rows(rank, deadline_s))
        if count > num_rows:
            raise IntegrityError(f"{self._name(rank)} has {count} rows of {self._where}, not {num_rows}")
        return found[0] if len(found) == 1 else torch.cat(found)

    def _receive_rows(self, rank: int, deadline_s: float) -> Tensor:
        while True:
            packet = self._next_packet(rank, deadline_s)
            if packet.kind in (PacketKind.PART, PacketKind.FAULT) and packet.sequence < self._sequence:
                continue  # of a batch that failed
            if packet.kind is PacketKind.FAULT and packet.sequence == self._sequence:
                raise InternalError(f"{self._name(rank)}: {records.unpack_error(packet)}")
            if (packet.kind, packet.sequence) != (PacketKind.PART, self._sequence) or (
                    records.part_number(packet) != self._number):
                raise IntegrityError(f"from {self._name(rank)}: {packet.kind.name.lower()} of batch {packet.sequence} "
                                     f"where {self._where} is due")
            return packet.tensors[0]

    def _next_packet(self, rank: int, deadline_s: float) -> Packet:
        assert self._channel is not None, "something was sent before"
        while True:
            left_s = deadline_s - time.monotonic()
            packet = self._channel.receive(self._first + rank, timeout_s=max(0.0, min(_LOOK_S, left_s)))
            if packet is not None:
                return packet
            if self._is_abandoned.is_set():
                raise PeerLostError(f"the pool broke while rank {self.own.rank} waited for {self._name(rank)}")
            if left_s <= 0:
                raise PeerLostError(f"rank {self.own.rank} of stage {self._stage} has waited {self._wait_s:g} s "
                                    f"for {self._name(rank)}: {self._where} did not come")

    @property
    def _wait_s(self) -> float:
        return _SHARE_OF_STEP * self._limit.seconds

    def _name(self, rank: int) -> str:
        return f"rank {rank} of stage {self._stage}"

    @property
    def _where(self) -> str:
        return f"part {self._number} of batch {self._sequence}"

"""The ranks of a stage, seen from one of them: each rank sends its part of a product to all.

The leader plans each batch once for all ranks. It sends the batch to the other ranks of stage 0,
and rank r of a stage forwards it to rank r of the next. So every rank runs the same batches in the
same order and exchanges the same parts in the same order, without any agreement. Parts travel as
frames of the stage channel or through memory that the ranks share. They are numbered within their
batch. A part that is not the next one due breaks the pool, and so does a late one. Long parts are
sent in rounds with one piece from each rank, so the data in transfer is bounded.

With several data ranks, a step is one batch per data rank, and every batch carries the shares of
all. So a rank knows the exchanges that it takes part in without asking. A rank without a batch of
its own runs an idle batch (`plan_step`).

If halves of a batch take turns (`engine/pipeline/overlap.py`), two exchanges can be open at a time.
Each half has its own, and all ranks begin them in the same order.

A rank that cannot run a batch sends the others a fault in place of its next part. The batch then
fails on all of them, and its remaining parts are dropped during the next batch.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.contracts.model import Ranks
from engine.core.layer_range import ONLY_RANK, TensorRank
from engine.core.time_limits import StepLimit
from engine.pipeline import records
from engine.pipeline.channel import PacketKind, PartChannel, PartPiece, StageChannel
from engine.pipeline.frame_parts import FrameParts
from engine.pipeline.member_ranks import Incoming, MemberRanks, Outgoing, bytes_of
from engine.pipeline.step_plan import RankBatches, rows_per_rank
from runtime.errors import DeadlineError, IntegrityError, InternalError, PeerLostError

# errors that are not the fault of the batch
BROKEN_POOL = (PeerLostError, IntegrityError, DeadlineError)
# Offset of the numbers of exchanges within a data rank, which are counted separately.
_WITHIN_DATA_RANK = 1 << 31
_LOOK_S = 1.0
# The share of a step's time limit: a wait for another rank ends before this rank counts as hung.
_SHARE_OF_STEP = 0.75


class StageRanks:
    """`RanksOfStage` over a channel. The engine thread owns it; any thread may call `abandon`."""

    def __init__(
        self,
        own: TensorRank = ONLY_RANK,
        *,
        stage: int = 0,
        step_limit_s: float = 0.0,
        while_under_way: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the ranks of stage number `stage`.

        The wait for a part is limited to most of the time that a step may take (`StepLimit`).
        `while_under_way` is called in every exchange after this rank's part was sent. It may begin
        another exchange.
        """
        self.own = own
        self._stage = stage
        self._first = stage * own.size  # number in the pool
        self._others = [self._first + rank for rank in range(own.size) if rank != own.rank]
        self._all = self._among(range(own.size), own)
        size = own.attention.size
        within = range(own.data_rank * size, (own.data_rank + 1) * size)
        # Other data ranks may not have such an exchange.
        self.attention: Ranks = (
            self
            if own.data_size == 1
            else self._among(within, own.attention, first_number=_WITHIN_DATA_RANK)
        )
        self._limit = StepLimit(step_limit_s)
        self._channel: StageChannel | None = None
        self._parts: PartChannel | None = None
        self._sequence = 0  # number of the current batch
        self._exchanges: Counter[int] = Counter()  # within the batch, by first number
        self._number = 0  # number of the current exchange
        self._open: set[int] = set()  # numbers of exchanges that still lack parts
        # Parts that arrived while another was due, by rank and exchange.
        self._early: dict[tuple[int, int], PartPiece] = {}
        self._while_under_way = while_under_way
        self._is_abandoned = threading.Event()

    def use(self, channel: StageChannel, parts: PartChannel | None = None) -> None:
        """Reach the other ranks by `channel`, which was connected for a new epoch of the pool.

        Parts travel over `parts` if given.
        """
        self._channel, self._parts = channel, parts or FrameParts(channel)
        self._sequence = 0
        self._is_abandoned.clear()

    def abandon(self) -> None:
        """End a wait for another rank with PeerLostError, because the pool is broken.

        Any thread may call it.
        """
        self._is_abandoned.set()
        if self._parts is not None:
            self._parts.abandon()

    def lead(self, sequence: int, step: RankBatches) -> None:
        """Send each other rank of the leader's stage the batch of its data rank.

        Raises:
            PeerLostError: a rank is lost.
            DeadlineError: a rank did not take its batch in time.
        """
        packets = (
            [None if batch is None else records.pack_input(sequence, batch) for batch in step]
            if (self._others)
            else []
        )
        each = self.own.attention.size
        for rank in self._others:
            packet = packets[(rank - self._first) // each]
            if packet is not None and self._channel is not None:
                self._channel.send(rank, packet, timeout_s=self._wait_s)

    @contextmanager
    def step(self, sequence: int) -> Iterator[None]:
        """Enclose all work for a batch. An error within reaches the other ranks.

        It is not sent if the pool is broken.
        """
        self._sequence = sequence
        self._exchanges.clear()
        self._open.clear()
        self._early.clear()
        if self._parts is not None:
            self._parts.begin(sequence)
        began_s = time.monotonic()
        try:
            yield
        except BROKEN_POOL:
            raise
        except Exception as error:  # the other ranks wait for this rank's parts
            if self._parts is not None:
                why = str(error).encode(errors="replace")[: records.MAX_ERROR_BYTES]
                self._parts.send(
                    self._others,
                    PartPiece(PacketKind.FAULT, sequence, 0, bytearray(why)),
                    timeout_s=self._wait_s,
                )
            raise
        self._limit.observe(time.monotonic() - began_s)

    def gather(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Implement `Ranks.gather`."""
        return self._all.gather(part, counts)

    def swap(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> Tensor:
        """Implement `Ranks.swap`."""
        return self._all.swap(parts, counts)

    def swap_shares(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """Implement `Ranks.swap_shares`."""
        return self._all.swap_shares(shares)

    def complete(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Implement `Ranks.complete`."""
        self._all.complete(rows, counts)

    def collect(self, part: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Tensor | None:
        """Implement `RanksOfStage.collect`."""
        number = self.begin_exchange(0)
        size = self.own.attention.size
        shares = torch.split(part, list(counts))
        outgoing = [
            ([self._first + place * size], bytes_of(share))
            for place, share in enumerate(shares)
            if place * size != self.own.rank
        ]
        own = shares[self.own.data_rank]
        is_first = self.own.attention.rank == 0
        parts = (
            [
                own if rank == self.own.rank else own.new_empty(len(own), width)
                for rank, width in enumerate(widths)
            ]
            if is_first
            else []
        )
        coming = [
            (self._first + rank, bytes_of(found))
            for rank, found in enumerate(parts)
            if rank != self.own.rank
        ]
        self.move(outgoing, coming, number)
        return torch.cat(parts, dim=1) if is_first else None

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Implement `RanksOfStage.gather_rows`.

        All ranks of a data rank have its rows, and each sends an equal share of them.
        """
        self._check_counts(counts, len(rows))
        size = self.own.attention.size
        each = [rows_per_rank(count, size) for count in counts]
        own = each[self.own.data_rank]
        start = self.own.attention.rank * each[self.own.data_rank]
        padding = rows.new_zeros(own * size - len(rows), *rows.shape[1:])
        every = self.gather(
            torch.cat([rows, padding])[start : start + own],
            [count for count in each for _ in range(size)],
        )
        padded = torch.split(every, [count * size for count in each])
        return torch.cat([share[:count] for share, count in zip(padded, counts, strict=True)])

    def own_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Implement `RanksOfStage.own_rows`."""
        return torch.split(rows, list(counts))[self.own.data_rank]

    def _among(self, members: range, own: TensorRank, *, first_number: int = 0) -> MemberRanks:
        return MemberRanks(
            self,
            members,
            own,
            rank=self.own.rank,
            first=self._first,
            first_number=first_number,
        )

    def _check_counts(self, counts: Sequence[int], num_own: int) -> None:
        if len(counts) != self.own.data_size or counts[self.own.data_rank] != num_own:
            raise InternalError(
                f"{num_own} rows of data rank {self.own.data_rank} of {self.own.data_size}, in a step "
                f"planned for {list(counts)}"
            )

    def begin_exchange(self, first_number: int) -> int:
        """Open the next exchange of those counted from `first_number`, and return its number."""
        if self._parts is None:
            raise InternalError(
                f"stage {self._stage} has {self.own.size} ranks and no channel between them"
            )
        self._exchanges[first_number] += 1
        number = self._number = first_number + self._exchanges[first_number]
        self._open.add(number)
        return number

    def move(self, outgoing: Sequence[Outgoing], coming: Sequence[Incoming], number: int) -> None:
        """Send bytes to ranks and receive those of others into their places, piece by piece."""
        assert self._parts is not None, "checked before"
        at_once = self._parts.max_bytes
        deadline_s = time.monotonic() + self._wait_s  # a float, as every exchange has one
        longest = max((len(data) for _, data in (*outgoing, *coming)), default=0)
        for start in range(0, max(1, longest), at_once):
            for ranks, data in outgoing:
                if start < len(data):
                    piece = PartPiece(
                        PacketKind.PART, self._sequence, number, data[start : start + at_once]
                    )
                    self._parts.send(ranks, piece, timeout_s=self._wait_s)
            if not start:
                self._while_under_way()
                self._number = number
            for rank, place in coming:
                if start < len(place):
                    self._receive(rank, place[start : start + at_once], deadline_s)
        self._open.remove(number)

    def _receive(self, rank: int, into: memoryview, deadline_s: float) -> None:
        while True:
            piece = self._early.pop((rank, self._number), None) or self._next_piece(
                rank, into, deadline_s
            )
            if piece.sequence < self._sequence:
                continue  # from a batch that failed
            if piece.kind is PacketKind.FAULT and piece.sequence == self._sequence:
                raise InternalError(
                    f"{self._name(rank)}: {bytes(piece.data).decode(errors='replace')}"
                )
            if (
                piece.number != self._number
                and piece.number in self._open
                and (rank, piece.number) not in self._early
            ):
                self._early[rank, piece.number] = piece._replace(data=bytearray(piece.data))
                continue
            if (piece.kind, piece.sequence, piece.number) != (
                PacketKind.PART,
                self._sequence,
                self._number,
            ):
                raise IntegrityError(
                    f"from {self._name(rank)}: {piece.kind.name.lower()} {piece.number} of batch "
                    f"{piece.sequence}, but {self._where} is due"
                )
            if len(piece.data) != len(into):
                raise IntegrityError(
                    f"{self._name(rank)} has {len(piece.data)} bytes of {self._where}, not "
                    f"{len(into)}"
                )
            if piece.data is not into:
                into[:] = piece.data
            return

    def _next_piece(self, rank: int, into: memoryview, deadline_s: float) -> PartPiece:
        assert self._parts is not None, "something was sent before"
        while True:
            remaining_s = deadline_s - time.monotonic()
            piece = self._parts.receive(rank, into, timeout_s=max(0.0, min(_LOOK_S, remaining_s)))
            if piece is not None:
                return piece
            if self._is_abandoned.is_set():
                raise PeerLostError(
                    f"the pool broke while rank {self.own.rank} waited for {self._name(rank)}"
                )
            if remaining_s <= 0:
                raise PeerLostError(
                    f"rank {self.own.rank} of stage {self._stage} has waited {self._wait_s:g} s "
                    f"for {self._name(rank)}: {self._where} did not arrive"
                )

    @property
    def _wait_s(self) -> float:
        return _SHARE_OF_STEP * self._limit.seconds

    def _name(self, rank: int) -> str:
        return f"rank {rank - self._first} of stage {self._stage}"

    @property
    def _where(self) -> str:
        return f"part {self._number % _WITHIN_DATA_RANK} of batch {self._sequence}"

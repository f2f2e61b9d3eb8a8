"""Shared memory of the ranks of a stage on one host, for what they exchange within a batch.

The pieces are authenticated like the frames that would go to another host. Each rank has a memory
with one lane for each of the others, which writes there. A lane has places for two pieces, so that
one rank writes the next while the other still reads the last. Two counters hold the number of
pieces written and read. A waiting rank spins for as long as recent waits took (`SpinThenSleep`),
then polls at growing intervals. Between batches no rank waits here.

The head of each piece names the forming and numbers the pieces of its direction. Its authenticator
covers both (`transfer/transport/forming.py`). So late writes of another pool's process, or of an
earlier forming, are distinguished from expected pieces.

    head     <16s 6Q      authenticator, session of the forming, number of the piece, then its label: sequence of the
                          batch, number of the exchange, kind, bytes

The memory has no name in a file system. Other ranks open it as a descriptor of its process,
which only processes of the same user may. It disappears with the last process that has it open. Its
size is fixed. A reader sees a piece before its count, because the stores of an x86 core become
visible in order. On other machines, ranks exchange frames of the stage channel.
"""

import fcntl
import mmap
import os
import platform
import secrets
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine.pipeline.channel import PacketKind, PartPiece
from runtime.errors import DeadlineError, IntegrityError, PeerLostError
from transfer.transport.authenticator import SEAL_BYTES
from transfer.transport.forming import Direction, Forming
from transfer.transport.refusals import RefusalReason, Refusals
from transfer.transport.spin import SpinThenSleep

MAX_PIECE_BYTES = 1 << 20
FIRST_NAP_S = 50e-6
LONGEST_NAP_S = 2e-3
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")
_TOKEN_BYTES = 16
_LINE = 64  # bytes of a cache line: counters of different writers do not share one
_LABEL = struct.Struct("<6Q")
_HEAD_BYTES = SEAL_BYTES + _LABEL.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PURPOSE = "baton parts"
_NUM_PLACES = 2
_PLACE_BYTES = _HEAD_BYTES + MAX_PIECE_BYTES
LANE_BYTES = 2 * _LINE + _NUM_PLACES * _PLACE_BYTES


@dataclass(frozen=True)
class MemoryAddress:
    """The address of a rank's memory.

    `host` is the same for processes that can open each other's descriptors.
    """

    host: str
    pid: int
    descriptor: int
    token: str

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.descriptor} {self.token}"

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the address from its text.

        Raises:
            PeerLostError: `str` did not make it.
        """
        try:
            host, pid, descriptor, token = text.split(" ")
            return cls(host, int(pid), int(descriptor), token)
        except ValueError as error:
            raise PeerLostError(f"{text!r} is not the address of a rank's memory") from error


def this_host() -> str:
    """Return the `host` of a `MemoryAddress`; empty if processes cannot share memory here."""
    if platform.machine() != "x86_64":
        return ""
    try:
        return f"{_BOOT.read_text().strip()}/{_PROCESSES.stat().st_ino}/{os.getuid()}"
    except OSError:
        return ""


def share_a_host(addresses: Sequence[str]) -> bool:
    """Return whether all ranks have a memory and can open each other's."""
    return all(addresses) and len({MemoryAddress.of(address).host for address in addresses}) == 1


class _PartLane:
    """The pieces from one rank to another, in the receiver's memory."""

    def __init__(self, memory: memoryview) -> None:
        """Create a view of `memory` [LANE_BYTES]."""
        self._written = memory[:8].cast("Q")
        self._read = memory[_LINE : _LINE + 8].cast("Q")
        self._places = [
            memory[start : start + _PLACE_BYTES]
            for start in range(2 * _LINE, LANE_BYTES, _PLACE_BYTES)
        ]

    def has_room(self) -> bool:
        return self._written[0] - self._read[0] < _NUM_PLACES

    def has_piece(self) -> bool:
        return self._written[0] > self._read[0]

    def write(self, head: bytes, data: memoryview | bytearray) -> None:
        """Write a piece; call when there is room."""
        place = self._places[self._written[0] % _NUM_PLACES]
        place[:_HEAD_BYTES] = head
        place[_HEAD_BYTES : _HEAD_BYTES + len(data)] = data
        self._written[0] += 1

    def oldest(self) -> memoryview:
        """Return the place of the oldest unread piece; bytes after the piece are undefined."""
        return self._places[self._read[0] % _NUM_PLACES]

    def drop(self) -> None:
        """Release the place of the oldest piece."""
        self._read[0] += 1


class PartMemory:
    """A `PartChannel` over shared memory.

    Belongs to the engine thread, except for `abandon` and `address`.
    """

    max_bytes = MAX_PIECE_BYTES

    def __init__(
        self,
        host: str,
        *,
        rank: int,
        size: int,
        check: Callable[[int], object],
        on_sent: Callable[[int], object] = lambda num_bytes: None,
        on_refused: Callable[[RefusalReason], object] = lambda reason: None,
    ) -> None:
        """Create the memory of a rank of the pool, whose stages have `size` ranks.

        `check` raises PeerLostError for a lost rank. `on_sent` is called with the bytes of each
        sent piece, `on_refused` with the reason for each rejected one.
        """
        self._rank = rank
        self.size = size
        self.first = rank // size * size
        self._check = check
        self._on_sent = on_sent
        self._refusals = Refusals("parts between ranks", on_refused)
        self._descriptor = os.memfd_create("baton-parts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._descriptor, 0o600)
        os.ftruncate(self._descriptor, _LINE + size * LANE_BYTES)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.address = str(MemoryAddress(host, os.getpid(), self._descriptor, token.hex()))
        memory = memoryview(mmap.mmap(self._descriptor, 0))
        memory[:_TOKEN_BYTES] = token
        self._from = {self.first + place: _lane(memory, place) for place in range(size)}
        self._to: dict[int, tuple[str, _PartLane]] = {}
        self._session = self._sequence = 0
        self._sends: dict[int, Direction] = {}
        self._receives: dict[int, Direction] = {}
        self._spinner = SpinThenSleep()
        self._is_abandoned = False

    @property
    def refused(self) -> Mapping[RefusalReason, int]:
        """Return the number of rejected pieces, by reason."""
        return self._refusals.counts

    def connect(self, addresses: Sequence[str], forming: Forming) -> None:
        """Form the stage from the addresses of all its ranks; end the previous forming.

        Raises:
            PeerLostError: the memory of a rank cannot be opened.
        """
        self._session = forming.session
        self._sequence = 0
        self._is_abandoned = False
        others = [rank for rank in range(self.first, self.first + self.size) if rank != self._rank]
        self._sends = {rank: Direction(forming, _PURPOSE, self._rank, rank) for rank in others}
        self._receives = {rank: Direction(forming, _PURPOSE, rank, self._rank) for rank in others}
        for rank, address in enumerate(addresses, start=self.first):
            if rank != self._rank and self._to.get(rank, ("",))[0] != address:
                self._to[rank] = address, self._connected(rank, MemoryAddress.of(address))

    def begin(self, sequence: int) -> None:
        """Begin a batch and drop pieces of earlier ones. Implements `PartChannel.begin`."""
        self._sequence = sequence
        for rank, lane in self._from.items():
            while (
                rank != self._rank
                and lane.has_piece()
                and self._is_old(rank, lane.oldest()[:_HEAD_BYTES])
            ):
                lane.drop()

    def send(self, ranks: Sequence[int], piece: PartPiece, *, timeout_s: float) -> None:
        """Write a piece to each of the ranks. Implements `PartChannel.send`.

        Raises:
            DeadlineError: a rank has not read in time.
            PeerLostError: a rank is lost or the pool broke.
        """
        deadline_s = time.monotonic() + timeout_s  # a float, as every piece has one
        for rank in ranks:
            lane = self._to[rank][1]
            direction = self._sends[rank]
            if not lane.has_room() and not self._wait(rank, lane.has_room, deadline_s):
                raise DeadlineError(
                    f"rank {rank} of the pool did not take a part within {timeout_s:g} s"
                )
            label = _LABEL.pack(
                self._session,
                direction.next,
                piece.sequence,
                piece.number,
                piece.kind,
                len(piece.data),
            )
            lane.write(direction.seal(piece.data, label) + label, piece.data)
            direction.advance()
            self._on_sent(len(piece.data))

    def receive(self, rank: int, into: memoryview, *, timeout_s: float) -> PartPiece | None:
        """Read and return the next piece of a rank, or None on timeout.

        Implements `PartChannel.receive`.

        Raises:
            IntegrityError: the piece is not authentic.
            PeerLostError: the rank is lost or the pool broke.
        """
        lane = self._from[rank]
        deadline_s = time.monotonic() + timeout_s  # a float, as every piece has one
        while True:
            if not lane.has_piece() and not self._wait(rank, lane.has_piece, deadline_s):
                return None
            place = lane.oldest()
            # The head is copied like the data, so that checked bytes cannot change later.
            head = bytes(place[:_HEAD_BYTES])
            if self._is_old(rank, head):
                lane.drop()
                continue
            _, number, sequence, exchange, kind, num_bytes = _LABEL.unpack_from(head, SEAL_BYTES)
            data = (
                into
                if len(into) == num_bytes
                else memoryview(bytearray(min(num_bytes, MAX_PIECE_BYTES)))
            )
            data[:] = place[_HEAD_BYTES : _HEAD_BYTES + len(data)]
            reason = self._receives[rank].accept(head[:SEAL_BYTES], number, data, head[SEAL_BYTES:])
            if reason in (None, RefusalReason.REPLAYED):
                lane.drop()
            if reason is None:
                return PartPiece(PacketKind(kind), sequence, exchange, data)
            self._refusals.add(
                reason, f"part {exchange} of batch {sequence} from rank {rank} of the pool"
            )
            if reason is not RefusalReason.REPLAYED:
                raise IntegrityError(
                    f"from rank {rank} of the pool: what arrived is not what was sent ({reason} part "
                    f"{exchange} of batch {sequence})"
                )

    def _is_old(self, rank: int, head: bytes | memoryview) -> bool:
        """Return whether a piece belongs to an earlier batch or to another forming.

        Pieces of another forming are counted as rejected.
        """
        session, _, sequence, *_ = _LABEL.unpack_from(head, SEAL_BYTES)
        if session != self._session:
            self._refusals.add(
                RefusalReason.EARLIER, f"a part of another forming in the lane of rank {rank}"
            )
            return True
        if sequence >= self._sequence:
            return False
        self._receives[rank].advance()
        return True

    def abandon(self) -> None:
        """End waits with PeerLostError. Implements `PartChannel.abandon`."""
        self._is_abandoned = True

    def close(self) -> None:
        os.close(self._descriptor)

    def _wait(self, rank: int, is_there: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until `is_there()`; return False on timeout.

        Raises:
            PeerLostError: the rank is lost or the pool broke.
        """
        self._spinner.begin()
        nap_s = FIRST_NAP_S
        while not is_there():
            if self._spinner.lasts():
                os.sched_yield()
                continue
            self._check(rank)
            if self._is_abandoned:
                raise PeerLostError(
                    f"the pool broke while rank {self._rank} of it waited for rank {rank}"
                )
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                self._spinner.timed_out()
                return False
            time.sleep(min(nap_s, remaining_s))
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
        self._spinner.succeeded()
        return True

    def _connected(self, rank: int, address: MemoryAddress) -> _PartLane:
        try:
            descriptor = os.open(
                f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC
            )
            try:
                memory = memoryview(mmap.mmap(descriptor, 0))
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise PeerLostError(f"cannot open the memory of rank {rank}: {error}") from error
        if memory[:_TOKEN_BYTES].hex() != address.token:
            raise PeerLostError(f"the memory of rank {rank} is another process's")
        return _lane(memory, self._rank - self.first)


def _lane(memory: memoryview, place: int) -> _PartLane:
    """Return the lane of the rank at this place in its stage."""
    start = _LINE + place * LANE_BYTES
    return _PartLane(memory[start : start + LANE_BYTES])

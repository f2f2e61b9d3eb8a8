"""Memory that the ranks of a stage share where they run on one host: what they exchange within a batch goes through it,
with the digests of the frames that would go to another host.

Each rank has a memory with a lane for each of the others, which writes there. A lane has places for two pieces: one
rank writes the next while the other still reads the last. Its two counters say how many were written and how many read.
A rank that waits stays awake for as long as the last waits took (`Vigil`), and looks less and less often then. Between
batches nobody waits here.

The memory has no name in a file system: the others open it as a descriptor of its process, and it is gone with the last
process that has it open. Others see a piece before its count, because on x86 the stores of a core are seen in their
order; on other machines ranks exchange frames of the stage channel.
"""

import mmap
import os
import platform
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from xxhash import xxh3_64_intdigest

from engine.pipeline.channel import PacketKind, PartPiece
from runtime.errors import DeadlineError, IntegrityError, PeerLostError
from transfer.ucx.stage_channel import Vigil

MAX_PIECE_BYTES = 1 << 20
FIRST_NAP_S, LONGEST_NAP_S = 50e-6, 2e-3
_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_TOKEN_BYTES = 16
_LINE = 64  # bytes of a cache line: counters of different writers share none
_LABEL = struct.Struct("<5Q")  # epoch, sequence of the batch, number of the exchange, kind, bytes
_DIGEST = struct.Struct("<Q16x")
_HEAD = struct.Struct("<5QQ16x")  # label, digest
_AGE = struct.Struct("<QQ")  # the label's beginning
_NUM_PLACES = 2
_PLACE_BYTES = _HEAD.size + MAX_PIECE_BYTES
LANE_BYTES = 2 * _LINE + _NUM_PLACES * _PLACE_BYTES


@dataclass(frozen=True)
class MemoryAddress:
    """Where others find a rank's memory. `host` is the same for processes that can open each other's descriptors."""

    host: str
    pid: int
    descriptor: int
    token: str

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.descriptor} {self.token}"

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises PeerLostError when it was not made by `str`."""
        try:
            host, pid, descriptor, token = text.split(" ")
            return cls(host, int(pid), int(descriptor), token)
        except ValueError as error:
            raise PeerLostError(f"{text!r} is not the address of a rank's memory") from error


def this_host() -> str:
    """As of `MemoryAddress`; empty where processes cannot share memory so."""
    if platform.machine() != "x86_64":
        return ""
    try:
        return f"{_BOOT.read_text().strip()}/{_PROCESSES.stat().st_ino}/{os.getuid()}"
    except OSError:
        return ""


def share_a_host(addresses: Sequence[str]) -> bool:
    """Whether ranks with these addresses, empty ones without memory, can all open each other's."""
    return all(addresses) and len({MemoryAddress.of(address).host for address in addresses}) == 1


class _PartLane:
    """From one rank to another, in the receiver's memory."""

    def __init__(self, memory: memoryview) -> None:
        """memory: [LANE_BYTES]."""
        self._written = memory[:8].cast("Q")
        self._read = memory[_LINE:_LINE + 8].cast("Q")
        self._places = [memory[start:start + _PLACE_BYTES] for start in range(2 * _LINE, LANE_BYTES, _PLACE_BYTES)]

    def has_room(self) -> bool:
        return self._written[0] - self._read[0] < _NUM_PLACES

    def has_piece(self) -> bool:
        return self._written[0] > self._read[0]

    def write(self, head: bytes, data: memoryview | bytearray) -> None:
        """Once there is room."""
        place = self._places[self._written[0] % _NUM_PLACES]
        place[:_HEAD.size] = head
        place[_HEAD.size:_HEAD.size + len(data)] = data
        self._written[0] += 1

    def oldest(self) -> memoryview:
        """What was written first of what was not read, and what else may be in its place."""
        return self._places[self._read[0] % _NUM_PLACES]

    def drop(self) -> None:
        """The oldest has been read, or is of no use."""
        self._read[0] += 1


class PartMemory:
    """A `PartChannel`. Belongs to the engine thread, but for `abandon` and `address`."""

    max_bytes = MAX_PIECE_BYTES

    def __init__(self, host: str, *, rank: int, size: int, check: Callable[[int], object],
                 on_sent: Callable[[int], object] = lambda num_bytes: None) -> None:
        """`rank` in the pool, of stages of `size` ranks. `check` raises PeerLostError for a rank that is gone;
        `on_sent` is given the bytes of each piece that left."""
        self._rank, self.size, self.first = rank, size, rank // size * size
        self._check, self._on_sent = check, on_sent
        self._descriptor = os.memfd_create("baton-parts")
        os.ftruncate(self._descriptor, _LINE + size * LANE_BYTES)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.address = str(MemoryAddress(host, os.getpid(), self._descriptor, token.hex()))
        memory = memoryview(mmap.mmap(self._descriptor, 0))
        memory[:_TOKEN_BYTES] = token
        self._from = {self.first + place: _lane(memory, place) for place in range(size)}
        self._to: dict[int, tuple[str, _PartLane]] = {}
        self._epoch = self._sequence = 0
        self._vigil = Vigil()
        self._is_abandoned = False

    def connect(self, addresses: Sequence[str], epoch: int) -> None:
        """Form the stage: addresses of its ranks, this one's included. Ends the epoch before. Raises PeerLostError."""
        self._epoch, self._sequence, self._is_abandoned = epoch, 0, False
        for rank, address in enumerate(addresses, start=self.first):
            if rank != self._rank and self._to.get(rank, ("",))[0] != address:
                self._to[rank] = address, self._connected(rank, MemoryAddress.of(address))

    def begin(self, sequence: int) -> None:
        """See `PartChannel.begin`."""
        self._sequence = sequence
        for lane in self._from.values():
            while lane.has_piece() and _AGE.unpack_from(lane.oldest()) < (self._epoch, sequence):
                lane.drop()

    def send(self, ranks: Sequence[int], piece: PartPiece, *, timeout_s: float) -> None:
        """See `PartChannel.send`."""
        label = _LABEL.pack(self._epoch, piece.sequence, piece.number, piece.kind, len(piece.data))
        head = label + _DIGEST.pack(_digest(label, piece.data))
        deadline_s = time.monotonic() + timeout_s
        for rank in ranks:
            lane = self._to[rank][1]
            if not lane.has_room() and not self._wait(rank, lane.has_room, deadline_s):
                raise DeadlineError(f"rank {rank} of the pool did not take a part within {timeout_s:g} s")
            lane.write(head, piece.data)
            self._on_sent(len(piece.data))

    def receive(self, rank: int, into: memoryview, *, timeout_s: float) -> PartPiece | None:
        """See `PartChannel.receive`."""
        lane, deadline_s = self._from[rank], time.monotonic() + timeout_s
        while True:
            if not lane.has_piece() and not self._wait(rank, lane.has_piece, deadline_s):
                return None
            place = lane.oldest()
            epoch, sequence, number, kind, num_bytes, digest = _HEAD.unpack_from(place)
            if (epoch, sequence) >= (self._epoch, self._sequence):
                break
            lane.drop()
        data = into if len(into) == num_bytes else memoryview(bytearray(num_bytes))
        data[:] = place[_HEAD.size:_HEAD.size + num_bytes]
        if _digest(place[:_LABEL.size], data) != digest:
            raise IntegrityError(f"from rank {rank} of the pool: what arrived is not what was sent (digest of part "
                                 f"{number} of batch {sequence})")
        if epoch != self._epoch:
            raise PeerLostError(f"rank {rank} is in epoch {epoch} of the pool, this one in {self._epoch}")
        lane.drop()
        return PartPiece(PacketKind(kind), sequence, number, data)

    def abandon(self) -> None:
        """See `PartChannel.abandon`."""
        self._is_abandoned = True

    def close(self) -> None:
        os.close(self._descriptor)

    def _wait(self, rank: int, is_there: Callable[[], bool], deadline_s: float) -> bool:
        """Until it is; in the end False. Raises PeerLostError when the rank is gone, or the pool broken."""
        self._vigil.begin()
        nap_s = FIRST_NAP_S
        while not is_there():
            if self._vigil.lasts():
                os.sched_yield()
                continue
            self._check(rank)
            if self._is_abandoned:
                raise PeerLostError(f"the pool broke while rank {self._rank} of it waited for rank {rank}")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._vigil.in_vain()
                return False
            time.sleep(min(nap_s, left_s))
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
        self._vigil.rewarded()
        return True

    def _connected(self, rank: int, address: MemoryAddress) -> _PartLane:
        try:
            descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
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
    """That of the rank with this place in its stage."""
    start = _LINE + place * LANE_BYTES
    return _PartLane(memory[start:start + LANE_BYTES])


def _digest(label: memoryview | bytes, data: memoryview | bytearray) -> int:
    """XXH3-64 of a piece, keyed by its label, as frames have it (`engine/pipeline/frames.py`)."""
    return xxh3_64_intdigest(data, seed=xxh3_64_intdigest(label))

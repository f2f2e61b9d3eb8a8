"""Memory that the ranks of a stage share: what of a broken past or of another process is in it is
noticed."""

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.pipeline.channel import PacketKind, PartPiece
from pool.pipeline.part_memory import MemoryAddress, PartMemory, share_a_host, this_host
from runtime.errors import DeadlineError, IntegrityError, PeerLostError
from tests.support.pool.formings import forming_of
from transfer.transport.authenticator import new_key
from transfer.transport.refusals import RefusalReason

HEAD_BYTES = 64


def memory_of(rank: int) -> PartMemory:
    return PartMemory(this_host(), rank=rank, size=2, check=lambda rank: None)


@pytest.fixture
def pair() -> Iterator[list[PartMemory]]:
    """Create two members in epoch 1 of their pool."""
    found = [memory_of(0), memory_of(1)]
    join(found, epoch=1)
    yield found
    for memory in found:
        memory.close()


def join(memories: list[PartMemory], *, epoch: int) -> None:
    for memory in memories:
        memory.connect([each.address for each in memories], forming_of(epoch, 2))


def part(value: int, sequence: int = 1) -> PartPiece:
    return PartPiece(PacketKind.PART, sequence, 1, bytearray([value] * 100))


def received(memory: PartMemory, rank: int) -> int | None:
    piece = memory.receive(rank, memoryview(b""), timeout_s=0.0)
    return None if piece is None else piece.data[99]


def test_parts_come_in_order_and_two_may_be_under_way(pair: list[PartMemory]) -> None:
    first, second = pair
    assert received(second, 0) is None
    for value in (1, 2):
        first.send([1], part(value), timeout_s=0.0)
    with pytest.raises(DeadlineError, match="rank 1 of the pool did not take a part within 0 s"):
        first.send([1], part(3), timeout_s=0.0)
    assert [received(second, 0) for _ in range(3)] == [1, 2, None]


def test_parts_of_an_epoch_or_a_batch_before_are_dropped(pair: list[PartMemory]) -> None:
    first, second = pair
    first.send([1], part(1), timeout_s=0.0)
    second.begin(2)
    first.send([1], part(2, sequence=2), timeout_s=0.0)
    assert received(second, 0) == 2
    first.send([1], part(3, sequence=3), timeout_s=0.0)
    first.connect([first.address, second.address], forming_of(2, 2))
    first.send([1], part(4), timeout_s=0.0)
    second.connect([first.address, second.address], forming_of(2, 2))
    assert received(second, 0) == 4


def test_a_restarted_rank_finds_its_place(pair: list[PartMemory]) -> None:
    first, second = pair
    first.send([1], part(1), timeout_s=0.0)
    again = memory_of(
        0
    )  # what the process before has left is in the second one's memory, which lives on
    join([again, second], epoch=2)
    second.begin(1)
    again.send([1], part(2), timeout_s=0.0)
    second.send([0], part(3), timeout_s=0.0)
    assert (received(second, 0), received(again, 1)) == (2, 3)
    again.close()


def test_a_changed_byte_is_noticed(pair: list[PartMemory]) -> None:
    first, second = pair
    first.send([1], part(1), timeout_s=0.0)
    with mmap.mmap(
        os.open(f"/proc/self/fd/{MemoryAddress.of(second.address).descriptor}", os.O_RDWR), 0
    ) as memory:
        memory[memory.find(b"\1" * 100) + 5] ^= 1
    with pytest.raises(
        IntegrityError, match=r"from rank 0 of the pool: .*damaged part 1 of batch 1"
    ):
        second.receive(0, memoryview(b""), timeout_s=0.0)


def test_parts_of_another_pool_are_dropped_and_counted(pair: list[PartMemory]) -> None:
    """Its rank was given this memory before, and still writes there, in the same epoch."""
    first, second = pair
    other = memory_of(0)
    other.connect(
        [other.address, second.address], forming_of(1, 2, pool="other", session=99, key=new_key())
    )
    other.send([1], part(7), timeout_s=0.0)
    assert received(second, 0) is None
    assert second.refused == {RefusalReason.EARLIER: 1}
    first.send([1], part(1), timeout_s=0.0)
    assert received(second, 0) == 1
    other.close()


@pytest.mark.parametrize("session", [1, 2], ids=["members and key differ", "session differs"])
def test_parts_under_the_same_session_need_the_key(pair: list[PartMemory], session: int) -> None:
    _, second = pair
    other = memory_of(0)
    other.connect([other.address, second.address], forming_of(1, 2, session=session, key=new_key()))
    other.send([1], part(7), timeout_s=0.0)
    if session == 1:
        with pytest.raises(IntegrityError, match="damaged part 1 of batch 1"):
            received(second, 0)
    else:
        assert received(second, 0) is None
    other.close()


def test_a_part_that_is_written_again_is_not_taken_again(pair: list[PartMemory]) -> None:
    first, second = pair
    first.send([1], part(1), timeout_s=0.0)
    first.send([1], part(2), timeout_s=0.0)
    with mmap.mmap(
        os.open(f"/proc/self/fd/{MemoryAddress.of(second.address).descriptor}", os.O_RDWR), 0
    ) as memory:
        old, new = (memory.find(bytes([value]) * 100) - HEAD_BYTES for value in (1, 2))
        assert received(second, 0) == 1
        memory[new : new + HEAD_BYTES + 100] = memory[old : old + HEAD_BYTES + 100]
    assert received(second, 0) is None
    assert second.refused == {RefusalReason.REPLAYED: 1}


def test_a_part_after_a_missing_one_is_an_error(pair: list[PartMemory]) -> None:
    first, second = pair
    first.send([1], part(1), timeout_s=0.0)
    first.send([1], part(2), timeout_s=0.0)
    second._from[0].drop()
    with pytest.raises(IntegrityError, match="skipped part 1 of batch 1"):
        received(second, 0)


def test_only_its_user_may_open_the_memory_and_it_cannot_shrink(
    pair: list[PartMemory],
) -> None:
    descriptor = MemoryAddress.of(pair[0].address).descriptor
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    for size in (1, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)


def test_memory_of_another_process_and_of_another_host_is_refused(pair: list[PartMemory]) -> None:
    first, second = pair
    address = MemoryAddress.of(second.address)
    other = str(replace(address, token="00" * 16))
    with pytest.raises(PeerLostError, match="the memory of rank 1 is another process's"):
        first.connect([first.address, other], forming_of(2, 2))
    with pytest.raises(PeerLostError, match="cannot open the memory of rank 1"):
        first.connect([first.address, str(replace(address, descriptor=1 << 20))], forming_of(2, 2))
    with pytest.raises(PeerLostError, match="is not the address of a rank's memory"):
        share_a_host([first.address, "nonsense"])
    assert share_a_host([first.address, second.address])
    assert not share_a_host([first.address, str(replace(address, host="another"))])
    assert not share_a_host([first.address, ""])


def test_a_lost_rank_is_not_waited_for() -> None:
    def gone(rank: int) -> None:
        raise PeerLostError(f"stage {rank} is gone")

    memory = PartMemory(this_host(), rank=0, size=2, check=gone)
    with pytest.raises(PeerLostError, match="stage 1 is gone"):
        memory.receive(1, memoryview(b""), timeout_s=60.0)
    memory.close()

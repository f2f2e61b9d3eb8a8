"""Ranks that share a stage: what they exchange, and what becomes of all when one cannot go on."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest
import torch

from engine.core.batch import ForwardMode
from engine.core.layer_range import TensorRank
from engine.core.rows import Row, build_batch
from engine.pipeline import records
from engine.pipeline.frame_parts import MAX_PART_BYTES
from engine.pipeline.ranks import StageRanks
from engine.pipeline.tensor_channel import TensorChannel
from pool.pipeline.part_memory import PartMemory, this_host
from runtime.errors import IntegrityError, InternalError, PeerLostError
from testing.inprocess_channel import InProcessChannel
from tests.support.pool.formings import forming_of

Step = Callable[[StageRanks], object]


class GroupMaker(Protocol):
    def __call__(self, size: int, *, step_limit_s: float = 0.0) -> list[StageRanks]: ...


@pytest.fixture(params=["frames", "memory"])
def ranks_of(request: pytest.FixtureRequest) -> Iterator[GroupMaker]:
    """Build the ranks of stage 1 of a pool of two, which exchange frames or shared memory."""
    memories: list[PartMemory] = []

    def make(size: int, *, step_limit_s: float = 0.0) -> list[StageRanks]:
        frames = InProcessChannel.pool(2 * size)[size:]
        found = [
            StageRanks(TensorRank(rank, size), stage=1, step_limit_s=step_limit_s)
            for rank in range(size)
        ]
        if request.param == "memory":
            memories.extend(
                PartMemory(this_host(), rank=size + rank, size=size, check=frames[rank].check)
                for rank in range(size)
            )
        for memory in memories:
            memory.connect([each.address for each in memories], forming_of(1, 2 * size))
        for rank, ranks in enumerate(found):
            ranks.use(
                TensorChannel(frames[rank], max_bytes=1 << 26), memories[rank] if memories else None
            )
        return found

    yield make
    for memory in memories:
        memory.close()


def together(group: list[StageRanks], steps: list[Step]) -> list[object]:
    """Run the steps concurrently; return the result or exception of each."""

    def outcome(ranks: StageRanks, step: Step) -> object:
        try:
            return step(ranks)
        except Exception as error:  # noqa: BLE001 - it is the outcome
            return error

    with ThreadPoolExecutor(len(group)) as threads:
        return list(threads.map(outcome, group, steps))


def test_parts_come_by_rank_and_only_the_first_collects(ranks_of: GroupMaker) -> None:
    def step(ranks: StageRanks) -> object:
        with ranks.step(1):
            everywhere = ranks.gather(torch.full((2, 1), own := ranks.own.rank))
            first = ranks.collect(
                torch.full((1, own + 1), own, dtype=torch.int32), [1], [1, 2, 3, 4]
            )
            uneven = ranks.gather(torch.full((own,), own), [0, 1, 2, 3])
            swapped = ranks.swap(
                [torch.full((own * to % 3,), 10 * own + to) for to in range(4)],
                [rank * own % 3 for rank in range(4)],
            )
            return [
                None if part is None else part.flatten().tolist()
                for part in (everywhere, first, uneven, swapped)
            ]

    results = together(ranks_of(4), [step] * 4)
    for rank, result in enumerate(results):
        pairs, columns = [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
        swapped = [10 * other + rank for other in range(4) for _ in range(other * rank % 3)]
        assert result == [pairs, None if rank else columns, [1, 2, 2, 3, 3, 3], swapped]


def test_a_long_part_goes_in_several_packets(ranks_of: GroupMaker) -> None:
    rows = 5 * MAX_PART_BYTES // (2 * 4 * 1024)
    part = torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024)

    def step(ranks: StageRanks) -> bool:
        with ranks.step(1):
            return torch.equal(ranks.gather(part), torch.cat([part, part]))

    assert together(ranks_of(2), [step] * 2) == [True, True]


def test_shares_come_each_by_itself_and_the_own_one_is_not_copied(ranks_of: GroupMaker) -> None:
    def step(ranks: StageRanks) -> object:
        own = ranks.own.rank
        shares = torch.split(torch.arange(0, 6)[:, None] + 10 * own, [2, 0, 1, 3])
        with ranks.step(1):
            parts = ranks.swap_shares(shares)
        return parts[own] is shares[own], [part.flatten().tolist() for part in parts]

    rows = [[0, 1], [], [2], [3, 4, 5]]
    assert together(ranks_of(4), [step] * 4) == [
        (True, [[10 * other + row for row in share] for other in range(4)]) for share in rows
    ]


def test_rows_are_completed_in_place(ranks_of: GroupMaker) -> None:
    counts = [2, 0, 1, 3]

    def step(ranks: StageRanks) -> list[int]:
        rows = torch.full((6,), -1)
        torch.split(rows, counts)[ranks.own.rank].fill_(ranks.own.rank)
        with ranks.step(1):
            ranks.complete(rows, counts)
        return rows.tolist()

    assert together(ranks_of(4), [step] * 4) == [[0, 0, 2, 3, 3, 3]] * 4


def test_a_failing_rank_fails_the_batch_on_all_and_the_next_one_runs(
    ranks_of: GroupMaker,
) -> None:
    group = ranks_of(4)

    def works(ranks: StageRanks) -> int:
        with ranks.step(1):
            return len([ranks.gather(torch.ones(1, 1)) for _ in range(3)])

    def fails(ranks: StageRanks) -> None:
        with ranks.step(1):
            ranks.gather(torch.ones(1, 1))
            raise KeyError("a bug")

    results = together(group, [works, works, fails, works])
    assert all(
        isinstance(result, InternalError) and "rank 2 of stage 1: 'a bug'" in str(result)
        for place, result in enumerate(results)
        if place != 2
    )
    assert isinstance(results[2], KeyError)

    def next_one(ranks: StageRanks) -> float:
        with ranks.step(2):
            return ranks.gather(torch.ones(1, 1)).sum().item()

    assert together(group, [next_one] * 4) == [4, 4, 4, 4]


def test_ranks_can_fail_together_in_consecutive_batches(
    ranks_of: GroupMaker,
) -> None:
    """Unread messages of a failed batch do not block the next ones."""
    group = ranks_of(4)
    for sequence in range(1, 8):

        def fails(ranks: StageRanks, sequence: int = sequence) -> None:
            with ranks.step(sequence):
                raise KeyError("a bug")

        assert [type(result) for result in together(group, [fails] * 4)] == [KeyError] * 4

    def works(ranks: StageRanks) -> int:
        with ranks.step(8):
            return len(ranks.gather(torch.ones(1, 1)))

    assert together(group, [works] * 4) == [4] * 4


def test_a_silent_rank_is_named_by_the_one_that_waits(ranks_of: GroupMaker) -> None:
    group = ranks_of(2, step_limit_s=0.2)

    def warm(ranks: StageRanks) -> None:  # until the first step any length is possible
        with ranks.step(1):
            ranks.gather(torch.ones(1, 1))

    def waits(ranks: StageRanks) -> None:
        with ranks.step(2):
            ranks.gather(torch.ones(1, 1))

    together(group, [warm, warm])
    waiting, _ = together(group, [waits, lambda ranks: None])
    assert isinstance(waiting, PeerLostError)
    assert "rank 0 of stage 1 has waited 0.15 s for rank 1 of stage 1: part 1 of batch 2" in str(
        waiting
    )


def test_a_wait_ends_when_the_pool_is_broken(ranks_of: GroupMaker) -> None:
    group = ranks_of(2)
    timer = threading.Timer(0.1, group[0].abandon)
    timer.start()
    with group[0].step(1), pytest.raises(PeerLostError, match=r"the pool broke while rank \d "):
        group[0].gather(torch.ones(1, 1))
    timer.join()


def test_an_unexpected_part_breaks_the_pool(ranks_of: GroupMaker) -> None:
    def before(ranks: StageRanks) -> None:
        with ranks.step(1):
            ranks.collect(torch.ones(1, 1), [1], [1, 1])

    def once(ranks: StageRanks) -> None:
        with ranks.step(2):
            ranks.gather(torch.ones(1, 1))

    def ahead(ranks: StageRanks) -> None:
        with ranks.step(3):
            ranks.collect(torch.ones(1, 1), [1], [1, 1])

    group = ranks_of(2)
    together(
        group[1:], [before]
    )  # the part of batch 1 is left over, that of batch 3 is none of batch 2
    together(group[1:], [ahead])
    (result,) = together(group[:1], [once])
    assert isinstance(result, IntegrityError)
    assert "part 1 of batch 3, but part 1 of batch 2 is due" in str(result)


def test_the_leader_sends_a_batch_with_its_tokens() -> None:
    batch = build_batch(
        ForwardMode.PREFILL, [Row(5, [11, 12, 13], 0, [1], 0, None), Row(6, [14], 4, [2], 0, None)]
    )
    arrived = records.unpack_batch(records.pack_input(3, batch)).batch
    assert batch.token_ids is not None
    assert arrived.token_ids is not None
    assert torch.equal(arrived.token_ids, batch.token_ids)
    assert (arrived.request_keys, arrived.query_lens) == (batch.request_keys, batch.query_lens)

"""Allocators and leases against a plain set of integers, by hand and by random histories."""

import gc
import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.memory.integrity import check_integrity, read_books
from engine.memory.leases import (
    PageAllocator,
    PageLease,
    SlotAllocator,
    SlotLease,
    pages_for_tokens,
)
from engine.memory.ledger import FreeRuns
from runtime.errors import CapacityError, InternalError

NUM_PAGES = 14


def num_runs(ids: Iterable[int]) -> int:
    """Count the runs of consecutive ids, as a transfer sees them."""
    return 1 + sum(after != before + 1 for before, after in itertools.pairwise(ids))


class AllocatorMachine(RuleBasedStateMachine):
    """Random histories of grants, extensions and ends; `free` and `held` are the model."""

    leases = Bundle("leases")
    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.slot_pool = SlotAllocator(4)
        self.free = set(range(1, NUM_PAGES))
        self.held: dict[PageLease, list[int]] = {}
        self.held_slots: dict[SlotLease, int] = {}
        self.names = itertools.count()

    @rule(target=leases, count=st.integers(0, 6))
    def alloc(self, count: int) -> object:
        if count > len(self.free):
            with pytest.raises(CapacityError):
                self.pages.alloc(count, owner="late")
            return None
        could_be_one_run = any(
            set(range(first, first + count)) <= self.free for first in range(1, NUM_PAGES)
        )
        lease = self.pages.alloc(count, owner=f"request {next(self.names)}")
        self._grant(lease, lease.page_ids, count)
        if count and could_be_one_run:
            assert num_runs(lease.page_ids) == 1
        return lease

    @rule(lease=leases, count=st.integers(0, 4))
    def extend(self, lease: PageLease | None, count: int) -> None:
        if lease is None:
            return
        if lease.ended:
            with pytest.raises(InternalError):
                lease.extend(count)
            return
        before = lease.page_ids
        if count > len(self.free):
            with pytest.raises(CapacityError):
                lease.extend(count)
            assert lease.page_ids == before
            return
        follows = before[-1] + 1 in self.free if before and count else False
        lease.extend(count)
        assert lease.page_ids[: len(before)] == before
        if follows:
            assert lease.page_ids[len(before)] == before[-1] + 1
        self._grant(lease, lease.page_ids[len(before) :], count)

    @rule(lease=leases)
    def end(self, lease: PageLease | None) -> None:
        if lease is not None:
            lease.end()
            self.free |= set(self.held.pop(lease, []))

    @rule(target=slots)
    def alloc_slot(self) -> object:
        if len(self.held_slots) == 3:
            with pytest.raises(CapacityError):
                self.slot_pool.alloc(owner="late")
            return None
        lease = self.slot_pool.alloc(owner="request")
        assert lease.slot_id in {1, 2, 3} - set(self.held_slots.values())
        self.held_slots[lease] = lease.slot_id
        return lease

    @rule(lease=consumes(slots))
    def end_slot(self, lease: SlotLease | None) -> None:
        if lease is not None:
            lease.end()
            del self.held_slots[lease]

    @invariant()
    def books_balance(self) -> None:
        check_integrity([self.pages.ledger, self.slot_pool.ledger])
        assert self.pages.ledger.free_ids() == sorted(self.free)
        assert self.pages.num_free == len(self.free)
        assert {lease: lease.ids() for lease in self.pages.ledger.leases()} == self.held
        assert self.slot_pool.num_free == 3 - len(self.held_slots)

    def _grant(self, lease: PageLease, ids: list[int], count: int) -> None:
        assert len(ids) == len(set(ids)) == count
        assert set(ids) <= self.free
        self.free -= set(ids)
        self.held[lease] = self.held.get(lease, []) + ids


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_null_page_is_never_granted() -> None:
    pages = PageAllocator(5)
    assert (pages.num_total, pages.num_free) == (4, 4)
    assert pages.alloc(4, owner="a").page_ids == [1, 2, 3, 4]


def test_a_pool_of_only_the_null_page_grants_nothing() -> None:
    with pytest.raises(CapacityError, match="needs 1 pages, 0 of 0 are free"):
        PageAllocator(1).alloc(1, owner="a")


def test_a_refusal_names_owner_and_size_and_takes_nothing() -> None:
    pages = PageAllocator(5, name="draft pages")
    pages.alloc(3, owner="a")
    with pytest.raises(CapacityError, match="b needs 2 draft pages, 1 of 4 are free") as caught:
        pages.alloc(2, owner="b")
    assert caught.value.resource == "draft pages"
    assert pages.num_free == 1


def test_a_negative_count_is_a_bug() -> None:
    with pytest.raises(InternalError, match="-1 pages"):
        PageAllocator(5).alloc(-1, owner="a")


def test_the_lowest_run_that_fits_is_taken_whole() -> None:
    pages = PageAllocator(12)
    first, second, third, fourth = (pages.alloc(n, owner="x") for n in (2, 1, 3, 5))
    first.end()
    third.end()
    assert pages.alloc(3, owner="y").page_ids == [4, 5, 6]
    assert pages.alloc(2, owner="z").page_ids == [1, 2]
    assert second.page_ids + fourth.page_ids == [3, 7, 8, 9, 10, 11]


def test_without_a_fitting_run_the_longest_runs_are_taken() -> None:
    pages = PageAllocator(12)
    held = [
        pages.alloc(n, owner="x") for n in (1, 1, 2, 1, 3, 1, 2)
    ]  # 1 | 2 | 3-4 | 5 | 6-8 | 9 | 10-11
    for lease in held[::2]:
        lease.end()
    lease = pages.alloc(6, owner="y")
    assert lease.page_ids == [6, 7, 8, 3, 4, 1]


def test_growth_goes_to_the_next_page_if_it_can() -> None:
    pages = PageAllocator(10)
    lease, other = pages.alloc(2, owner="a"), pages.alloc(2, owner="b")
    other.end()
    gap = pages.alloc(1, owner="c")
    lease.extend(1)
    assert (gap.page_ids, lease.page_ids) == ([3], [1, 2, 4])
    lease.extend(2)
    assert lease.page_ids == [1, 2, 4, 5, 6]
    assert lease.num_pages == 5


def test_an_empty_lease_can_grow() -> None:
    lease = PageAllocator(4).alloc(0, owner="a")
    lease.extend(2)
    assert lease.page_ids == [1, 2]


def test_a_table_is_made_once_and_follows_the_lease() -> None:
    lease = PageAllocator(5).alloc(2, owner="a")
    before = lease.table
    assert lease.table is before, "a step pays for every page of its requests"
    assert before.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 3
    lease.extend(1)
    assert (before.tolist(), lease.table.tolist()) == ([1, 2], [1, 2, 3])


def test_leaving_the_block_ends_the_lease_even_on_error() -> None:
    pages = PageAllocator(5)
    with pytest.raises(KeyError), pages.alloc(3, owner="a") as lease:
        raise KeyError
    assert lease.ended
    assert pages.num_free == 4


def test_ending_twice_frees_once() -> None:
    pages = PageAllocator(5)
    lease = pages.alloc(3, owner="a")
    lease.end()
    taken = pages.alloc(4, owner="b")
    lease.end()
    assert pages.num_free == 0
    assert taken.page_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "use",
    [
        lambda lease: lease.page_ids,
        lambda lease: lease.table,
        lambda lease: lease.num_pages,
        lambda lease: lease.extend(1),
        PageLease.__enter__,
    ],
)
def test_a_lease_is_not_used_after_its_end(use: Callable[[PageLease], object]) -> None:
    lease = PageAllocator(5).alloc(1, owner="request 7")
    lease.end()
    with pytest.raises(InternalError, match="request 7 on pages was used after its end"):
        use(lease)


def test_the_ids_given_out_are_a_copy() -> None:
    lease = PageAllocator(5).alloc(2, owner="a")
    lease.page_ids.append(99)
    assert lease.page_ids == [1, 2]


def test_the_null_slot_is_never_granted() -> None:
    slots = SlotAllocator(3)
    assert [slots.alloc(owner="a").slot_id, slots.alloc(owner="b").slot_id] == [1, 2]
    with pytest.raises(CapacityError) as caught:
        slots.alloc(owner="c")
    assert caught.value.resource == "slots"


def test_a_slot_is_free_again_after_its_end() -> None:
    slots = SlotAllocator(2)
    lease = slots.alloc(owner="a")
    lease.end()
    assert slots.alloc(owner="b").slot_id == 1
    with pytest.raises(InternalError, match="after its end"):
        _ = lease.slot_id


def test_a_model_without_recurrent_state_uses_the_null_slot_for_all() -> None:
    slots = SlotAllocator(0)
    leases = [slots.alloc(owner=f"request {i}") for i in range(5)]
    assert [lease.slot_id for lease in leases] == [0] * 5
    assert (slots.num_total, slots.num_free) == (0, 0)
    check_integrity([slots.ledger])
    for lease in leases:
        lease.end()
    check_integrity([slots.ledger], live_owners=())


def test_giving_back_a_free_id_is_a_bug() -> None:
    runs = FreeRuns(1, 5)
    with pytest.raises(InternalError, match="id 3 is free already"):
        runs.add([3])


def test_runs_that_touch_become_one() -> None:
    runs = FreeRuns(1, 10)
    taken = runs.take(9)
    assert (len(runs), list(runs), 4 in runs) == (0, [], False)
    runs.add([4, 6, 5])
    assert (len(runs), list(runs), [i in runs for i in (3, 4, 6, 7)]) == (
        3,
        [4, 5, 6],
        [False, True, True, False],
    )
    assert runs.take(3) == [4, 5, 6]
    assert taken == list(range(1, 10))


def test_books_of_a_balanced_pool() -> None:
    pages, slots = PageAllocator(10), SlotAllocator(3)
    pages.alloc(2, owner="request a")
    pages.alloc(1, owner="request a")
    with pages.alloc(3, owner="request b") as ended:  # pages 4 to 6
        pages.ledger.keep(ended.page_ids)
    pages.alloc(1, owner="request c", shared=[4])
    slots.alloc(owner="request a")
    text = check_integrity([pages.ledger, slots.ledger], live_owners={"request a", "request c"})
    assert text == (
        "pages: 2 free + 2 cached + 5 leased, of 9 (request a 3, request c 2)\n"
        "slots: 1 free + 0 cached + 1 leased, of 2 (request a 1)"
    )


def test_a_lease_without_an_owner_is_a_named_leak() -> None:
    pages = PageAllocator(10)
    pages.alloc(2, owner="request a")
    pages.alloc(3, owner="request b")
    with pytest.raises(InternalError, match="leaked by request b: 3") as caught:
        check_integrity([pages.ledger], live_owners={"request a"})
    assert "leaked by request a" not in str(caught.value)


def test_a_forgotten_lease_is_still_found() -> None:
    pages = PageAllocator(10)
    pages.alloc(2, owner="request a")
    gc.collect()
    with pytest.raises(InternalError, match="leaked by request a: 2"):
        check_integrity([pages.ledger], live_owners=())


def test_a_lost_page_is_named() -> None:
    pages = PageAllocator(12)
    lease = pages.alloc(11, owner="request a")
    lease._ids = lease._ids[:1]
    with pytest.raises(InternalError, match="lost 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"):
        check_integrity([pages.ledger])


def test_a_page_with_two_owners_is_named_though_the_counts_agree() -> None:
    pages = PageAllocator(6)
    first, second = pages.alloc(2, owner="a"), pages.alloc(1, owner="b")
    second._ids = first._ids[:1]
    books = read_books(pages.ledger)
    assert books.num_free + sum(count for _, count in books.leased) == books.num_total
    assert books.faults == ("lost 3", "held twice 1")


def test_an_id_outside_the_pool_is_named() -> None:
    pages = PageAllocator(6)
    pages.alloc(1, owner="a")._ids = [1, 0, 6]
    assert read_books(pages.ledger).faults == ("not of this pool 0, 6",)


@pytest.mark.parametrize(
    ("num_tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2)]
)
def test_pages_for_tokens_rounds_up(num_tokens: int, pages: int) -> None:
    assert pages_for_tokens(num_tokens, 64) == pages

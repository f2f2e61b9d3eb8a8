"""Cached and shared pages against a model of their holders, by random histories and by hand."""

import itertools
from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.memory.integrity import check_integrity, read_books
from engine.memory.leases import PageAllocator, PageLease
from runtime.errors import CapacityError, InternalError

NUM_PAGES = 12


class SharingMachine(RuleBasedStateMachine):
    """`cache` is the model's cache, the oldest page first; `held` what each lease reads and
    writes."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.pages.ledger.serve(self.evict)
        self.cache: dict[int, None] = {}
        self.held: dict[PageLease, tuple[list[int], list[int]]] = {}
        self.asked: list[int] = []  # pages that the lease which is being granted shares
        self.names = itertools.count()

    def evict(self, count: int) -> Collection[int]:
        """Evict by the model's choice, independent of the ledger."""
        victims = [
            page for page in self.cache if page not in self.leased and page not in self.asked
        ][:count]
        assert len(victims) == count, "more was requested than is unused"
        for page in victims:
            del self.cache[page]
        return victims

    @property
    def leased(self) -> set[int]:
        return {page for shared, own in self.held.values() for page in (*shared, *own)}

    @property
    def available(self) -> set[int]:
        return set(range(1, NUM_PAGES)) - self.leased

    @rule(target=leases, count=st.integers(0, 6), num_shared=st.integers(0, 4))
    def alloc(self, count: int, num_shared: int) -> object:
        shared = self.asked = list(self.cache)[:num_shared]
        if count > len(self.available - set(shared)):
            with pytest.raises(CapacityError):
                self.pages.alloc(count, owner="late", shared=shared)
            return None
        before = set(self.cache)
        lease = self.pages.alloc(count, owner=f"request {next(self.names)}", shared=shared)
        own = lease.page_ids[len(shared) :]
        assert lease.page_ids[: len(shared)] == shared
        assert len(set(own)) == count
        assert not set(own) & self.leased, "a page has two writers"
        assert not set(own) & set(self.cache), "a page that others read is written"
        assert before - set(self.cache) <= set(own), "more was evicted than there was need for"
        self.held[lease] = (shared, own)
        return lease

    @rule(lease=leases, count=st.integers(1, 3))
    def keep(self, lease: PageLease | None, count: int) -> None:
        """Mark the request's next pages as final."""
        if lease is None or lease.ended:
            return
        ready = [page for page in self.held[lease][1] if page not in self.cache][:count]
        self.pages.ledger.keep(ready)
        self.cache |= dict.fromkeys(ready)

    @rule(lease=leases)
    def unshare(self, lease: PageLease | None) -> None:
        if lease is None or lease.ended:
            return
        shared, own = self.held[lease]
        self.asked = []
        if len(shared) > len(self.available):
            with pytest.raises(CapacityError):
                lease.unshare()
            assert lease.page_ids == [*shared, *own]
            return
        leased, before = self.leased, set(self.cache)
        lease.unshare()
        new = lease.page_ids[: len(shared)]
        assert lease.page_ids[len(shared) :] == own
        assert not set(new) & (leased | set(self.cache)), "a page that others hold"
        assert before - set(self.cache) <= set(new), "more was evicted than there was need for"
        self.held[lease] = ([], lease.page_ids)

    @rule(page=st.integers(1, NUM_PAGES - 1))
    def release(self, page: int) -> None:
        if page in self.cache:
            del self.cache[page]
            self.pages.ledger.release([page])
        else:
            with pytest.raises(InternalError, match="it is not kept"):
                self.pages.ledger.release([page])

    @rule(lease=consumes(leases))
    def end(self, lease: PageLease | None) -> None:
        if lease is not None:
            lease.end()
            self.held.pop(lease, None)

    @invariant()
    def books_balance(self) -> None:
        books = read_books(self.pages.ledger)
        assert not books.faults, str(books)
        assert (
            books.num_free + books.num_cached + books.num_leased == books.num_total == NUM_PAGES - 1
        )
        assert (books.num_cached, books.num_leased) == (
            len(set(self.cache) - self.leased),
            len(self.leased),
        )
        assert self.pages.ledger.num_cached == books.num_cached
        assert self.pages.num_available == len(self.available)

    @invariant()
    def tables_are_those_of_the_leases(self) -> None:
        for lease in self.held:
            assert lease.table.tolist() == lease.page_ids


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def kept(pages: PageAllocator, count: int) -> list[int]:
    """Return cached pages of a finished request."""
    with pages.alloc(count, owner="computed") as lease:
        pages.ledger.keep(lease.page_ids)
        return lease.page_ids


def test_cached_pages_outlive_their_request_and_count_as_available() -> None:
    pages = PageAllocator(6)
    kept(pages, 3)
    assert (pages.num_free, pages.num_available) == (2, 5)
    assert (
        check_integrity([pages.ledger], live_owners=())
        == "pages: 2 free + 3 cached + 0 leased, of 5"
    )


def test_a_lease_evicts_only_as_many_cached_pages_as_it_needs() -> None:
    pages = PageAllocator(6)
    cached = kept(pages, 3)
    pages.ledger.serve(lambda count: cached[:count])
    lease = pages.alloc(4, owner="b")
    assert set(lease.page_ids) == {*cached[:2], 4, 5}
    assert pages.ledger.kept_ids() == {cached[2]}


def test_a_refused_lease_evicts_nothing_and_releases_its_shared_pages() -> None:
    pages = PageAllocator(6)
    cached = kept(pages, 3)
    pages.ledger.serve(lambda count: pytest.fail("evicted for nothing"))
    with pytest.raises(CapacityError, match="b needs 5 pages, 4 of 5 are free"):
        pages.alloc(5, owner="b", shared=cached[:1])
    assert (pages.num_free, pages.num_available) == (2, 5)


def test_shared_pages_are_not_evicted_for_the_lease_that_shares_them() -> None:
    pages = PageAllocator(6)
    cached = kept(pages, 3)
    pages.ledger.serve(
        lambda count: [page for page in cached if not pages.ledger.is_leased(page)][:count]
    )
    lease = pages.alloc(3, owner="b", shared=cached[:2])
    assert lease.page_ids == [1, 2, 3, 4, 5]


def test_two_readers_outlive_the_cache_and_the_writer() -> None:
    pages = PageAllocator(4)
    writer = pages.alloc(1, owner="a")
    pages.ledger.keep(writer.page_ids)
    first, second = (pages.alloc(0, owner=name, shared=[1]) for name in ("b", "c"))
    pages.ledger.release([1])
    writer.end()
    first.end()
    assert pages.num_free == 2
    assert check_integrity([pages.ledger]) == "pages: 2 free + 0 cached + 1 leased, of 3 (c 1)"
    second.end()
    assert pages.num_free == 3


@pytest.mark.parametrize("ids", [[1], [2]])
def test_only_leased_uncached_pages_can_be_cached(ids: list[int]) -> None:
    pages = PageAllocator(4)
    assert kept(pages, 1) == [1]
    with pytest.raises(InternalError, match="cannot be kept"):
        pages.ledger.keep(ids)


def test_only_cached_pages_can_be_shared() -> None:
    pages = PageAllocator(4)
    lease = pages.alloc(1, owner="a")
    with pytest.raises(InternalError, match="b shares pages 1, which no cache keeps"):
        pages.alloc(1, owner="b", shared=lease.page_ids)


def test_a_cache_that_gives_up_too_few_is_a_bug() -> None:
    pages = PageAllocator(4)
    kept(pages, 3)
    with pytest.raises(InternalError, match="gave up too few: 0 of 2 are free"):
        pages.alloc(2, owner="b")

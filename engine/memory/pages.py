"""Pages of the paged caches, and the lease a request holds on its own. Draft models have an allocator of their own."""

from engine.memory.leases import Lease, Ledger


class PageLease(Lease):
    """A request's pages, in position order."""

    @property
    def page_ids(self) -> list[int]:
        """A copy. Raises InternalError after the end."""
        return self.ids()

    @property
    def num_pages(self) -> int:
        """Raises InternalError after the end."""
        self._check_alive()
        return len(self._ids)

    def extend(self, count: int) -> None:
        """Add `count` pages behind the present ones, adjacent to the last where possible.

        Raises:
            CapacityError: not that many are free; the lease keeps what it has.
            InternalError: the lease has ended.
        """
        self._check_alive()
        self._ids += self._ledger.take(count, self.owner, after=self._ids[-1] if self._ids else None)


class PageAllocator:
    """Grants pages 1..num_pages-1; page 0 is the null page.

    Prefers adjacent pages at low ids: a transfer moves a run of pages as one stretch of bytes.
    """

    def __init__(self, num_pages: int, *, name: str = "pages") -> None:
        """`num_pages` counts the null page; `name` appears in errors and reports."""
        self.ledger = Ledger(name, num_pages)

    @property
    def num_total(self) -> int:
        return self.ledger.num_total

    @property
    def num_free(self) -> int:
        return self.ledger.num_free

    def alloc(self, count: int, *, owner: str) -> PageLease:
        """All `count` pages or none.

        Raises:
            CapacityError: fewer than `count` are free.
        """
        return PageLease(self.ledger, owner, count)


def pages_for_tokens(num_tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return -(-num_tokens // page_size)

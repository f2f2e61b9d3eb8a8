"""Pages of simulated decode pools: counted, or leased beside the prompts of the same worker."""

from typing import Protocol

from engine.memory.leases import PageAllocator, PageLease
from runtime.errors import InternalError


class PoolPages(Protocol):
    """The pages of a decode pool, by the key of the request that holds them."""

    is_shared: bool
    """Whether others take pages, too, so that those of the next rounds must be taken before."""

    @property
    def num_free(self) -> int: ...

    def take(self, key: int, count: int) -> None:
        """Take pages that are free."""

    def give_back(self, key: int, count: int) -> None:
        """Give back all pages of a request, which are `count`."""

    def check(self, num_held: int) -> None:
        """Check that requests hold `num_held` pages.

        Raises:
            InternalError: they hold another number.
        """


class CountedPages:
    """Pages that only decode requests use."""

    is_shared = False

    def __init__(self, num_pages: int) -> None:
        self.num_free = self._num_pages = num_pages

    def take(self, key: int, count: int) -> None:
        del key
        self.num_free -= count

    def give_back(self, key: int, count: int) -> None:
        del key
        self.num_free += count

    def check(self, num_held: int) -> None:
        num_used = self._num_pages - self.num_free
        if num_used != num_held:
            raise InternalError(f"{num_used} pages are used, requests hold {num_held}")


class LeasedPages:
    """Pages that a worker of both roles has for prompts, their cache and decode requests."""

    is_shared = True

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._leases: dict[int, PageLease] = {}

    @property
    def num_free(self) -> int:
        return self._allocator.num_available

    def adopt(self, key: int, lease: PageLease) -> int:
        """Take over the pages of a computed prompt; return their number."""
        self._leases[key] = lease
        return lease.num_pages

    def take(self, key: int, count: int) -> None:
        lease = self._leases.get(key)
        if lease is None:
            self._leases[key] = self._allocator.alloc(count, owner=f"decode/{key}")
        elif count:
            lease.extend(count)

    def give_back(self, key: int, count: int) -> None:
        del count
        lease = self._leases.pop(key, None)
        if lease is not None:
            lease.end()

    def check(self, num_held: int) -> None:
        num_leased = sum(lease.num_pages for lease in self._leases.values())
        if num_leased != num_held:
            raise InternalError(f"{num_leased} pages are leased, requests hold {num_held}")

"""Leases: temporary rights to ids of one pool.

Index 0 of every pool is the null record. Padded table entries point to it, padded rows write to it,
and no lease holds it. A request holds two kinds of ids: pages of the paged caches, and one slot of
recurrent (conv and state) memory if the model has any. A draft's pages have the same ids as its
target's.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine.memory.layout import NULL_INDEX
from engine.memory.ledger import Ledger
from runtime.errors import CapacityError, InternalError


class Lease:
    """A right to ids of one pool.

    `end` returns the ids once; any later use raises. The first `num_shared` ids are read-only: they
    were granted to another lease. As a context manager a lease ends when the block exits.
    """

    def __init__(self, ledger: Ledger, owner: str, count: int, shared: Sequence[int] = ()) -> None:
        """Lease `shared` ids that a cache keeps, and `count` new ones.

        Raises:
            CapacityError: fewer than `count` ids of the pool are free or cached.
        """
        self.owner = owner
        self.num_shared = len(shared)
        self._ledger = ledger
        ledger.share(shared, owner)  # first: ids under a lease are not evicted
        try:
            self._ids = [*shared, *ledger.take(count, owner, after=shared[-1] if shared else None)]
        except CapacityError:
            ledger.give_back(shared)
            raise
        self._ended = False
        ledger.opened(self)

    @property
    def ended(self) -> bool:
        return self._ended

    def ids(self) -> list[int]:
        """Return a copy of the ids, in the order they were granted.

        Raises:
            InternalError: the lease has ended.
        """
        self._check_alive()
        return list(self._ids)

    def end(self) -> None:
        """Return the ids to the pool. Idempotent."""
        if not self._ended:
            self._ended = True
            self._ledger.closed(self, self._ids)

    def __enter__(self) -> Self:
        self._check_alive()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{len(self._ids)} {self._ledger.name}"
        return f"{type(self).__name__}({self.owner}: {state})"

    def _check_alive(self) -> None:
        if self._ended:
            raise InternalError(
                f"lease of {self.owner} on {self._ledger.name} was used after its end"
            )


class PageLease(Lease):
    """A request's pages, in position order."""

    _table: NDArray[np.int32] | None = None

    @property
    def page_ids(self) -> list[int]:
        """Return a copy of the page ids.

        Raises:
            InternalError: the lease has ended.
        """
        return self.ids()

    @property
    def table(self) -> NDArray[np.int32]:
        """Return the ids as [pages] int32, read-only.

        The array is cached until the pages change, because every step reads it.

        Raises:
            InternalError: the lease has ended.
        """
        self._check_alive()
        if self._table is None:
            self._table = np.array(self._ids, np.int32)
            self._table.flags.writeable = False
        return self._table

    @property
    def num_pages(self) -> int:
        """Return the number of pages.

        Raises:
            InternalError: the lease has ended.
        """
        self._check_alive()
        return len(self._ids)

    def extend(self, count: int) -> None:
        """Append `count` pages, adjacent to the last one if possible.

        Raises:
            CapacityError: too few pages are free; the lease is unchanged.
            InternalError: the lease has ended.
        """
        self._check_alive()
        self._ids += self._ledger.take(
            count, self.owner, after=self._ids[-1] if self._ids else None
        )
        self._table = None

    def unshare(self) -> None:
        """Replace the shared pages by new ones, without their content.

        Raises:
            CapacityError: too few pages are free or cached; the lease is unchanged.
            InternalError: the lease has ended.
        """
        self._check_alive()
        shared = self._ids[: self.num_shared]
        self._ids[: self.num_shared] = self._ledger.take(len(shared), self.owner)
        self._table = None
        self.num_shared = 0
        self._ledger.give_back(shared)


class Allocator:
    """An allocator that grants ids of one pool by leases.

    Its counts are those of its ledger.
    """

    def __init__(self, num_ids: int, *, name: str) -> None:
        """Create an allocator of `num_ids` ids, including the null record.

        `name` appears in errors and reports.
        """
        self.ledger = Ledger(name, num_ids)

    @property
    def num_total(self) -> int:
        return self.ledger.num_total

    @property
    def num_free(self) -> int:
        return self.ledger.num_free

    @property
    def num_available(self) -> int:
        """Return the number of ids that leases could get now, including evictable cached ids."""
        return self.ledger.num_available


class PageAllocator(Allocator):
    """An allocator of pages 1..num_pages-1; page 0 is the null page.

    It prefers adjacent pages with low ids, because a transfer moves consecutive pages as one
    stretch.
    """

    def __init__(self, num_pages: int, *, name: str = "pages") -> None:
        super().__init__(num_pages, name=name)

    def alloc(self, count: int, *, owner: str, shared: Sequence[int] = ()) -> PageLease:
        """Lease `count` new pages, all or none, after the `shared` ones, which a cache keeps.

        Raises:
            CapacityError: fewer than `count` are free or cached.
        """
        return PageLease(self.ledger, owner, count, shared)


def pages_for_tokens(num_tokens: int, page_size: int) -> int:
    """Return the number of pages for this number of tokens."""
    return -(-num_tokens // page_size)


class SlotLease(Lease):
    """One request's slot; the null slot for models without recurrent state."""

    @property
    def slot_id(self) -> int:
        """Return the slot id.

        Raises:
            InternalError: the lease has ended.
        """
        ids = self.ids()
        return ids[0] if ids else NULL_INDEX


class SlotAllocator(Allocator):
    """An allocator of slots 1..num_slots-1; slot 0 is the null slot.

    With `num_slots` 0 the model has no recurrent state. Every request then gets a lease of the null
    slot without limit, so callers need not distinguish the kinds of models.
    """

    def __init__(self, num_slots: int, *, name: str = "slots") -> None:
        super().__init__(num_slots, name=name)

    @property
    def is_stateless(self) -> bool:
        return self.ledger.num_ids == 0

    def alloc(self, *, owner: str) -> SlotLease:
        """Lease a slot.

        Raises:
            CapacityError: every slot is leased.
        """
        return SlotLease(self.ledger, owner, 0 if self.is_stateless else 1)

    def share(self, slot_id: int, *, owner: str) -> SlotLease:
        """Lease a slot that a cache keeps, for reading."""
        return SlotLease(self.ledger, owner, 0, [slot_id])

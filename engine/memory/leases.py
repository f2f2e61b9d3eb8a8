"""Leases: the right to ids of one pool, for as long as it lasts.

Index 0 of every pool is the null record: padded table entries point at it, padded rows write to it,
no lease holds it. A request holds two kinds of ids: pages of the paged caches, and one slot of
recurrent (conv and state) memory where the model has any. A draft's pages have the ids of its
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
    """The right to some ids of one pool. `end` gives them back, once; every use after that is
    refused. The first `num_shared` it only reads: they were granted to another lease.

    A context manager: leaving the block ends the lease.
    """

    def __init__(self, ledger: Ledger, owner: str, count: int, shared: Sequence[int] = ()) -> None:
        """On `shared` ids that a cache keeps, and `count` new ones. Raises CapacityError when the
        pool has fewer than `count` ids free or cached."""
        self.owner = owner
        self.num_shared = len(shared)
        self._ledger = ledger
        ledger.share(shared, owner)  # first: what is under lease is not evicted
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
        """A copy, in the order they were granted.

        Raises:
            InternalError: the lease has ended.
        """
        self._check_alive()
        return list(self._ids)

    def end(self) -> None:
        """Give the ids back. Calling it again does nothing."""
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
        """A copy. Raises InternalError after the end."""
        return self.ids()

    @property
    def table(self) -> NDArray[np.int32]:
        """The ids as [pages] int32, not to be written to; made anew only when pages come or go,
        since every step wants them. Raises InternalError after the end."""
        self._check_alive()
        if self._table is None:
            self._table = np.array(self._ids, np.int32)
            self._table.flags.writeable = False
        return self._table

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
        self._ids += self._ledger.take(
            count, self.owner, after=self._ids[-1] if self._ids else None
        )
        self._table = None

    def unshare(self) -> None:
        """Take pages of its own in place of the shared ones, whose content is not wanted any more.

        Raises:
            CapacityError: not that many are free or cached; the lease keeps what it has.
            InternalError: the lease has ended.
        """
        self._check_alive()
        shared = self._ids[: self.num_shared]
        self._ids[: self.num_shared] = self._ledger.take(len(shared), self.owner)
        self._table = None
        self.num_shared = 0
        self._ledger.give_back(shared)


class Allocator:
    """Grants ids of one pool by leases. Their numbers are those of its ledger."""

    def __init__(self, num_ids: int, *, name: str) -> None:
        """`num_ids` counts the null record; `name` appears in errors and reports."""
        self.ledger = Ledger(name, num_ids)

    @property
    def num_total(self) -> int:
        return self.ledger.num_total

    @property
    def num_free(self) -> int:
        return self.ledger.num_free

    @property
    def num_available(self) -> int:
        """Ids that leases could get now, those that a cache would give up included."""
        return self.ledger.num_available


class PageAllocator(Allocator):
    """Grants pages 1..num_pages-1; page 0 is the null page.

    Prefers adjacent pages at low ids: a transfer moves a run of pages as one stretch of bytes.
    """

    def __init__(self, num_pages: int, *, name: str = "pages") -> None:
        super().__init__(num_pages, name=name)

    def alloc(self, count: int, *, owner: str, shared: Sequence[int] = ()) -> PageLease:
        """All `count` pages or none, behind the `shared` ones, which a cache keeps.

        Raises:
            CapacityError: fewer than `count` are free or cached.
        """
        return PageLease(self.ledger, owner, count, shared)


def pages_for_tokens(num_tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return -(-num_tokens // page_size)


class SlotLease(Lease):
    """One request's slot; the null slot, which is never leased, for models without recurrent
    state."""

    @property
    def slot_id(self) -> int:
        """Raises InternalError after the end."""
        ids = self.ids()
        return ids[0] if ids else NULL_INDEX


class SlotAllocator(Allocator):
    """Grants slots 1..num_slots-1; slot 0 is the null slot.

    With `num_slots` 0 the model has no recurrent state: every request gets a lease on the null
    slot, and there is no limit, so that callers need not know which kind of model they serve.
    """

    def __init__(self, num_slots: int, *, name: str = "slots") -> None:
        super().__init__(num_slots, name=name)

    @property
    def is_stateless(self) -> bool:
        return self.ledger.num_ids == 0

    def alloc(self, *, owner: str) -> SlotLease:
        """Raises CapacityError when every slot is taken."""
        return SlotLease(self.ledger, owner, 0 if self.is_stateless else 1)

    def share(self, slot_id: int, *, owner: str) -> SlotLease:
        """Of a slot that a cache keeps: to read it."""
        return SlotLease(self.ledger, owner, 0, [slot_id])

"""Which lease holds which id of one pool. Pure integers: the tensors behind the ids live in `engine/memory/pools.py`.

Index 0 of every pool is the null record: padded table entries point at it, padded rows write to it, no lease holds it.
A ledger belongs to one thread, the one that schedules. A request holds two kinds of ids: pages of the paged caches, and
one slot of recurrent (conv and state) memory where the model has any. A draft's pages have the ids of its target's.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from engine.memory.layout import NULL_INDEX
from runtime.errors import CapacityError, InternalError


class Ledger:
    """Ids 1..num_ids-1 of one pool, each free or held by exactly one lease that has not ended."""

    def __init__(self, name: str, num_ids: int) -> None:
        """`name` is what the ids are ("pages"); `num_ids` counts the null id, 0 means that the pool is empty."""
        self.name = name
        self.num_ids = num_ids
        self._free = FreeRuns(1, num_ids)
        self._leases: dict[Lease, None] = {}  # in the order they began

    @property
    def num_total(self) -> int:
        """Ids that can be leased; the null id is not one of them."""
        return max(0, self.num_ids - 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_ids(self) -> list[int]:
        return list(self._free)

    def leases(self) -> "list[Lease]":
        """Those that have not ended, whether or not they are still referred to."""
        return list(self._leases)

    def take(self, count: int, owner: str, *, after: int | None = None) -> list[int]:
        """Remove `count` ids from the free ones, all or none; those following `after` first.

        Raises:
            CapacityError: fewer than `count` are free.
        """
        if count < 0:
            raise InternalError(f"{owner} asked for {count} {self.name}")
        if count > self.num_free:
            raise CapacityError(
                f"{owner} needs {count} {self.name}, {self.num_free} of {self.num_total} are free", resource=self.name
            )
        return self._free.take(count, after=after)

    def opened(self, lease: "Lease") -> None:
        self._leases[lease] = None

    def closed(self, lease: "Lease", ids: list[int]) -> None:
        del self._leases[lease]
        self._free.add(ids)


class Lease:
    """The right to some ids of one pool. `end` gives them back, once; every use after that is refused.

    A context manager: leaving the block ends the lease.
    """

    def __init__(self, ledger: Ledger, owner: str, count: int) -> None:
        """Raises CapacityError when the pool has fewer than `count` ids free."""
        self.owner = owner
        self._ledger = ledger
        self._ids = ledger.take(count, owner)
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{len(self._ids)} {self._ledger.name}"
        return f"{type(self).__name__}({self.owner}: {state})"

    def _check_alive(self) -> None:
        if self._ended:
            raise InternalError(f"lease of {self.owner} on {self._ledger.name} was used after its end")


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


class SlotLease(Lease):
    """One request's slot; the null slot, which is never leased, for models without recurrent state."""

    @property
    def slot_id(self) -> int:
        """Raises InternalError after the end."""
        ids = self.ids()
        return ids[0] if ids else NULL_INDEX


class SlotAllocator:
    """Grants slots 1..num_slots-1; slot 0 is the null slot.

    With `num_slots` 0 the model has no recurrent state: every request gets a lease on the null slot, and there is
    no limit, so that callers need not know which kind of model they serve.
    """

    def __init__(self, num_slots: int, *, name: str = "slots") -> None:
        self.ledger = Ledger(name, num_slots)

    @property
    def is_stateless(self) -> bool:
        return self.ledger.num_ids == 0

    @property
    def num_total(self) -> int:
        return self.ledger.num_total

    @property
    def num_free(self) -> int:
        return self.ledger.num_free

    def alloc(self, *, owner: str) -> SlotLease:
        """Raises CapacityError when every slot is taken."""
        return SlotLease(self.ledger, owner, 0 if self.is_stateless else 1)


class FreeRuns:
    """Ids of `range(first, end)` that no lease holds, as disjoint half-open runs that do not touch."""

    def __init__(self, first: int, end: int) -> None:
        self._starts = [first] if end > first else []
        self._ends = [end] if end > first else []
        self._count = max(0, end - first)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(start, end)

    def __contains__(self, item: int) -> bool:
        at = bisect_right(self._starts, item) - 1
        return at >= 0 and item < self._ends[at]

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """Remove and return `count` ids, in as few runs as first fit finds.

        Ids that continue `after` come first. Then the lowest run that holds all the rest; if none does, the longest
        runs, each whole. The caller has checked that enough are free.
        """
        taken = self._continue_run(after, count) if after is not None else []
        while len(taken) < count:
            taken += self._take_from(self._choose(count - len(taken)), count - len(taken))
        return taken

    def add(self, ids: Iterable[int]) -> None:
        """Put ids back.

        Raises:
            InternalError: an id is free already.
        """
        for item in ids:
            self._add(item)

    def _continue_run(self, after: int, count: int) -> list[int]:
        at = bisect_left(self._starts, after + 1)
        if at < len(self._starts) and self._starts[at] == after + 1:
            return self._take_from(at, count)
        return []

    def _choose(self, count: int) -> int:
        longest = 0
        for at, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= count:
                return at
            if end - start > self._ends[longest] - self._starts[longest]:
                longest = at
        return longest

    def _take_from(self, at: int, count: int) -> list[int]:
        start = self._starts[at]
        end = min(start + count, self._ends[at])
        if end == self._ends[at]:
            del self._starts[at], self._ends[at]
        else:
            self._starts[at] = end
        self._count -= end - start
        return list(range(start, end))

    def _add(self, item: int) -> None:
        if item in self:
            raise InternalError(f"id {item} is free already")
        at = bisect_right(self._starts, item)
        joins_left = at > 0 and self._ends[at - 1] == item
        joins_right = at < len(self._starts) and self._starts[at] == item + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_left:
            self._ends[at - 1] = item + 1
        elif joins_right:
            self._starts[at] = item
        else:
            self._starts.insert(at, item)
            self._ends.insert(at, item + 1)
        self._count += 1

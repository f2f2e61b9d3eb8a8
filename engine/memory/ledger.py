"""Holders of the ids of one pool.

The module handles integers only; the tensors of the ids are in `engine/memory/pools.py`.

A cache may keep ids whose content is needed after their request (`Ledger.keep`). Further leases
share them. Only the lease that an id was granted to writes to it, and no lease writes after it is
kept. Kept ids without a lease are *cached*: they are evicted if a lease needs more ids than are
free. A ledger belongs to one thread, which schedules.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import Protocol

from runtime.errors import CapacityError, InternalError

Evict = Callable[[int], Collection[int]]
"""Evict at least the given number of cached ids of the least value; return them to be freed."""


class Holder(Protocol):
    """A lease, as seen by its ledger."""

    @property
    def owner(self) -> str: ...

    @property
    def num_shared(self) -> int:
        """Return the number of leading `ids` that are read-only, granted to another lease."""
        ...

    def ids(self) -> list[int]: ...


class Ledger:
    """The ids 1..num_ids-1 of one pool.

    An id is free, or held by leases that have not ended, by a cache, or by both.
    """

    def __init__(self, name: str, num_ids: int) -> None:
        """Create a ledger with all ids free.

        `name` describes the ids ("pages"). `num_ids` counts the null id; 0 means that the pool is
        empty.
        """
        self.name = name
        self.num_ids = num_ids
        self._free = FreeRuns(1, num_ids)
        self._leases: dict[Holder, None] = {}  # in the order they began
        self._holders: Counter[int] = Counter()  # number of leases per id
        self._kept = bytearray(num_ids)  # 1 for each id that a cache holds
        self._num_kept = 0
        self._num_cached = 0
        self._evict: Evict = lambda count: ()

    @property
    def num_total(self) -> int:
        """Return the number of ids that can be leased, without the null id."""
        return max(0, self.num_ids - 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return the number of ids that only a cache holds."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Return the number of ids that a lease could get now: the free and the cached ones."""
        return self.num_free + self.num_cached

    def free_ids(self) -> list[int]:
        return list(self._free)

    @property
    def num_kept(self) -> int:
        """Return the number of ids that a cache holds, with or without a lease."""
        return self._num_kept

    def kept_ids(self) -> set[int]:
        """Return the ids that a cache holds, with or without a lease."""
        return set(compress(range(self.num_ids), self._kept))

    def is_leased(self, item: int) -> bool:
        return self._holders[item] > 0

    def leases(self) -> list[Holder]:
        """Return the leases that have not ended, even if they are no longer referenced."""
        return list(self._leases)

    def take(self, count: int, owner: str, *, after: int | None = None) -> list[int]:
        """Lease `count` ids, all or none.

        Free ids that follow `after` come first. If too few ids are free, cached ids are evicted.

        Raises:
            CapacityError: fewer than `count` are free or cached.
        """
        if count < 0:
            raise InternalError(f"{owner} asked for {count} {self.name}")
        if count > self.num_available:
            raise CapacityError(
                f"{owner} needs {count} {self.name}, {self.num_available} of {self.num_total} are free",
                resource=self.name,
            )
        if count > self.num_free:
            self.release(self._evict(count - self.num_free))
        if count > self.num_free:
            raise InternalError(
                f"the cache of {self.name} gave up too few: {self.num_free} of {count} are free"
            )
        taken = self._free.take(count, after=after)
        self._holders.update(taken)
        return taken

    def share(self, ids: Sequence[int], owner: str) -> None:
        """Add a lease on ids that a cache keeps.

        Raises:
            InternalError: an id is not kept.
        """
        for item in ids:
            if not self._is_kept(item):
                raise InternalError(f"{owner} shares {self.name} {item}, which no cache keeps")
        self._num_cached -= len(ids) - sum(map(self._holders.__contains__, ids))
        self._holders.update(ids)

    def give_back(self, ids: Iterable[int]) -> None:
        """Remove one lease from each of the ids."""
        holders = self._holders
        kept = self._kept
        free = list[int]()
        for item in ids:
            left = holders[item] - 1
            if left:
                holders[item] = left
                continue
            holders.pop(item)
            if kept[item]:
                self._num_cached += 1
            else:
                free.append(item)
        self._free.add(free)

    def serve(self, evict: Evict) -> None:
        """Set the function that evicts cached ids if too few are free.

        A ledger has at most one cache.
        """
        self._evict = evict

    def keep(self, ids: Collection[int]) -> None:
        """Mark these ids, whose content is final, as held by a cache.

        Raises:
            InternalError: an id is kept already, or has no lease.
        """
        holders = self._holders
        kept = self._kept
        for item in ids:
            if item not in holders or kept[item]:
                raise InternalError(
                    f"{self.name} {item} cannot be kept: it is "
                    f"{'kept already' if item in holders else 'under no lease'}"
                )
            kept[item] = 1
        self._num_kept += len(ids)

    def release(self, ids: Collection[int]) -> None:
        """Release the cache's hold on these ids; those without a lease become free.

        Raises:
            InternalError: an id is not kept.
        """
        for item in ids:
            if not self._is_kept(item):
                raise InternalError(
                    f"{self.name} {item} cannot be released by the cache: it is not kept"
                )
            self._kept[item] = 0
        self._num_kept -= len(ids)
        free = [item for item in ids if item not in self._holders]
        self._num_cached -= len(free)
        self._free.add(free)

    def _is_kept(self, item: int) -> bool:
        return 0 <= item < self.num_ids and self._kept[item] > 0

    def opened(self, lease: Holder) -> None:
        self._leases[lease] = None

    def closed(self, lease: Holder, ids: list[int]) -> None:
        del self._leases[lease]
        self.give_back(ids)


class FreeRuns:
    """The free ids of `range(first, end)`, as disjoint half-open runs that are not adjacent."""

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

        Ids that continue `after` come first. Next comes the lowest run that holds all the rest. If
        there is none, the longest runs are taken, each as a whole. The caller has checked that
        enough ids are free.
        """
        taken = self._continue_run(after, count) if after is not None else []
        while len(taken) < count:
            taken += self._take_from(self._choose(count - len(taken)), count - len(taken))
        return taken

    def add(self, ids: Iterable[int]) -> None:
        """Return ids to the free runs.

        Raises:
            InternalError: an id is free already.
        """
        start = end = -1
        for item in sorted(ids):  # ids leased or evicted together are mostly adjacent
            if item != end:
                if item < end:
                    raise InternalError(f"id {item} is free already")
                self._add(start, end)
                start = item
            end = item + 1
        self._add(start, end)

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

    def _add(self, start: int, end: int) -> None:
        """Add one run of ids, which may be empty."""
        if start == end:
            return
        at = bisect_right(self._starts, start)
        if at > 0 and self._ends[at - 1] > start:
            raise InternalError(f"id {start} is free already")
        if at < len(self._starts) and self._starts[at] < end:
            raise InternalError(f"id {self._starts[at]} is free already")
        self._count += end - start
        joins_left = at > 0 and self._ends[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)

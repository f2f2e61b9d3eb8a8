"""A set of integers kept as ascending runs, so that neighbours are handed out together."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from runtime.errors import InternalError


class FreeRuns:
    """Ids of `range(first, end)` that nobody holds, as disjoint half-open runs that do not touch."""

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

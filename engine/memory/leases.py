"""Who holds which id of one pool. Pure integers: the tensors behind the ids live in `engine/memory/pools.py`.

Index 0 of every pool is the null record: padded table entries point at it, padded rows write to it, nobody owns it.
A ledger belongs to one thread, the one that schedules.
"""

from types import TracebackType
from typing import Self

from engine.memory.runs import FreeRuns
from runtime.errors import CapacityError, InternalError


class Ledger:
    """Ids 1..num_ids-1 of one pool, each free or held by exactly one lease that has not ended."""

    def __init__(self, name: str, num_ids: int) -> None:
        """`name` says what the ids are ("pages"); `num_ids` counts the null id, 0 means that the pool is empty."""
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
        """Those that have not ended, whether or not anybody still refers to them."""
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

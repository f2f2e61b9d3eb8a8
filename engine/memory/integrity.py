"""Integrity check of pools: every id is free, cached, or leased by a live request.

The check runs when the loop is idle, and in tests after each operation. It compares ids instead of
counts. So it finds a page that two requests may write to, even if another page is lost.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.memory.ledger import Ledger
from runtime.errors import InternalError

_SHOWN_IDS = 8


@dataclass(frozen=True)
class PoolBooks:
    """The ids of one pool by state, each counted once.

    `faults` is empty if the pool is consistent.
    """

    name: str
    num_total: int
    num_free: int
    num_cached: int  # held by a cache only
    num_leased: int
    # (owner, number of ids), in the order of the leases; each lease counts its shared ids
    leased: tuple[tuple[str, int], ...]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        owners = ", ".join(f"{owner} {count}" for owner, count in self.leased)
        sums = f"{self.num_free} free + {self.num_cached} cached + {self.num_leased} leased, of {self.num_total}"
        return "; ".join(
            [f"{self.name}: {sums}" + (f" ({owners})" if owners else ""), *self.faults]
        )


def read_books(ledger: Ledger, *, live_owners: Collection[str] | None = None) -> PoolBooks:
    """Return the states of one pool's ids.

    `live_owners` are the owners that may hold leases (None: all). A lease of another owner is a
    leak.
    """
    leased: dict[str, int] = {}
    written: Counter[int] = Counter()  # by leases that the id was granted to
    shared: set[int] = set()
    for lease in ledger.leases():
        ids = lease.ids()
        shared.update(ids[: lease.num_shared])
        written.update(ids[lease.num_shared :])
        leased[lease.owner] = leased.get(lease.owner, 0) + len(ids)
    free = ledger.free_ids()
    kept = ledger.kept_ids()
    under_lease = shared | written.keys()
    held = kept | under_lease
    faults = [*_faults(ledger, held, free, written)]
    if ledger.num_cached != len(kept - under_lease):
        faults.append(f"{ledger.num_cached} counted as cached")
    if live_owners is not None:
        faults += [
            f"leaked by {owner}: {count}"
            for owner, count in leased.items()
            if owner not in live_owners
        ]
    return PoolBooks(
        ledger.name,
        ledger.num_total,
        num_free=len(free),
        num_cached=len(kept - under_lease),
        num_leased=len(under_lease),
        leased=tuple(leased.items()),
        faults=tuple(faults),
    )


def check_integrity(
    ledgers: Iterable[Ledger], *, live_owners: Collection[str] | None = None
) -> str:
    """Return one line per pool if all pools are consistent.

    Raises:
        InternalError: ids are lost, free and held, granted twice, outside the pool, or leased by an
            owner that is not in `live_owners`. The message names pools, ids and owners.
    """
    books = [read_books(ledger, live_owners=live_owners) for ledger in ledgers]
    text = "\n".join(str(book) for book in books)
    if any(book.faults for book in books):
        raise InternalError(f"pool books do not balance\n{text}")
    return text


def _faults(
    ledger: Ledger, held: set[int], free: list[int], written: Counter[int]
) -> Iterable[str]:
    owned = range(1, ledger.num_ids)
    found = {
        "lost": set(owned) - held - set(free),
        "free and held": held & set(free),
        "held twice": {item for item, count in written.items() if count > 1},
        "not of this pool": {item for item in (*held, *free) if item not in owned},
    }
    return (f"{what} {_show(sorted(ids))}" for what, ids in found.items() if ids)


def _show(ids: list[int]) -> str:
    more = len(ids) - _SHOWN_IDS
    return ", ".join(str(item) for item in ids[:_SHOWN_IDS]) + (
        f" and {more} more" if more > 0 else ""
    )

"""The books must balance: every id of every pool is free, cached, or leased by requests that live.

Run when the loop is idle, and by the tests after everything they do. It compares ids, not counts,
so a page that two requests may write to is found even while another one is lost.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.memory.ledger import Ledger
from runtime.errors import InternalError

_SHOWN_IDS = 8


@dataclass(frozen=True)
class PoolBooks:
    """One pool's ids by who holds them, each counted once. `faults` is empty when the books
    balance."""

    name: str
    num_total: int
    num_free: int
    num_cached: int  # held by a cache alone
    num_leased: int
    leased: tuple[
        tuple[str, int], ...
    ]  # (owner, ids), in the order the leases began; shared ids with each of them
    faults: tuple[str, ...]

    def __str__(self) -> str:
        owners = ", ".join(f"{owner} {count}" for owner, count in self.leased)
        sums = f"{self.num_free} free + {self.num_cached} cached + {self.num_leased} leased, of {self.num_total}"
        return "; ".join(
            [f"{self.name}: {sums}" + (f" ({owners})" if owners else ""), *self.faults]
        )


def read_books(ledger: Ledger, *, live_owners: Collection[str] | None = None) -> PoolBooks:
    """What one pool's ids are doing. `live_owners` are those that may hold leases (None: all may);
    a lease of another owner is a leak."""
    leased: dict[str, int] = {}
    written: Counter[int] = Counter()  # by leases that the id was granted to
    shared: set[int] = set()
    for lease in ledger.leases():
        ids = lease.ids()
        shared.update(ids[: lease.num_shared])
        written.update(ids[lease.num_shared :])
        leased[lease.owner] = leased.get(lease.owner, 0) + len(ids)
    free, kept, under_lease = ledger.free_ids(), ledger.kept_ids(), shared | written.keys()
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
    """One line per pool, when all books balance.

    Raises:
        InternalError: ids are lost, free and held, granted twice, outside the pool, or leased by an
            owner that is not in `live_owners`; the message names pools, ids and owners.
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

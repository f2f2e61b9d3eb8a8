"""The books must balance: every id of every pool is free, cached, or leased by a request that lives.

Run when the loop is idle, and by the tests after everything they do. It compares ids, not counts, so a page that two
requests hold is found even while another one is lost.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.memory.leases import Ledger
from runtime.errors import InternalError

_SHOWN_IDS = 8


@dataclass(frozen=True)
class PoolBooks:
    """One pool's ids by who holds them. `faults` is empty when the books balance."""

    name: str
    num_total: int
    num_free: int
    num_cached: int
    leased: tuple[tuple[str, int], ...]  # (owner, ids), in the order the leases began
    faults: tuple[str, ...]

    def __str__(self) -> str:
        num_leased = sum(count for _, count in self.leased)
        owners = ", ".join(f"{owner} {count}" for owner, count in self.leased)
        sums = f"{self.num_free} free + {self.num_cached} cached + {num_leased} leased, of {self.num_total}"
        return "; ".join([f"{self.name}: {sums}" + (f" ({owners})" if owners else ""), *self.faults])


def read_books(
    ledger: Ledger, *, live_owners: Collection[str] | None = None, cache_owners: Collection[str] = ()
) -> PoolBooks:
    """What one pool's ids are doing.

    `live_owners` are those that may hold leases (None: all may); a lease of another owner is a leak.
    `cache_owners` hold ids for no request, to be given back under pressure.
    """
    holders: Counter[int] = Counter(ledger.free_ids())
    leased: dict[str, int] = {}
    num_cached = 0
    for lease in ledger.leases():
        ids = lease.ids()
        holders.update(ids)
        if lease.owner in cache_owners:
            num_cached += len(ids)
        else:
            leased[lease.owner] = leased.get(lease.owner, 0) + len(ids)
    return PoolBooks(
        name=ledger.name,
        num_total=ledger.num_total,
        num_free=ledger.num_free,
        num_cached=num_cached,
        leased=tuple(leased.items()),
        faults=tuple(_faults(ledger, holders, leased, live_owners)),
    )


def check_integrity(
    ledgers: Iterable[Ledger], *, live_owners: Collection[str] | None = None, cache_owners: Collection[str] = ()
) -> str:
    """One line per pool, when all books balance.

    Raises:
        InternalError: ids are lost, held twice, outside the pool, or leased by an owner that is not in `live_owners`;
            the message names pools, ids and owners.
    """
    books = [read_books(ledger, live_owners=live_owners, cache_owners=cache_owners) for ledger in ledgers]
    text = "\n".join(str(book) for book in books)
    if any(book.faults for book in books):
        raise InternalError(f"pool books do not balance\n{text}")
    return text


def _faults(
    ledger: Ledger, holders: Counter[int], leased: dict[str, int], live_owners: Collection[str] | None
) -> Iterable[str]:
    owned = range(1, ledger.num_ids)
    lost = [item for item in owned if item not in holders]
    shared = sorted(item for item, count in holders.items() if count > 1)
    foreign = sorted(item for item in holders if item not in owned)
    if lost:
        yield f"lost {_show(lost)}"
    if shared:
        yield f"held twice {_show(shared)}"
    if foreign:
        yield f"not of this pool {_show(foreign)}"
    if live_owners is not None:
        for owner, count in leased.items():
            if owner not in live_owners:
                yield f"leaked by {owner}: {count}"


def _show(ids: list[int]) -> str:
    more = len(ids) - _SHOWN_IDS
    return ", ".join(str(item) for item in ids[:_SHOWN_IDS]) + (f" and {more} more" if more > 0 else "")

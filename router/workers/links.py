"""Which prefill workers may feed which decode pools, and which links between them have failed."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from router.workers.worker import Worker
from runtime.clock import Clock
from runtime.digests import may_pair

_compatibility = attrgetter("snapshot.compatibility")
SEVERED_MEMORY_S = 30.0
MAX_SEVERED_PAIRS = 4096


class FailedLinks:
    """Pairs of live workers that recently failed a handoff.

    The link between their hosts fails, which neither worker shows to the router. An entry is kept
    for a while, since no report shows when such a link is repaired.

    Entries are by incarnation: a restarted worker is another worker.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expires_s: dict[tuple[str, str], float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._expires_s)

    def add(self, source: str, pool: str) -> None:
        """Record a failed handoff from this prefill worker to this pool; drop the oldest entry if
        too many.
        """
        self.remove(source, pool)
        if len(self._expires_s) >= MAX_SEVERED_PAIRS:
            del self._expires_s[next(iter(self._expires_s))]
        self._expires_s[source, pool] = self._clock.now() + SEVERED_MEMORY_S

    def remove(self, source: str, pool: str) -> None:
        """Remove a pair after a successful handoff."""
        self._expires_s.pop((source, pool), None)

    def by_source(self) -> dict[str, set[str]]:
        """Return the pools with a failed link, by source."""
        now_s = self._clock.now()
        found = dict[str, set[str]]()
        for (source, pool), expires_s in self._expires_s.items():
            if now_s < expires_s:
                found.setdefault(source, set()).add(pool)
        return found


class Linked(NamedTuple):
    """Prefill workers of one kind, each of which may feed each of these decode pools."""

    sources: Sequence[Worker]
    pools: Sequence[Worker]


def linked(sources: Sequence[Worker], pools: Sequence[Worker], failed: FailedLinks) -> list[Linked]:
    """Return which sources may feed which pools; failed links only if no source has another pool."""
    pools_alike = _by_compatibility(pools)
    groups = [
        Linked(
            alike,
            [
                pool
                for other, found in pools_alike.items()
                if may_pair(digest, other)
                for pool in found
            ],
        )
        for digest, alike in _by_compatibility(sources).items()
    ]
    if not len(failed):
        return groups
    by_source = failed.by_source()
    sound = [part for group in groups for part in _without_failed(group, by_source)]
    return sound if any(part.pools for part in sound) else groups


def _without_failed(group: Linked, failed: dict[str, set[str]]) -> list[Linked]:
    """Split a group by failed links: each source with one gets its own list of pools."""
    whole = [source for source in group.sources if source.incarnation not in failed]
    parts = [
        Linked(
            [source],
            [pool for pool in group.pools if pool.incarnation not in failed[source.incarnation]],
        )
        for source in group.sources
        if source.incarnation in failed
    ]
    return [Linked(whole, group.pools), *parts] if whole else parts


def _by_compatibility(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    """Group workers by compatibility, in the order of their first workers."""
    digests = dict.fromkeys(map(_compatibility, workers))
    if len(digests) == 1:
        return {digest: list(workers) for digest in digests}
    return {
        digest: [worker for worker in workers if worker.snapshot.compatibility == digest]
        for digest in digests
    }

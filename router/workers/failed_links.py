"""Links between live workers over which a handoff has failed recently."""

from runtime.clock import Clock

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

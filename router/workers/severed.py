"""Pairs of workers that lately could not hand a prompt over though both live: the link between their hosts fails, which
neither shows to the router. Kept for a while, since nothing tells when such a link is mended."""

from router.workers.worker import Booking, Worker
from runtime.clock import Clock

MEMORY_S = 30.0
MAX_PAIRS = 4096


class SeveredPairs:
    """By incarnations: a worker that has started anew is another one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[tuple[str, str], float] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, source: Booking, pool: Booking) -> None:
        """A handoff from this prefill worker to this pool failed. Where there are too many, the oldest pair goes."""
        self.remove(source, pool)
        if len(self._until_s) >= MAX_PAIRS:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[source.incarnation, pool.incarnation] = self._clock.now() + MEMORY_S

    def remove(self, source: Booking, pool: Booking) -> None:
        """One succeeded."""
        self._until_s.pop((source.incarnation, pool.incarnation), None)

    def has(self, source: Worker, pool: Worker) -> bool:
        """Whether this pair is one of them."""
        return self._clock.now() < self._until_s.get((source.incarnation, pool.incarnation), 0.0)

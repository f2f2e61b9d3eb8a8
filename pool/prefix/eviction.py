"""The order in which a prefix tree gives up its entries."""

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from math import inf, log2

from pool.prefix.runs import BlockRun

# Chosen by bench.cache_policy on a trace of conversations.
HALF_LIFE_S = 120.0  # seconds after which an unused prompt is half as likely to be used again
HIT_WEIGHT = 3  # each reuse adds this much to the likelihood; 1 is that of a never reused prompt
_SPARE_ENTRIES = 64


class EvictionOrder:
    """Priority queue of runs by the worth of their last blocks, least first.

    A worth may rise at any time; it is evaluated again when its turn comes. After a worth has
    fallen, call `put`.
    """

    def __init__(self, worth: Callable[[BlockRun], float]) -> None:
        self._worth = worth
        self._heap: list[tuple[float, int, BlockRun]] = []
        self._latest: dict[BlockRun, int] = {}  # serial of each run's valid entry
        self._serial = count()

    @property
    def least(self) -> float:
        """Return a lower bound of the worth of its runs."""
        return self._heap[0][0] if self._heap else inf

    @property
    def runs(self) -> Iterable[BlockRun]:
        return self._latest

    def put(self, run: BlockRun) -> None:
        """Add a run at its present worth, so that it may be evicted."""
        serial = self._latest[run] = next(self._serial)
        heapq.heappush(self._heap, (self._worth(run), serial, run))
        if len(self._heap) > 2 * len(self._latest) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._latest.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, run: BlockRun) -> None:
        """Remove a run, so that it may not be evicted. Idempotent."""
        self._latest.pop(run, None)

    def take(self, may_go: Callable[[BlockRun], bool]) -> BlockRun | None:
        """Remove and return the run of least worth that `may_go` accepts, or None."""
        passed = []
        found = None
        while self._heap and found is None:
            entry = worth, serial, run = heapq.heappop(self._heap)
            if self._latest.get(run) != serial:
                continue
            if self._worth(run) > worth:
                self.put(run)
            elif may_go(run):
                self.discard(run)
                found = run
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found


def worth(run: BlockRun) -> float:
    """Return the worth of the last block's page, in seconds.

    It is the logarithm of how likely a prompt is to resume there soon.
    """
    value = run.used_s + run.boost_s
    return value + HALF_LIFE_S * log2(1 + HIT_WEIGHT * run.num_hits) if run.num_hits else value


def snapshot_worth(run: BlockRun) -> float:
    """Return the worth of its snapshot, which includes the blocks that the snapshot saves."""
    return worth(run) + HALF_LIFE_S * log2(run.num_saved)


def idle_pages(leaves: Iterable[BlockRun], now_s: float) -> list[tuple[float, int]]:
    """Return the pages of a tree with these leaves, by when a prompt last went through them.

    Each item is of one run: the seconds since then, and the number of pages.
    """
    used_s: dict[BlockRun, float] = {}
    for leaf in leaves:
        latest_s, node = leaf.used_s, leaf
        while node.parent is not None and used_s.get(node, -inf) < latest_s:
            used_s[node] = latest_s
            node = node.parent
            latest_s = max(latest_s, node.used_s)
    return [(now_s - at_s, len(run.names)) for run, at_s in used_s.items()]

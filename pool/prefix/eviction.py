"""The order in which a prefix tree gives up its entries."""

import heapq
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, count
from math import inf, log2

from engine.core.request import CacheSession

# Chosen by bench.cache_policy on a trace of conversations.
HALF_LIFE_S = 120.0  # seconds after which an unused prompt is half as likely to be used again
HIT_WEIGHT = 3  # each reuse adds this much to the likelihood; 1 is that of a never reused prompt
_SPARE_ENTRIES = 64


@dataclass(eq=False, slots=True)
class SessionPoints:
    """The newest points of one session, from the oldest to the newest."""

    digest: bytes
    client: bytes
    runs: "dict[BlockRun, None]" = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class BlockRun:
    """Blocks that follow each other without a branch; at least one, except for the root.

    `start` counts the blocks before it. All other attributes describe its last block, after which
    branches begin. The other blocks were not used since and have no snapshot.
    """

    names: list[bytes]
    page_ids: "array[int]"
    parent: "BlockRun | None"
    start: int
    used_s: float
    slot_id: int | None = None  # slot of its snapshot
    num_saved: int = 0  # blocks that need not be computed with this snapshot
    num_children: int = 0
    num_hits: int = 0  # prompts that resumed here
    owner: SessionPoints | None = None  # the session that resumes here, if any
    boost_s: float = 0.0  # what the session adds to its worth

    @property
    def depth(self) -> int:
        """Return the number of blocks from the root to its last one."""
        return self.start + len(self.names)

    def has_at(self, index: int, name: bytes) -> bool:
        """Return whether the block at this index from the root is in the run, and has this name."""
        return self.start <= index < self.depth and self.names[index - self.start] == name

    def pages_to(self, depth: int) -> tuple[int, ...]:
        """Return the pages of the first `depth` blocks, the last of which is in the run."""
        parts = []
        run = self
        while run.parent is not None:
            parts.append(run.page_ids[: depth - run.start])
            depth = run.start
            run = run.parent
        return tuple(chain.from_iterable(reversed(parts)))

    def can_grow(self, session: CacheSession | None) -> bool:
        """Return whether a block of this session, or of none, may join the run after its last."""
        is_own = self.owner is None or (session is not None and session.digest == self.owner.digest)
        return self.is_bare and is_own and not self.num_hits and self.boost_s >= 0

    @property
    def is_bare(self) -> bool:
        """Return whether its last block has neither a branch nor a snapshot. False for the root."""
        return not self.num_children and self.slot_id is None and self.parent is not None


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
        """Return the runs that may be evicted, in no order."""
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

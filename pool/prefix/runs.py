"""Runs of blocks that a pool remembers, and in which order they are given up. Pure."""

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import inf, log2

# Chosen by bench.cache_policy on a trace of conversations.
HALF_LIFE_S = 120.0  # after which a prompt that did not come back is half as likely to
HIT_WEIGHT = 3  # each time that it did, it is so much likelier than one that never did
_SPARE_ENTRIES = 64


@dataclass(eq=False, slots=True)
class BlockRun:
    """Blocks that follow each other without a branch; at least one, but for the root. `start` counts those before it.
    All else is of the last of them, behind which branches begin: the others were not used since, and have no
    snapshot."""

    names: list[bytes]
    page_ids: "array[int]"
    parent: "BlockRun | None"
    start: int
    used_s: float
    slot_id: int | None = None  # of its snapshot
    num_saved: int = 0  # blocks that need not be computed for this snapshot
    num_children: int = 0
    num_hits: int = 0  # prompts that went on from here

    @property
    def depth(self) -> int:
        """Blocks from the root to its last one."""
        return self.start + len(self.names)

    @property
    def can_grow(self) -> bool:
        """Whether a block behind its last one may join the run: nothing sets that one apart."""
        return self.is_bare and not self.num_hits

    @property
    def is_bare(self) -> bool:
        """Whether neither a branch nor a snapshot is behind its last block. The root never is."""
        return not self.num_children and self.slot_id is None and self.parent is not None


class EvictionOrder:
    """Runs by the worth of their last blocks, least first.

    A worth may rise at any time: it is looked at again when its turn comes. Where it falls, `put` says so.
    """

    def __init__(self, worth: Callable[[BlockRun], float]) -> None:
        self._worth = worth
        self._heap: list[tuple[float, int, BlockRun]] = []
        self._latest: dict[BlockRun, int] = {}  # which of a run's entries counts
        self._serial = count()

    @property
    def least(self) -> float:
        """None of those in it is worth less."""
        return self._heap[0][0] if self._heap else inf

    def put(self, run: BlockRun) -> None:
        """It may be given up from now on, for what it is worth now."""
        serial = self._latest[run] = next(self._serial)
        heapq.heappush(self._heap, (self._worth(run), serial, run))
        if len(self._heap) > 2 * len(self._latest) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._latest.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, run: BlockRun) -> None:
        """It may not any more. Idempotent."""
        self._latest.pop(run, None)

    def take(self, may_go: Callable[[BlockRun], bool]) -> BlockRun | None:
        """Remove and return the one of least worth that may go; None if none may."""
        passed, found = [], None
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
    """Of its last block's page: how likely a prompt is to go on from there soon, as a logarithm, in seconds."""
    return run.used_s + HALF_LIFE_S * log2(1 + HIT_WEIGHT * run.num_hits) if run.num_hits else run.used_s


def snapshot_worth(run: BlockRun) -> float:
    """Of its snapshot, one slot each: by what it saves then, too."""
    return worth(run) + HALF_LIFE_S * log2(run.num_saved)

"""What a pool remembers of prompts: a radix tree over page-sized blocks of token ids. Pure: ids of pages and slots, no
memory behind them.

A node stands for a block, by its name (`runtime.digests`), and has the page that holds the block's entries. Names
are chained, so one table finds any node and whoever is in it has all its ancestors in it. A *resume point* is a node
from which a prompt can go on: any node of a model that keeps its whole past in pages, else those with a *snapshot*, the
recurrent state after their block, in a slot. There the tree keeps no pages behind the last snapshot of a branch: nobody
could use them.

Who may not be given up is not decided here: leases count holders, and the tree asks them. It
belongs to the thread that schedules.
"""

import heapq
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import gcd, log2

from pool.prefix.journal import PointJournal
from runtime.clock import Clock
from runtime.errors import InternalError

# Chosen by bench.cache_policy on a trace of conversations.
SNAPSHOT_SHARE = 5  # of a cache's memory, one part in so many; the rest is for pages
HALF_LIFE_S = 120.0  # after which a prompt that did not come back is half as likely to
HIT_WEIGHT = 3  # each time that it did, it is so much likelier than one that never did
_SPARE_ENTRIES = 64


@dataclass(eq=False, slots=True)
class BlockNode:
    """One block. `depth` counts blocks from the root, which is 0 and holds nothing."""

    name: bytes
    parent: "BlockNode | None"
    depth: int
    page_id: int
    used_s: float
    slot_id: int | None = None  # of its snapshot
    num_saved: int = 0  # blocks that need not be computed for this snapshot
    num_children: int = 0
    num_hits: int = 0  # prompts that went on from here


class EvictionOrder:
    """Nodes by their worth, least first.

    A node's worth may rise at any time: it is looked at again when its turn comes. Where it falls, `put` says so.
    """

    def __init__(self, worth: Callable[[BlockNode], float]) -> None:
        self._worth = worth
        self._heap: list[tuple[float, int, BlockNode]] = []
        self._latest: dict[BlockNode, int] = {}  # which of a node's entries counts
        self._serial = count()

    def put(self, node: BlockNode) -> None:
        """It may be given up from now on, for what it is worth now."""
        serial = self._latest[node] = next(self._serial)
        heapq.heappush(self._heap, (self._worth(node), serial, node))
        if len(self._heap) > 2 * len(self._latest) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._latest.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: BlockNode) -> None:
        """It may not any more. Idempotent."""
        self._latest.pop(node, None)

    def take(self, may_go: Callable[[BlockNode], bool]) -> BlockNode | None:
        """Remove and return the one of least worth that may go; None if none may."""
        passed, found = [], None
        while self._heap and found is None:
            entry = worth, serial, node = heapq.heappop(self._heap)
            if self._latest.get(node) != serial:
                continue
            if self._worth(node) > worth:
                self.put(node)
            elif may_go(node):
                self.discard(node)
                found = node
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found


@dataclass(frozen=True)
class Found:
    """What there is of a prompt. `num_tokens` of it need not be computed again: their entries are in `page_ids`, in
    position order, and the state after them in `slot_id` (None where the model has none, or none is there).
    `snapshot_tokens`: after so many its states are worth keeping, in ascending order, all beyond `num_tokens`."""

    num_tokens: int = 0
    page_ids: tuple[int, ...] = ()
    slot_id: int | None = None
    snapshot_tokens: tuple[int, ...] = ()


@dataclass
class Changed:
    """Ids that the tree took over, or gave up."""

    page_ids: list[int] = field(default_factory=list)
    slot_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ResumeRule:
    """`block_tokens`: of a page. Prompts are cut only at multiples of `grid_tokens`, so only these are resume points.
    `has_states`: nothing goes on without a recurrent state. Not so on a pool where states come with their requests."""

    block_tokens: int
    grid_tokens: int = 1
    has_states: bool = False

    def last_point(self, num_tokens: int) -> int:
        """The deepest resume point, in blocks, of a prompt of `num_tokens`. Its last token is always computed: the next
        one is drawn from it."""
        blocks = (num_tokens - 1) // self.block_tokens
        while blocks * self.block_tokens % self.grid_tokens:
            blocks -= 1
        return max(blocks, 0)

    def is_point(self, depth: int) -> bool:
        """Whether a prompt may be cut after so many blocks."""
        return depth * self.block_tokens % self.grid_tokens == 0

    def points(self, depths: range) -> range:
        """Those of consecutive depths after which a prompt may be cut."""
        step = self.grid_tokens // gcd(self.grid_tokens, self.block_tokens)
        return range(-(-depths.start // step) * step, depths.stop, step)


def _never(item: int) -> bool:
    return False


class PrefixTree:
    """See the module. Blocks are given by their names, in order from the prompt's first. `journal` has the names of the
    resume points, for those who watch."""

    def __init__(self, rule: ResumeRule, clock: Clock, *, is_page_held: Callable[[int], bool] = _never,
                 is_slot_held: Callable[[int], bool] = _never, journal: PointJournal | None = None) -> None:
        """Ids that are held are given up last, and then are their holders' alone."""
        self._rule = rule
        self._clock = clock
        self._is_page_held, self._is_slot_held = is_page_held, is_slot_held
        self.journal = journal or PointJournal()
        self._root = BlockNode(b"", None, 0, 0, 0.0)
        self._nodes: dict[bytes, BlockNode] = {}
        self._leaves = EvictionOrder(_worth)
        self._snapshots = EvictionOrder(_snapshot_worth)

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    def find(self, names: Sequence[bytes], num_tokens: int) -> Found:
        """What there is of a prompt of `num_tokens` tokens with these blocks. Changes nothing."""
        last = self._rule.last_point(num_tokens)
        known = self._deepest(names)
        point = self._resume_point(known, last)
        return Found(point.depth * self._rule.block_tokens, self._page_ids(point), point.slot_id,
                     self._snapshot_tokens(point.depth, known.depth, last))

    def resumed(self, names: Sequence[bytes], num_tokens: int) -> None:
        """A prompt goes on from what `find` found: `num_tokens` of its `Found`. The tree may have given it up since,
        although it is held, where nothing else was left."""
        point = self._nodes.get(names[num_tokens // self._rule.block_tokens - 1]) if num_tokens else None
        if point is not None:
            point.num_hits += 1
            self._use(point)

    def insert(self, names: Sequence[bytes], page_ids: Sequence[int], slot_id: int | None = None) -> Changed:
        """The entries of these blocks are computed and in these pages; `slot_id` has the state after the last of them.
        Returns what the tree took over: not the ids of blocks and states that it has already.

        Raises:
            InternalError: a state is missing, or stands where no prompt is cut, or the model has none.
        """
        if not names:
            return Changed()
        if self._rule.has_states != (slot_id is not None):
            raise InternalError(f"{len(names)} pages {'with' if slot_id else 'without'} a state behind them")
        if slot_id is not None and not self._rule.is_point(len(names)):
            raise InternalError(f"a state behind {len(names)} pages, where no prompt is cut")
        known, points = self._deepest(names), list[bytes]()
        node, taken = self._grown(known, names, page_ids), Changed(page_ids=list(page_ids[known.depth:len(names)]))
        if not self._rule.has_states:
            points = [names[depth - 1] for depth in self._rule.points(range(known.depth + 1, len(names) + 1))]
        if slot_id is not None and node.slot_id is None:
            node.slot_id, node.num_saved = slot_id, node.depth - self._resume_point(node).depth
            taken.slot_ids.append(slot_id)
            points.append(node.name)
        if points:
            self.journal.stored(points)
        self._use(node)
        return taken

    def _grown(self, node: BlockNode, names: Sequence[bytes], page_ids: Sequence[int]) -> BlockNode:
        """The last of these blocks, those behind `node` made. A long prompt has thousands."""
        if node.depth < len(names):
            self._leaves.discard(node)
        now_s, nodes = self._clock.now(), self._nodes
        for depth in range(node.depth, len(names)):
            node.num_children += 1
            name = names[depth]
            node = nodes[name] = BlockNode(name, node, depth + 1, page_ids[depth], now_s)
        return node

    def evict_pages(self, num_pages: int) -> Changed:
        """Give up what is worth least, until `num_pages` that nobody holds are among it, or nothing is left."""
        return self._evict(self._leaves, lambda given: given.page_ids, self._is_page_held, num_pages)

    def evict_snapshots(self, num_slots: int) -> Changed:
        """As `evict_pages`, until `num_slots` that nobody holds are among it. Pages behind which no snapshot is left go
        with them."""
        return self._evict(self._snapshots, lambda given: given.slot_ids, self._is_slot_held, num_slots)

    def clear(self) -> Changed:
        """Give up everything."""
        return self.evict_pages(len(self._nodes) + 1)

    def _deepest(self, names: Sequence[bytes]) -> BlockNode:
        """The last of these blocks that is there; a block is there only if those before it are."""
        depth = bisect_left(names, 1, key=lambda name: name not in self._nodes)
        return self._nodes[names[depth - 1]] if depth else self._root

    def _resume_point(self, node: BlockNode, deepest: int = sys.maxsize) -> BlockNode:
        """The next one from here towards the root that is not behind `deepest`."""
        while node.depth > deepest or not self._is_resume_point(node):
            assert node.parent is not None
            node = node.parent
        return node

    def _is_resume_point(self, node: BlockNode) -> bool:
        if node is self._root:
            return True
        return node.slot_id is not None if self._rule.has_states else self._rule.is_point(node.depth)

    def _page_ids(self, node: BlockNode) -> tuple[int, ...]:
        page_ids = []
        while node.parent is not None:
            page_ids.append(node.page_id)
            node = node.parent
        return tuple(reversed(page_ids))

    def _snapshot_tokens(self, resumed: int, known: int, last: int) -> tuple[int, ...]:
        """At the end of the prompt, and at the junction: where it parts from what others had, beyond what they left a
        state for."""
        if not self._rule.has_states:
            return ()
        junction = self._rule.last_point(min(known, last) * self._rule.block_tokens + 1)
        depths = sorted({depth for depth in (junction, last) if depth > resumed})
        return tuple(depth * self._rule.block_tokens for depth in depths)

    def _use(self, node: BlockNode) -> None:
        node.used_s = self._clock.now()
        if not node.num_children and node is not self._root:
            self._leaves.put(node)
        if node.slot_id is not None:
            self._snapshots.put(node)

    def _evict(self, order: EvictionOrder, ids: Callable[[Changed], list[int]],
               is_held: Callable[[int], bool], count: int) -> Changed:
        given = Changed()
        num_free, num_seen = 0, 0
        for may_go in (self._is_unheld, lambda node: True):
            while num_free < count and (node := order.take(may_go)) is not None:
                self._give_up(node, given)
                num_free += sum(not is_held(item) for item in ids(given)[num_seen:])
                num_seen = len(ids(given))
        return given

    def _is_unheld(self, node: BlockNode) -> bool:
        return not self._is_page_held(node.page_id) and (node.slot_id is None or not self._is_slot_held(node.slot_id))

    def _give_up(self, node: BlockNode, given: Changed) -> None:
        """A leaf, with what is before it and of no use without it; or a snapshot further in."""
        if self._rule.has_states:
            self._drop_snapshot(node, given)
            while not node.num_children and node.slot_id is None and node is not self._root:
                node = self._remove(node, given)
        else:
            node = self._remove(node, given)
        if not node.num_children and node is not self._root:
            self._leaves.put(node)

    def _drop_snapshot(self, node: BlockNode, given: Changed) -> None:
        assert node.slot_id is not None
        given.slot_ids.append(node.slot_id)
        self.journal.removed(node.name)
        node.slot_id = None
        self._snapshots.discard(node)

    def _remove(self, node: BlockNode, given: Changed) -> BlockNode:
        """A leaf without a snapshot; returns its parent, which was used whenever it was."""
        assert node.parent is not None
        if not self._rule.has_states and self._is_resume_point(node):
            self.journal.removed(node.name)
        given.page_ids.append(node.page_id)
        self._leaves.discard(node)
        del self._nodes[node.name]
        node.parent.num_children -= 1
        node.parent.used_s = max(node.parent.used_s, node.used_s)
        return node.parent


def _worth(node: BlockNode) -> float:
    """Of a block's page: how likely a prompt is to go on from there soon, as a logarithm, in seconds."""
    return node.used_s + HALF_LIFE_S * log2(1 + HIT_WEIGHT * node.num_hits)


def _snapshot_worth(node: BlockNode) -> float:
    """Of its snapshot, one slot each: by what it saves then, too."""
    return _worth(node) + HALF_LIFE_S * log2(node.num_saved)

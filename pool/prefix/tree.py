"""What a pool remembers of prompts: a radix tree over page-sized blocks of token ids. Pure: ids of
pages and slots, no memory behind them.

A block is known by its name (`runtime.digests`), and has the page that holds its entries. Names are
chained, so one table finds any block and whoever is in it has all its ancestors in it. Blocks of
one prompt follow each other by hundreds and are stored, looked up and given up together, so a node
of the tree is a *run* of them (`BlockRun`). A *resume point* is a block from which a prompt can go
on: any block of a model that keeps its whole past in pages, else those with a *snapshot*, the
recurrent state after their block, in a slot. There the tree keeps no pages behind the last snapshot
of a branch: nobody could use them.

Who may not be given up is not decided here: leases count holders, and the tree asks them. It
belongs to the thread that schedules.
"""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from math import gcd, inf, log2

from pool.prefix.journal import PointJournal
from runtime.clock import Clock
from runtime.errors import InternalError

SNAPSHOT_SHARE = (
    5  # of a cache's memory, one part in so many; the rest is for pages; by bench.cache_policy
)
# Chosen by bench.cache_policy on a trace of conversations.
HALF_LIFE_S = 120.0  # after which a prompt that did not come back is half as likely to
HIT_WEIGHT = 3  # each time that it did, it is so much likelier than one that never did
_SPARE_ENTRIES = 64


@dataclass(eq=False, slots=True)
class BlockRun:
    """Blocks that follow each other without a branch; at least one, but for the root. `start`
    counts those before it. All else is of the last of them, behind which branches begin: the others
    were not used since, and have no snapshot."""

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

    A worth may rise at any time: it is looked at again when its turn comes. Where it falls, `put`
    says so.
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
    """Of its last block's page: how likely a prompt is to go on from there soon, as a logarithm, in
    seconds."""
    return (
        run.used_s + HALF_LIFE_S * log2(1 + HIT_WEIGHT * run.num_hits)
        if run.num_hits
        else run.used_s
    )


def snapshot_worth(run: BlockRun) -> float:
    """Of its snapshot, one slot each: by what it saves then, too."""
    return worth(run) + HALF_LIFE_S * log2(run.num_saved)


@dataclass(frozen=True)
class Found:
    """What there is of a prompt. `num_tokens` of it need not be computed again: their entries are
    in `page_ids`, in position order, and the state after them in `slot_id` (None where the model
    has none, or none is there). `snapshot_tokens`: after so many its states are worth keeping, in
    ascending order, all beyond `num_tokens`."""

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
    """`block_tokens`: of a page. Prompts are cut only at multiples of `grid_tokens`, so only these
    are resume points. `has_states`: nothing goes on without a recurrent state. Not so on a pool
    where states come with their requests."""

    block_tokens: int
    grid_tokens: int = 1
    has_states: bool = False

    def last_point(self, num_tokens: int) -> int:
        """The deepest resume point, in blocks, of a prompt of `num_tokens`. Its last token is
        always computed: the next one is drawn from it."""
        return self.point_before(max((num_tokens - 1) // self.block_tokens, 0))

    def point_before(self, depth: int) -> int:
        """The deepest resume point that is not behind so many blocks."""
        return depth - depth % self._step

    def is_point(self, depth: int) -> bool:
        """Whether a prompt may be cut after so many blocks."""
        return depth * self.block_tokens % self.grid_tokens == 0

    def points(self, depths: range) -> range:
        """Those of consecutive depths after which a prompt may be cut."""
        return range(-(-depths.start // self._step) * self._step, depths.stop, self._step)

    @cached_property
    def _step(self) -> int:
        """Blocks from one resume point to the next."""
        return self.grid_tokens // gcd(self.grid_tokens, self.block_tokens)


def _never(item: int) -> bool:
    return False


def _always(run: BlockRun) -> bool:
    return True


class PrefixTree:
    """See the module. Blocks are given by their names, in order from the prompt's first. `journal`
    has the names of the resume points, for those who watch."""

    def __init__(
        self,
        rule: ResumeRule,
        clock: Clock,
        *,
        is_page_held: Callable[[int], bool] = _never,
        is_slot_held: Callable[[int], bool] = _never,
        journal: PointJournal | None = None,
    ) -> None:
        """Ids that are held are given up last, and then are their holders' alone."""
        self._rule = rule
        self._clock = clock
        self._is_page_held, self._is_slot_held = is_page_held, is_slot_held
        self.journal = journal or PointJournal()
        self._root = BlockRun([], array("i"), None, 0, 0.0)
        self._runs: dict[bytes, BlockRun] = {}  # by the names of their blocks
        self._points: (
            dict[bytes, None] | None
        ) = {}  # the names of resume points; None where every block is one
        if not rule.has_states and rule.is_point(1):
            self._points = None
        self.journal.follow(self._runs if self._points is None else self._points)
        self._leaves = EvictionOrder(worth)
        self._snapshots = EvictionOrder(snapshot_worth)

    @property
    def num_pages(self) -> int:
        return len(self._runs)

    def find(self, names: Sequence[bytes], num_tokens: int) -> Found:
        """What there is of a prompt of `num_tokens` tokens with these blocks. Changes nothing."""
        known, last = self._num_known(names), self._rule.last_point(num_tokens)
        run, depth = self._resume_point(names, min(known, last))
        return Found(
            depth * self._rule.block_tokens,
            _page_ids(run, depth),
            run.slot_id if run.depth == depth else None,
            self._snapshot_tokens(depth, known, last),
        )

    def resumed(self, names: Sequence[bytes], num_tokens: int) -> None:
        """A prompt goes on from what `find` found: `num_tokens` of its `Found`. The tree may have
        given it up since, although it is held, where nothing else was left."""
        depth = num_tokens // self._rule.block_tokens
        if depth and names[depth - 1] in self._runs:
            run = self._ending_at(names, depth)
            run.num_hits += 1
            self._use(run)

    def insert(
        self, names: Sequence[bytes], page_ids: Sequence[int], slot_id: int | None = None
    ) -> Changed:
        """The entries of these blocks are computed and in these pages; `slot_id` has the state
        after the last of them. Returns what the tree took over: not the ids of blocks and states
        that it has already.

        Raises:
            InternalError: a state is missing, or stands where no prompt is cut, or the model has
                none.
        """
        if not names:
            return Changed()
        if self._rule.has_states != (slot_id is not None):
            raise InternalError(
                f"{len(names)} pages {'with' if slot_id else 'without'} a state behind them"
            )
        if slot_id is not None and not self._rule.is_point(len(names)):
            raise InternalError(f"a state behind {len(names)} pages, where no prompt is cut")
        known, points = self._num_known(names), list[bytes]()
        taken = Changed(page_ids=list(page_ids[known : len(names)]))
        run = self._ending_at(names, known)
        if taken.page_ids:
            run = self._grown(run, names[known:], taken.page_ids)
        if not self._rule.has_states:
            points = [
                names[depth - 1] for depth in self._rule.points(range(known + 1, len(names) + 1))
            ]
        if slot_id is not None and run.slot_id is None:
            run.slot_id, run.num_saved = (
                slot_id,
                run.depth - self._resume_point(names, run.depth)[1],
            )
            taken.slot_ids.append(slot_id)
            points.append(names[-1])
        if points and self._points is not None:
            self._points.update(dict.fromkeys(points))
        if points:
            self.journal.stored(points)
        self._use(run)
        return taken

    def evict_pages(self, num_pages: int) -> Changed:
        """Give up what is worth least, until `num_pages` that nobody holds are among it, or nothing
        is left."""
        given = Changed()
        num_free = 0
        for may_go, is_held in ((self._is_unheld, self._is_page_held), (_always, _never)):
            while num_free < num_pages and (run := self._leaves.take(may_go)) is not None:
                num_seen = len(given.page_ids)
                if self._rule.has_states:
                    self._give_up_state(run, given)
                else:
                    self._give_up_pages(run, given, num_pages - num_free, is_held)
                num_free += sum(
                    not self._is_page_held(page_id) for page_id in given.page_ids[num_seen:]
                )
        return given

    def evict_snapshots(self, num_slots: int) -> Changed:
        """As `evict_pages`, until `num_slots` that nobody holds are among it. Pages behind which no
        snapshot is left go with them."""
        given = Changed()
        num_free = 0
        for may_go in (self._is_unheld, _always):
            while num_free < num_slots and (run := self._snapshots.take(may_go)) is not None:
                num_free += not self._is_slot_held(self._give_up_state(run, given))
        return given

    def clear(self) -> Changed:
        """Give up everything."""
        return self.evict_pages(len(self._runs) + 1)

    def _num_known(self, names: Sequence[bytes]) -> int:
        """How many of these blocks are there; a block is there only if those before it are."""
        return bisect_left(names, 1, key=lambda name: name not in self._runs)

    def _resume_point(self, names: Sequence[bytes], known: int) -> tuple[BlockRun, int]:
        """The deepest one of so many of these blocks, all of which are there; and the run that it
        is in."""
        if not self._rule.has_states:
            known = self._rule.point_before(known)
        run = self._runs[names[known - 1]] if known else self._root
        if not self._rule.has_states:
            return run, known
        while run.parent is not None and (run.depth > known or run.slot_id is None):
            run = run.parent
        return run, run.depth

    def _snapshot_tokens(self, resumed: int, known: int, last: int) -> tuple[int, ...]:
        """At the end of the prompt, and at the junction: where it parts from what others had,
        beyond what they left a state for."""
        if not self._rule.has_states:
            return ()
        depths = sorted(
            {
                depth
                for depth in (self._rule.point_before(min(known, last)), last)
                if depth > resumed
            }
        )
        return tuple(depth * self._rule.block_tokens for depth in depths)

    def _ending_at(self, names: Sequence[bytes], depth: int) -> BlockRun:
        """The run whose last block is this one of a prompt, which is there: made of the first part
        of a longer one."""
        run = self._runs[names[depth - 1]] if depth else self._root
        if run.depth == depth:
            return run
        count = depth - run.start
        first = BlockRun(
            run.names[:count],
            run.page_ids[:count],
            run.parent,
            run.start,
            run.used_s,
            num_children=1,
        )
        del run.names[:count], run.page_ids[:count]
        run.parent, run.start = first, depth
        self._runs.update(dict.fromkeys(first.names, first))
        return first

    def _grown(self, run: BlockRun, names: Sequence[bytes], page_ids: Sequence[int]) -> BlockRun:
        """The run that ends with these blocks, which follow its last one. A long prompt has
        thousands."""
        if run.can_grow:
            run.names += names
            run.page_ids.extend(page_ids)
        else:
            self._leaves.discard(run)
            run.num_children += 1
            run = BlockRun(list(names), array("i", page_ids), run, run.depth, 0.0)
        self._runs.update(dict.fromkeys(names, run))
        return run

    def _use(self, run: BlockRun) -> None:
        run.used_s = self._clock.now()
        if not run.num_children and run is not self._root:
            self._leaves.put(run)
        if run.slot_id is not None:
            self._snapshots.put(run)

    def _is_unheld(self, run: BlockRun) -> bool:
        return not self._is_page_held(run.page_ids[-1]) and (
            run.slot_id is None or not self._is_slot_held(run.slot_id)
        )

    def _give_up_state(self, run: BlockRun, given: Changed) -> int:
        """A snapshot, whose slot it returns, with the pages that are of no use without it."""
        slot_id = run.slot_id
        assert slot_id is not None
        given.slot_ids.append(slot_id)
        self._remove_points(run.names[-1:])
        run.slot_id = None
        self._snapshots.discard(run)
        while run.is_bare:
            run = self._shortened(run, len(run.names), given)
        self._put_leaf(run)
        return slot_id

    def _give_up_pages(
        self, run: BlockRun, given: Changed, count: int, is_held: Callable[[int], bool]
    ) -> None:
        """The last block of a leaf; and those before it up to so many in all, as long as they are
        worth less than whatever else there is, and not held."""
        num_gone, run.num_hits = 1, 0
        if run.used_s < self._leaves.least:
            most = min(count, len(run.names))
            while num_gone < most and not is_held(run.page_ids[-num_gone - 1]):
                num_gone += 1
        points = self._rule.points(range(run.depth - num_gone + 1, run.depth + 1))
        names = [run.names[depth - run.start - 1] for depth in reversed(points)]
        rest = self._shortened(run, num_gone, given)
        self._remove_points(names)
        self._put_leaf(rest)

    def _remove_points(self, names: Sequence[bytes]) -> None:
        """The journal notes it last: who then begins to watch does not find them any more."""
        if self._points is not None:
            for name in names:
                del self._points[name]
        self.journal.removed(names)

    def _shortened(self, run: BlockRun, count: int, given: Changed) -> BlockRun:
        """A leaf without its last blocks; without any left, its parent, which was used whenever it
        was."""
        first = len(run.names) - count
        given.page_ids += reversed(run.page_ids[first:])
        for name in run.names[first:]:
            del self._runs[name]
        del run.names[first:], run.page_ids[first:]
        self._leaves.discard(run)
        if run.names:
            return run
        assert run.parent is not None
        run.parent.num_children -= 1
        run.parent.used_s = max(run.parent.used_s, run.used_s)
        return run.parent

    def _put_leaf(self, run: BlockRun) -> None:
        if not run.num_children and run is not self._root:
            self._leaves.put(run)


def _page_ids(run: BlockRun, depth: int) -> tuple[int, ...]:
    """Of the first blocks, so many, the last of which is in the run."""
    parts = []
    while run.parent is not None:
        parts.append(run.page_ids[: depth - run.start])
        depth, run = run.start, run.parent
    return tuple(chain.from_iterable(reversed(parts)))

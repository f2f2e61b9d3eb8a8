"""Radix tree of cached prompts over page-sized blocks of token ids.

It handles ids of pages and slots only, not their memory. A block is identified by its name
(`runtime.digests`) and has the page with its entries. Names are chained, so one table finds any
block, and a block in the table has all its ancestors there. The blocks of a prompt are stored,
found and evicted together by the hundreds, so a node of the tree is a *run* of blocks (`BlockRun`).

A *resume point* is a block after which a prompt can resume. If the model keeps its whole past in
pages, every block is one. Otherwise only blocks with a *snapshot* are: the recurrent state after
the block, in a slot. Then the tree keeps no pages after the last snapshot of a branch, because no
prompt could use them.

Leases count the holders of a page, and the tree asks them before it evicts. Belongs to the thread
that schedules.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from engine.core.request import CacheSession
from pool.prefix.eviction import BlockRun, EvictionOrder, idle_pages, snapshot_worth, worth
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from pool.prefix.sessions import RetainedPoints
from runtime.clock import Clock
from runtime.errors import InternalError

# The part of a cache's memory for snapshots is 1 / SNAPSHOT_SHARE; chosen by bench.cache_policy.
SNAPSHOT_SHARE = 5


@dataclass(frozen=True)
class Found:
    """The cached part of a prompt.

    Its first `num_tokens` need not be computed again. Their entries are in `page_ids`, in position
    order. The state after them is in `slot_id`, None if the model has no states or none is cached.
    `snapshot_tokens` are the token counts beyond `num_tokens`, in ascending order, after which its
    states are worth caching.
    """

    num_tokens: int = 0
    page_ids: tuple[int, ...] = ()
    slot_id: int | None = None
    snapshot_tokens: tuple[int, ...] = ()


@dataclass
class Changed:
    """Ids that the tree has taken over or evicted."""

    page_ids: list[int] = field(default_factory=list)
    slot_ids: list[int] = field(default_factory=list)


def _never(item: int) -> bool:
    return False


def _always(run: BlockRun) -> bool:
    return True


class PrefixTree:
    """The tree of a prefix cache, as the module describes it.

    Blocks are given by their names, in order from the prompt's first. `journal` holds the names of
    the resume points for watchers.
    """

    def __init__(
        self,
        rule: ResumeRule,
        clock: Clock,
        *,
        is_page_held: Callable[[int], bool] = _never,
        is_slot_held: Callable[[int], bool] = _never,
        journal: PointJournal | None = None,
        num_pages: float = inf,
        num_slots: int = 0,
    ) -> None:
        """Create an empty tree for a pool of `num_pages` and of `num_slots` for states.

        Held ids are evicted last; after that only their holders have them.
        """
        self._rule = rule
        self._clock = clock
        self._is_page_held = is_page_held
        self._is_slot_held = is_slot_held
        self.journal = journal or PointJournal()
        self._root = BlockRun([], array("i"), None, 0, 0.0)
        self._runs: dict[bytes, BlockRun] = {}  # by the names of their blocks
        # Names of the resume points; None if every block is one.
        self._points: dict[bytes, None] | None = {}
        if not rule.has_states and rule.is_point(1):
            self._points = None
        self.journal.follow(self._runs if self._points is None else self._points)
        self._leaves = EvictionOrder(worth)
        self._snapshots = EvictionOrder(snapshot_worth)
        self.retained = RetainedPoints(num_pages, num_slots, self._put)

    @property
    def num_pages(self) -> int:
        return len(self._runs)

    def num_resumable(self, names: Sequence[bytes]) -> int:
        """Return the depth of the deepest resume point of these blocks: a hint, for any thread."""
        if not self._rule.has_states:
            return self._rule.point_before(self._num_known(names))
        points = self._points or {}
        return next((depth for depth in range(len(names), 0, -1) if names[depth - 1] in points), 0)

    def find(self, names: Sequence[bytes], num_tokens: int) -> Found:
        """Return the cached part of a prompt of `num_tokens` tokens; change nothing."""
        known = self._num_known(names)
        last = self._rule.last_point(num_tokens)
        run, depth = self._resume_point(names, min(known, last))
        return Found(
            depth * self._rule.block_tokens,
            run.pages_to(depth),
            run.slot_id if run.depth == depth else None,
            self._snapshot_tokens(depth, known, last),
        )

    def num_in_place(self, names: Sequence[bytes]) -> int:
        """Return how many of the first names are of stored blocks at these depths.

        The other methods take names for those of one prompt, which these need not be.
        """
        return len(self.pages_of(names, 0))

    def pages_of(self, names: Sequence[bytes], start: int) -> list[int]:
        """Return the pages of the first of these names that are of stored blocks at their depths.

        The first one is after `start` blocks.
        """
        page_ids = list[int]()
        for index, name in enumerate(names, start):
            run = self._runs.get(name)
            if run is None or not run.has_at(index, name):
                break
            page_ids.append(run.page_ids[index - run.start])
        return page_ids

    def slot_of(self, name: bytes) -> int | None:
        """Return the slot of the state after this block, if it is stored."""
        run = self._runs.get(name)
        return run.slot_id if run is not None and run.names[-1] == name else None

    def resumed(
        self, names: Sequence[bytes], num_tokens: int, session: CacheSession | None = None
    ) -> None:
        """Note that a prompt resumes after `num_tokens`, as `find` returned.

        The blocks may have been evicted since, even if they are held, if nothing else was left.
        """
        depth = num_tokens // self._rule.block_tokens
        if depth and names[depth - 1] in self._runs:
            run = self._ending_at(names, depth)
            run.num_hits += 1
            if run.owner is not None or run.boost_s < 0:
                self.retained.used(run, session)
            self._use(run)

    def insert(
        self,
        names: Sequence[bytes],
        page_ids: Sequence[int],
        slot_id: int | None = None,
        session: CacheSession | None = None,
    ) -> Changed:
        """Store computed blocks with their pages, and the state after the last in `slot_id`.

        The session, if there is one, resumes after the last block.

        Return the ids that the tree took over; those of blocks and states that it already had are
        left out.

        Raises:
            InternalError: a state is missing, or is at a depth where no prompt is split, or the
                model has none.
        """
        if not names:
            return Changed()
        if self._rule.has_states != (slot_id is not None):
            raise InternalError(
                f"{len(names)} pages {'with' if slot_id else 'without'} a state after them"
            )
        if slot_id is not None and not self._rule.is_point(len(names)):
            raise InternalError(f"a state after {len(names)} pages, where no prompt is split")
        known = self._num_known(names)
        points = list[bytes]()
        taken = Changed(page_ids=list(page_ids[known : len(names)]))
        run = self._ending_at(names, known)
        if taken.page_ids:
            run = self._grown(run, names[known:], taken.page_ids, session)
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
        if session is not None:
            self.retained.add(run, session)
        return taken

    def evict_pages(self, num_pages: int) -> Changed:
        """Evict the runs of least worth until `num_pages` unheld pages are free.

        Stops earlier if nothing is left.
        """
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
        """Evict snapshots, as `evict_pages`, until `num_slots` unheld slots are free.

        Pages without a later snapshot are evicted with them.
        """
        given = Changed()
        num_free = 0
        for may_go in (self._is_unheld, _always):
            while num_free < num_slots and (run := self._snapshots.take(may_go)) is not None:
                num_free += not self._is_slot_held(self._give_up_state(run, given))
        return given

    def idle_pages(self) -> list[tuple[float, int]]:
        """Return what `pool.prefix.eviction.idle_pages` does."""
        return idle_pages(self._leaves.runs, self._clock.now())

    def clear(self) -> Changed:
        """Evict everything."""
        return self.evict_pages(len(self._runs) + 1)

    def _num_known(self, names: Sequence[bytes]) -> int:
        """Return how many of these blocks are stored; stored ones have stored ancestors."""
        return bisect_left(names, 1, key=lambda name: name not in self._runs)

    def _resume_point(self, names: Sequence[bytes], known: int) -> tuple[BlockRun, int]:
        """Return the run and depth of the deepest resume point among the first `known` blocks."""
        if not self._rule.has_states:
            known = self._rule.point_before(known)
        run = self._runs[names[known - 1]] if known else self._root
        if not self._rule.has_states:
            return run, known
        while run.parent is not None and (run.depth > known or run.slot_id is None):
            run = run.parent
        return run, run.depth

    def _snapshot_tokens(self, resumed: int, known: int, last: int) -> tuple[int, ...]:
        """Return the token counts at which a prompt's states are worth caching.

        These are the end of the prompt and its junction: the depth at which it differs from earlier
        prompts, if that is after their last state.
        """
        if not self._rule.has_states:
            return ()
        depths = sorted({self._rule.point_before(min(known, last)), last})
        return tuple(depth * self._rule.block_tokens for depth in depths if depth > resumed)

    def _ending_at(self, names: Sequence[bytes], depth: int) -> BlockRun:
        """Return the run that ends with this stored block, splitting a longer run if needed."""
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
        run.parent = first
        run.start = depth
        self._runs.update(dict.fromkeys(first.names, first))
        return first

    def _grown(
        self,
        run: BlockRun,
        names: Sequence[bytes],
        page_ids: Sequence[int],
        session: CacheSession | None,
    ) -> BlockRun:
        """Append blocks after the last one of a run, and return the run that ends with them.

        A long prompt has thousands.
        """
        if run.can_grow(session):
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
        self._put(run)

    def _put(self, run: BlockRun) -> None:
        """Put a run into the eviction orders at its present worth."""
        self._put_leaf(run)
        if run.slot_id is not None:
            self._snapshots.put(run)

    def _is_unheld(self, run: BlockRun) -> bool:
        return not self._is_page_held(run.page_ids[-1]) and (
            run.slot_id is None or not self._is_slot_held(run.slot_id)
        )

    def _give_up_state(self, run: BlockRun, given: Changed) -> int:
        """Evict a snapshot with the pages that are useless without it, and return its slot."""
        slot_id = run.slot_id
        assert slot_id is not None
        given.slot_ids.append(slot_id)
        self._remove_points(run.names[-1:])
        run.slot_id = None
        self._snapshots.discard(run)
        self.retained.forget(run)
        while run.is_bare:
            run = self._shortened(run, len(run.names), given)
        self._put_leaf(run)
        return slot_id

    def _give_up_pages(
        self, run: BlockRun, given: Changed, count: int, is_held: Callable[[int], bool]
    ) -> None:
        """Evict the last block of a leaf, and those before it up to `count` in total.

        Earlier blocks are evicted as long as they are not held and worth less than all other
        leaves.
        """
        num_gone = 1
        run.num_hits = 0
        if worth(run) < self._leaves.least:
            most = min(count, len(run.names))
            while num_gone < most and not is_held(run.page_ids[-num_gone - 1]):
                num_gone += 1
        points = self._rule.points(range(run.depth - num_gone + 1, run.depth + 1))
        names = [run.names[depth - run.start - 1] for depth in reversed(points)]
        rest = self._shortened(run, num_gone, given)
        self._remove_points(names)
        self._put_leaf(rest)

    def _remove_points(self, names: Sequence[bytes]) -> None:
        """Remove points, and note it in the journal last, so that new watchers do not see them."""
        if self._points is not None:
            for name in names:
                del self._points[name]
        self.journal.removed(names)

    def _shortened(self, run: BlockRun, count: int, given: Changed) -> BlockRun:
        """Remove the last blocks of a leaf; return it, or its parent if no block is left."""
        first = len(run.names) - count
        given.page_ids += reversed(run.page_ids[first:])
        for name in run.names[first:]:
            del self._runs[name]
        del run.names[first:], run.page_ids[first:]
        self._leaves.discard(run)
        if run.names:
            return run
        self.retained.forget(run)
        assert run.parent is not None
        run.parent.num_children -= 1
        run.parent.used_s = max(run.parent.used_s, run.used_s)
        return run.parent

    def _put_leaf(self, run: BlockRun) -> None:
        if not run.num_children and run is not self._root:
            self._leaves.put(run)

"""The resume points of sessions, and how long the cache retains them.

The next turn of a session usually resumes from its newest point. So that point is worth more than
the time of its last use says, and the points before it, which the next turn does not need, are
worth less. A session may have several newest points: those of an agent and its sub-agents.

What clients retain is bounded, because they name their sessions themselves. A recurrent state
counts as its share of the pages. Belongs to the thread that schedules.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import ceil, inf

from engine.core.request import CacheSession
from pool.prefix.eviction import BlockRun, SessionPoints

# Chosen by bench.cache_policy on recorded agents.
SUPERSEDED_S = 480.0  # a superseded point is evicted as if it were unused for this much longer
RETAINED_SHARE = 2  # at most 1 / RETAINED_SHARE of the pages are retained
MAX_POINTS = 16  # per session

_SHARED = SessionPoints(b"", b"")  # the owner of points that several sessions use


class RetainedPoints:
    """The points of all sessions of one cache.

    A run of blocks has the attributes of the point at its end: `owner` is its session, and
    `boost_s` is added to its worth.
    """

    def __init__(
        self, num_pages: float, num_slots: int, changed: Callable[[BlockRun], object]
    ) -> None:
        """Create an empty one for a cache of these pages, and these slots for states.

        `changed` is called with each run whose worth has changed.
        """
        self._max_pages = num_pages / RETAINED_SHARE
        self._state_pages = ceil(num_pages / num_slots) if num_slots else 0
        self._changed = changed
        self.sessions: dict[bytes, SessionPoints] = {}  # those that have a point, by digest
        # Pages up to each retained point, by client, from the oldest point to the newest.
        self._retained: dict[bytes, OrderedDict[BlockRun, int]] = {}
        self._retained_by: dict[bytes, int] = {}  # pages of each client
        self.num_retained = 0  # pages; those that sessions share count for each

    def add(self, run: BlockRun, tag: CacheSession) -> None:
        """Note that a session has left a point; the points that it supersedes are demoted."""
        session = self.sessions.get(tag.digest)
        if run.owner is not None and run.owner is not session:
            self.share(run)
            return
        if session is None:
            session = self.sessions[tag.digest] = SessionPoints(tag.digest, tag.client)
        superseded = []
        if run.owner is None:  # else a chunk of the same prompt has made it longer
            superseded = [old for old in session.runs if _supersedes(run, old)]
        session.runs.pop(run, None)
        run.owner = session
        session.runs[run] = None
        self._boost(run, tag.retention_s)
        self._demote(superseded, SUPERSEDED_S)
        if len(session.runs) > MAX_POINTS:
            self._demote([next(iter(session.runs))], 0.0)
        if tag.ends:
            self._demote(list(session.runs), inf)

    def used(self, run: BlockRun, tag: CacheSession | None) -> None:
        """Note that a prompt, of a session or of none, has resumed from a point."""
        if run.owner is not None and tag is not None and run.owner.digest != tag.digest:
            self.share(run)
        elif run.boost_s < 0:
            self._boost(run, 0.0)

    def share(self, run: BlockRun) -> None:
        """Leave a point to all sessions: none retains or demotes it."""
        self.forget(run)
        run.owner = _SHARED
        self._changed(run)

    def forget(self, run: BlockRun) -> None:
        """Remove a run that the cache evicts, or that no session owns any more."""
        self._remove(run)
        run.boost_s = 0.0

    def _demote(self, runs: Iterable[BlockRun], by_s: float) -> None:
        for run in runs:
            self._remove(run)
            run.boost_s = -by_s
            self._changed(run)

    def _remove(self, run: BlockRun) -> None:
        """Remove a run from its session and from what the session's client retains."""
        session, run.owner = run.owner, None
        if session is None or session is _SHARED:
            return
        self._unretain(session.client, run)
        del session.runs[run]
        if not session.runs:
            self.sessions.pop(session.digest, None)

    def _boost(self, run: BlockRun, boost_s: float) -> None:
        """Set the boost of a run; if too many pages are retained then, retain fewer."""
        session = run.owner
        if session is not None and session is not _SHARED:
            self._unretain(session.client, run)
            if boost_s > 0:
                self._retain(session.client, run)
        run.boost_s = boost_s
        self._changed(run)
        while self.num_retained > self._max_pages:
            most = max(self._retained_by, key=self._retained_by.__getitem__)
            oldest = next(iter(self._retained[most]))
            self._unretain(most, oldest)
            oldest.boost_s = 0.0
            self._changed(oldest)

    def _retain(self, client: bytes, run: BlockRun) -> None:
        num_pages = run.depth if run.slot_id is None else max(run.depth, self._state_pages)
        self._retained.setdefault(client, OrderedDict())[run] = num_pages
        self._retained_by[client] = self._retained_by.get(client, 0) + num_pages
        self.num_retained += num_pages

    def _unretain(self, client: bytes, run: BlockRun) -> None:
        runs = self._retained.get(client)
        if runs is None or run not in runs:
            return
        num_pages = runs.pop(run)
        self.num_retained -= num_pages
        self._retained_by[client] -= num_pages
        if not runs:
            del self._retained[client], self._retained_by[client]


def _supersedes(new: BlockRun, old: BlockRun) -> bool:
    """Return whether a point has more than half of an older one's blocks.

    The points of a sub-agent share only the first ones with those of its agent.
    """
    first: BlockRun = new
    second: BlockRun = old
    while first is not second:
        if first.depth >= second.depth:
            assert first.parent is not None
            first = first.parent
        else:
            assert second.parent is not None
            second = second.parent
    return 2 * first.depth > old.depth

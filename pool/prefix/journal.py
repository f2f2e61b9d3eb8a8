"""Journal of the resume points of a prefix cache for watchers: a full report, then the changes.

The scheduling thread notes changes; another thread reports them to watchers.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from protos import worker_pb2

MAX_NAMES = 16384  # per report


class PointJournal:
    """The resume points of one cache, or of those of a pool's data ranks together.

    A point exists as long as one of the caches has it. Any thread may call it, but only one thread
    notes changes.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._caches: list[Collection[bytes]] = []
        self._watchers: list[PointWatcher] = []

    def follow(self, points: Collection[bytes]) -> None:
        """Add a cache's points, a dict or set that the cache changes before it notes the change."""
        self._caches.append(points)

    def stored(self, names: Sequence[bytes]) -> None:
        """Note that a cache has stored these points."""
        if self._watchers:
            with self._lock:
                self._note(names, is_stored=True)

    def removed(self, names: Sequence[bytes]) -> None:
        """Note that a cache has removed these points."""
        if self._watchers:
            if len(self._caches) > 1:
                names = [
                    name for name in names if not any(name in points for points in self._caches)
                ]
            with self._lock:
                self._note(names, is_stored=False)

    def points(self) -> Collection[bytes]:
        """Return the present points.

        Copying a dictionary or set to a list is atomic, whatever other threads do.
        """
        if len(self._caches) == 1:
            return list(self._caches[0])
        return dict.fromkeys(name for points in self._caches for name in list(points))

    @property
    def num_points(self) -> int:
        """Return an upper bound of the number of points; shared points count once per cache."""
        return sum(map(len, self._caches))

    @contextmanager
    def watch(self) -> "Iterator[PointWatcher]":
        watcher = PointWatcher(self, self._lock)
        with self._lock:
            self._watchers.append(watcher)
        try:
            yield watcher
        finally:
            with self._lock:
                self._watchers.remove(watcher)

    def _note(self, names: Sequence[bytes], *, is_stored: bool) -> None:
        for watcher in self._watchers:
            watcher.note(names, is_stored=is_stored)


class PointWatcher:
    """The changes that one watcher has not received yet.

    Each point counts with its latest state only. A full report replaces the changes once it is
    shorter.
    """

    def __init__(self, journal: PointJournal, lock: Lock) -> None:
        self._journal = journal
        self._lock = lock
        self._is_due = True  # a full report
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.num_reports = 0

    def note(self, names: Sequence[bytes], *, is_stored: bool) -> None:
        """Note changes; called by the journal under its lock."""
        if self._is_due:
            return
        now, before = (self._stored, self._removed) if is_stored else (self._removed, self._stored)
        if not before.keys().isdisjoint(names):
            for name in names:
                before.pop(name, None)
        now.update(dict.fromkeys(names))
        if len(now) + len(before) > self._journal.num_points + MAX_NAMES:
            self._is_due = True

    def take(self) -> list[worker_pb2.CacheReport]:
        """Return the unreported changes in order, empty when nothing changed."""
        if not (self._stored or self._removed or self._is_due):
            return []  # the most frequent case
        with self._lock:
            is_whole = self._is_due
            self._is_due = False
            stored = list(self._journal.points() if is_whole else self._stored)
            removed = [] if is_whole else list(self._removed)
            self._stored = {}
            self._removed = {}
        empties = is_whole and self.num_reports > 0  # a new watcher needs no empty full report
        firsts = range(0, max(len(stored), len(removed), int(empties)), MAX_NAMES)
        reports = [
            worker_pb2.CacheReport(
                number=number,
                whole=is_whole and not first,
                stored=b"".join(stored[first : first + MAX_NAMES]),
                removed=b"".join(removed[first : first + MAX_NAMES]),
            )
            for number, first in enumerate(firsts, self.num_reports)
        ]
        self.num_reports += len(reports)
        return reports

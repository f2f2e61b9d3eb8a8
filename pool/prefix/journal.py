"""Which resume points a prefix cache has, for those who follow it from outside: a whole account, then what changed.

The thread that schedules notes changes, another one reports them to watchers.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from protos import worker_pb2

MAX_NAMES = 16384  # in one report


class PointJournal:
    """Of one cache, or of those of a pool's data ranks: a point is there as long as one of them has it. Any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._points: dict[bytes, int] = {}  # how many caches have it
        self._watchers: list[PointWatcher] = []

    def stored(self, names: Sequence[bytes]) -> None:
        points = self._points
        with self._lock:
            if points.keys().isdisjoint(names):  # as always with one cache; of a long prompt there are hundreds
                points.update(dict.fromkeys(names, 1))
            else:
                for name in names:
                    points[name] = points.get(name, 0) + 1
            self._note(names, is_stored=True)

    def removed(self, names: Sequence[bytes]) -> None:
        gone = []
        with self._lock:
            for name in names:
                left = self._points.pop(name, 1) - 1
                if left:
                    self._points[name] = left
                else:
                    gone.append(name)
            if gone:
                self._note(gone, is_stored=False)

    @contextmanager
    def watch(self) -> "Iterator[PointWatcher]":
        watcher = PointWatcher(self._points, self._lock)
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
    """What one watcher has not been sent yet: of each point its latest state only, and the whole account once that is
    shorter."""

    def __init__(self, points: Collection[bytes], lock: Lock) -> None:
        self._points = points
        self._lock = lock
        self._is_due = True  # a whole account
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.num_reports = 0

    def note(self, names: Sequence[bytes], *, is_stored: bool) -> None:
        """The journal, under its lock."""
        if self._is_due:
            return
        now, before = (self._stored, self._removed) if is_stored else (self._removed, self._stored)
        if not before.keys().isdisjoint(names):
            for name in names:
                before.pop(name, None)
        now.update(dict.fromkeys(names))
        if len(now) + len(before) > len(self._points) + MAX_NAMES:
            self._is_due = True

    def take(self) -> list[worker_pb2.CacheReport]:
        """Everything that was not reported yet, in order; empty when nothing changed."""
        if not (self._stored or self._removed or self._is_due):
            return []  # as most reports
        with self._lock:
            is_whole, self._is_due = self._is_due, False
            stored, removed = list(self._points if is_whole else self._stored), [] if is_whole else list(self._removed)
            self._stored, self._removed = {}, {}
        empties = is_whole and self.num_reports > 0  # a new watcher expects nothing anyway
        firsts = range(0, max(len(stored), len(removed), int(empties)), MAX_NAMES)
        reports = [worker_pb2.CacheReport(number=number, whole=is_whole and not first,
                                          stored=b"".join(stored[first:first + MAX_NAMES]),
                                          removed=b"".join(removed[first:first + MAX_NAMES]))
                   for number, first in enumerate(firsts, self.num_reports)]
        self.num_reports += len(reports)
        return reports

"""The blocks of which a worker's own tiers have copies, as it reports them to routers."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock
from zlib import crc32

from pool.prefix.journal import PointJournal
from pool.tiers.block_store import Content

MAX_POINTS = 16_384  # reported of a tier: of more, every second one, or fewer
_ALL = 1 << 32  # more than any checksum


class TierCopies:
    """The points in one tier from which prompts resume. All methods are for any thread.

    They only hint at what is there: other processes may remove it, and other stages may lack their
    parts of it. Of a large tier they are a sample, so that prompts of any age are known by most of
    their blocks.
    """

    def __init__(self, reported: "ReportedCopies") -> None:
        self._reported = reported
        self._points: dict[bytes, None] = {}
        self._limit = _ALL  # points with smaller checksums are reported
        reported.journal.follow(self._points)

    @property
    def content(self) -> Content:
        """Return the content of the objects that make their blocks points."""
        return self._reported.content

    def stored(self, block: bytes, content: Content) -> None:
        """Note that an object was stored."""
        if content is self.content:
            with self._reported.lock:
                self._add([block])

    def removed(self, block: bytes, content: Content) -> None:
        """Note that an object was removed."""
        if content is self.content:
            with self._reported.lock:
                self._drop([block])

    def found(self, blocks: Collection[bytes]) -> None:
        """Note all blocks that are there with the content of a point."""
        present = dict.fromkeys(blocks)
        with self._reported.lock:
            self._limit = _ALL
            self._drop([name for name in self._points if name not in present])
            self._add(present)

    def _add(self, names: Collection[bytes]) -> None:
        new = [name for name in names if self._is_reported(name) and name not in self._points]
        while len(self._points) + len(new) > MAX_POINTS:
            self._limit //= 2
            new = list(filter(self._is_reported, new))
            self._drop([name for name in self._points if not self._is_reported(name)])
        self._points.update(dict.fromkeys(new))
        self._reported.journal.stored(new)

    def _is_reported(self, name: bytes) -> bool:
        return crc32(name) < self._limit

    def _drop(self, names: Collection[bytes]) -> None:
        known = [name for name in names if name in self._points]
        for name in known:
            del self._points[name]
        if known:
            self._reported.journal.removed(known)


class ReportedCopies:
    """The copies in the tiers of one pool, and the journal of their points."""

    def __init__(self, *, has_states: bool = False) -> None:
        """Begin without copies. With `has_states` a point needs the state after its block."""
        self.journal = PointJournal()
        self.content = Content.STATE if has_states else Content.PAGE
        self.lock = Lock()  # changes of a tier's points and their notes in the journal are one

    def of_tier(self) -> TierCopies:
        """Return the copies of one more tier."""
        return TierCopies(self)


class WrittenBlocks:
    """The blocks that a tier was given last: what the leader knows of a tier of other processes.

    As many as fit into the tier are known. Belongs to the event loop's thread, except for
    `num_known`.
    """

    def __init__(self, most: int, copies: TierCopies) -> None:
        """Begin without blocks; `copies` has the same."""
        self._most = most
        self._copies = copies
        self._points = OrderedDict[bytes, None]()  # the latest used last

    def add(self, points: Collection[bytes]) -> None:
        """Note that blocks, with the content of points, were written or read."""
        for point in points:
            self._points[point] = None
            self._points.move_to_end(point)
            self._copies.stored(point, self._copies.content)
        while len(self._points) > self._most:
            oldest, _ = self._points.popitem(last=False)
            self._copies.removed(oldest, self._copies.content)

    def num_known(self, names: Sequence[bytes]) -> int:
        """Return the number of these blocks up to the last point among them. Any thread."""
        return next((at for at in range(len(names), 0, -1) if names[at - 1] in self._points), 0)

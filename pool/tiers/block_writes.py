"""The blocks of a prefix cache that wait to be written to a tier."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.memory.layout import NULL_INDEX
from engine.memory.leases import Lease
from pool.prefix.cache import PrefixCache, Stored
from pool.tiers.block_store import Tier
from pool.tiers.stage_blocks import BlockMove

WRITE_SHARE = 8  # at most one page in so many is leased for writes


class BlockWrites:
    """Blocks in the order in which they entered the cache, and those that are being written.

    Waiting blocks hold no memory. Those that are evicted before their turn are not written, and
    neither is more than the cache holds. Belongs to the engine thread.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tier: Tier,
        *,
        start: Callable[[BlockMove, Sequence[Lease]], object],
        skipped: Callable[[int], object],
    ) -> None:
        """Create an empty queue.

        `start` is called with leases that last until `ended`, and `skipped` with the number of
        blocks that are not written.
        """
        self._cache = cache
        self._tier = tier
        self._start = start
        self._skipped = skipped
        self._waiting = deque[Stored]()
        self._num_waiting = 0
        self._num_leased = 0

    @property
    def is_idle(self) -> bool:
        """Return whether everything is written. Any thread."""
        return not self._num_waiting and not self._num_leased

    def add(self, stored: Stored) -> None:
        """Add what has entered the cache from elsewhere, and write what there is room for."""
        if stored.source == self._tier.owner:
            return
        self._waiting.append(stored)
        self._num_waiting += _size(stored)
        while self._num_waiting > self._cache.pages.num_total and len(self._waiting) > 1:
            self._skip(self._waiting.popleft())
        self._start_more()

    def ended(self, move: BlockMove, leases: Sequence[Lease]) -> None:
        """Release what is written, and write what there is room for now."""
        for lease in leases:
            lease.end()
        self._num_leased -= max(len(move.names), 1)
        self._start_more()

    def _start_more(self) -> None:
        pages = self._cache.pages
        while self._waiting:
            room = max(pages.num_total // WRITE_SHARE, 1) - self._num_leased
            if room < 1:
                return
            stored = self._waiting.popleft()
            names = stored.names[:room]
            page_ids = self._cache.pages_of(names, stored.start)
            if len(page_ids) < len(names):
                names = names[: len(page_ids)]  # those behind them are gone, too
                self._skipped(len(stored.names) - len(names))
            elif len(names) < len(stored.names):
                rest = replace(
                    stored, names=stored.names[len(names) :], start=stored.start + len(names)
                )
                self._waiting.appendleft(rest)
                self._num_waiting += _size(rest)
            is_end = len(names) == len(stored.names)
            self._write(stored, names, page_ids, with_state=stored.has_state and is_end)
            self._num_waiting -= _size(stored)  # last: `is_idle` is read meanwhile

    def _write(
        self,
        stored: Stored,
        names: tuple[bytes, ...],
        page_ids: tuple[int, ...],
        *,
        with_state: bool,
    ) -> None:
        owner, slots = self._tier.owner, self._cache.slots
        slot_id = self._cache.slot_of(stored.last) if with_state else None
        if with_state and (slot_id is None or 2 * slots.num_available < slots.num_total):
            self._skipped(1)
            slot_id = None
        if not names and slot_id is None:
            return
        self._num_leased += max(len(names), 1)
        leases: list[Lease] = [self._cache.pages.alloc(0, owner=owner, shared=page_ids)]
        if slot_id is not None:
            leases.append(slots.share(slot_id, owner=owner))
        move = BlockMove(
            self._tier,
            load=False,
            names=names,
            page_ids=page_ids,
            slot_id=NULL_INDEX if slot_id is None else slot_id,
            state_of=b"" if slot_id is None else stored.last,
        )
        self._start(move, leases)

    def _skip(self, stored: Stored) -> None:
        self._num_waiting -= _size(stored)
        self._skipped(_size(stored))


def _size(stored: Stored) -> int:
    return max(len(stored.names), 1)

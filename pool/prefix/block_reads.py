"""Reads of blocks into a prefix cache, from a place that has copies of them.

    a prompt arrives ─▶ blocks that only the place has ─▶ pages leased ─▶ every stage reads its part
                     ─▶ into the prefix cache ─▶ the prompt is queued, and finds them there

Blocks are read only if that takes less time than to compute them. Memory stays leased until the
place has answered, because a stage may use it until then.
"""

import asyncio
import logging
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from prometheus_client import Counter, Histogram

from engine.memory.layout import NULL_INDEX
from engine.memory.leases import PageLease, SlotLease
from pool.prefix.cache import PrefixCache
from runtime.errors import BatonError, CapacityError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_READS = 8  # at a time; further prompts are computed
RETRY = 16  # one in so many reads is tried though computing seems faster
_NEWEST = 0.25  # weight of the latest read in the mean time per block


@dataclass(eq=False)
class BlockRead:
    """Blocks of a prompt that are read, after the first `num_found` ones, which are cached."""

    names: tuple[bytes, ...]
    num_found: int
    pages: PageLease
    slot: SlotLease | None
    epoch: int

    @property
    def missing(self) -> tuple[bytes, ...]:
        return self.names[self.num_found :]

    @property
    def slot_id(self) -> int:
        """Return the slot of the state after the last block, the null slot without one."""
        return NULL_INDEX if self.slot is None else self.slot.slot_id

    def end(self) -> None:
        self.pages.end()
        if self.slot is not None:
            self.slot.end()


class EngineCalls(Protocol):
    """Calls on the engine thread, as `EngineLoop` makes them."""

    async def submit(
        self, call: Callable[[], T], *, undo: Callable[[T], object] = lambda result: None
    ) -> T: ...

    def post(self, command: Callable[[], object]) -> None: ...


class BlockOffer(Protocol):
    """Blocks of a prompt that a place can give.

    `num_blocks`: those after the cached ones, with a state after them if the model has states.
    """

    @property
    def num_blocks(self) -> int: ...

    async def fill(self, read: BlockRead) -> int:
        """Fill the memory of the missing blocks; return how many of the first ones are intact.

        Nothing uses the memory afterwards, whatever the result.
        """
        ...


class BlockSource(Protocol):
    """A place that has copies of the blocks of a prompt."""

    def offer(
        self, names: Sequence[bytes], num_cached: int
    ) -> AbstractAsyncContextManager[BlockOffer]:
        """Offer blocks after the first `num_cached` ones, for as long as the context is open."""
        ...


@dataclass(eq=False)
class BlockReads:
    """The reads of one kind of place. Belongs to the event loop's thread.

    `owner` owns the leases, and is the source of what enters the cache. `num_blocks` counts by event:
    `read`, `missing` and `slower`. `likely_s`, called on the engine thread, returns the
    seconds in which the pool computes so many tokens; 0 if it is not known.
    """

    cache: PrefixCache
    loop: EngineCalls
    owner: str
    num_blocks: Callable[[str], Counter]
    seconds: Histogram
    likely_s: Callable[[int], float] = lambda num_tokens: 0.0
    # Reads under way, oldest first, by their first blocks; with the time at which each began.
    _reads: dict[bytes, tuple[asyncio.Task[tuple[bytes, ...]], float]] = field(default_factory=dict)
    _block_s: float = 0.0  # mean seconds to read a block, once it is its turn; 0 before the first
    _num_waiting: int = 0  # blocks of all reads under way, as if they were read one after the other
    # Seconds to compute a block, as of the latest read; written by the engine thread.
    _computing_s: float = 0.0
    _num_slower: int = 0  # prompts for which computing seemed faster

    def __post_init__(self) -> None:
        self._events = asyncio.get_running_loop()
        self.cache.holders |= {self.owner}

    @property
    def oldest_s(self) -> float:
        """Return for how long the oldest read goes on, 0 without any."""
        began_s = next((began_s for _, began_s in self._reads.values()), None)
        return 0.0 if began_s is None else self._events.time() - began_s

    @property
    def cost(self) -> float:
        """Return the time to read a block / to compute its tokens; 0 if it is not known."""
        return self._block_s / self._computing_s if self._computing_s else 0.0

    def computing_s(self, num_blocks: int) -> float:
        """Return the seconds to compute so many blocks; 0 if it is not known."""
        return num_blocks * self._computing_s

    async def finish(self, timeout_s: float) -> None:
        """Wait until all reads are over, but no longer than `timeout_s`."""
        if self._reads:
            await asyncio.wait([read for read, _ in self._reads.values()], timeout=timeout_s)

    async def bring(
        self, names: tuple[bytes, ...], source: BlockSource, *, wait_s: float = math.inf
    ) -> int:
        """Bring blocks into the cache that only `source` has.

        Return up to which of these blocks they reach, 0 if none were brought. It returns early if
        that fails, is not worth it, or is left to a read that goes on for `wait_s` already. A caller
        that is cancelled leaves the read to others that wait for it.
        """
        tried = set[bytes]()  # first missing blocks that others have read
        reached = 0
        while True:
            known = self.cache.num_resumable(names)
            if known == len(names) or names[known] in tried:
                return reached
            first = names[known]
            if first not in self._reads:
                if len(self._reads) < MAX_READS:
                    read = asyncio.create_task(self._read(names, known, source))
                    self._reads[first] = read, self._events.time()
                    reached = len(await asyncio.shield(read)) or reached
                return reached
            tried.add(first)
            read, began_s = self._reads[first]
            if self._events.time() - began_s >= wait_s:
                return reached
            others = await asyncio.shield(read)
            # Names are chained, so those in common are the first ones.
            reached = max(reached, sum(map(operator.eq, names, others)))

    async def _read(
        self, names: tuple[bytes, ...], known: int, source: BlockSource
    ) -> tuple[bytes, ...]:
        """Return the blocks from the prompt's first to the last one read, none if none was."""
        try:
            return await self._read_from(names, known, source)
        except BatonError as error:
            logger.warning("blocks were not read (%s): %s", self.owner, error)
        except Exception:  # the prompt is computed, whatever is wrong here
            logger.exception("blocks were not read (%s)", self.owner)
        finally:
            del self._reads[names[known]]
        return ()

    async def _read_from(
        self, names: tuple[bytes, ...], known: int, source: BlockSource
    ) -> tuple[bytes, ...]:
        """Read the blocks of a prompt after the first `known` ones, as far as the source has them."""
        num_read = num_found = 0
        async with source.offer(names, known) as offer:
            if not offer.num_blocks:
                return ()
            names = names[: known + offer.num_blocks]
            read = await self.loop.submit(lambda: self._lease(names), undo=_end)
            if read is not None:
                num_found = read.num_found
                num_read = await self._fill(read, offer)
        return names[: num_found + num_read] if num_read else ()

    async def _fill(self, read: BlockRead, offer: BlockOffer) -> int:
        """Return how many of the missing blocks were read."""
        began_s = self._events.time()
        num_read, wanted, before = 0, len(read.missing), self._num_waiting
        self._num_waiting += wanted
        try:
            num_read = await offer.fill(read)
        finally:
            self._num_waiting -= wanted
            self.loop.post(lambda: self._insert(read, num_read))
        seconds = self._events.time() - began_s
        self.seconds.observe(seconds)
        self.num_blocks("read").inc(num_read)
        self.num_blocks("missing").inc(wanted - num_read)
        block_s = seconds / (before + wanted)
        before_s = self._block_s or block_s
        self._block_s = before_s + _NEWEST * (block_s - before_s)
        return num_read

    def _lease(self, names: tuple[bytes, ...]) -> BlockRead | None:
        """Lease memory for the blocks that are missing, or return None. For the engine thread."""
        rule, pages, slots = self.cache.rule, self.cache.pages, self.cache.slots
        assert rule is not None
        found = self.cache.find(names, len(names) * rule.block_tokens + 1)
        num_found = len(found.page_ids)
        missing = len(names) - num_found
        if (
            not missing
            or (rule.has_states and not rule.is_point(len(names)))
            or not self._is_faster(missing * rule.block_tokens, missing)
        ):
            return None
        try:
            leased = pages.alloc(missing, owner=self.owner, shared=found.page_ids)
        except CapacityError:
            return None
        try:
            slot = slots.alloc(owner=self.owner) if self.cache.has_states else None
        except CapacityError:
            leased.end()
            return None
        return BlockRead(names, num_found, leased, slot, self.cache.epoch)

    def _insert(self, read: BlockRead, num_read: int) -> None:
        """Put blocks into the cache and release their memory. For the engine thread.

        Nothing is put in if all was evicted meanwhile: a stage may have lost its memory since.
        """
        if num_read and read.epoch == self.cache.epoch:
            self.cache.insert(
                read.names[: read.num_found + num_read],
                read.pages.page_ids,
                None if read.slot is None else read.slot.slot_id,
                source=self.owner,
            )
        read.end()

    def _is_faster(self, num_tokens: int, num_blocks: int) -> bool:
        computing_s = self.likely_s(num_tokens)
        if not computing_s:
            return True
        self._computing_s = computing_s / num_blocks
        if self._block_s * (self._num_waiting + num_blocks) <= computing_s:
            return True
        self._num_slower += 1
        if self._num_slower % RETRY == 0:
            return True
        self.num_blocks("slower").inc(num_blocks)
        return False


def _end(read: BlockRead | None) -> None:
    if read is not None:
        read.end()

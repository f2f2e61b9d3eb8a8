"""The disk cache of a pool, as its leader runs it.

    a block enters the prefix cache ─▶ leased ─▶ every stage writes its part ─▶ released
    a prompt arrives ─▶ blocks that only the disk has ─▶ pages leased ─▶ every stage reads its part
                     ─▶ into the prefix cache ─▶ the prompt is queued, and finds them there

Requests wait for a read, but never for a write. Blocks are read only if that takes less time than
to compute them. Memory stays leased until every stage has answered, because a stage may use it
until then.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from engine.core.request import Request
from engine.loop import EngineLoop
from engine.memory.layout import NULL_INDEX
from engine.memory.leases import Lease, PageLease, SlotLease
from pool.disk.stage_blocks import BlockMove, StageBlocks
from pool.prefix.cache import PrefixCache, Stored
from runtime.errors import BatonError, CapacityError
from runtime.observe.metrics import DiskMetrics

logger = logging.getLogger(__name__)

MAX_READS = 8  # at a time; further prompts are computed
WRITE_SHARE = 8  # at most one page in so many is leased for writes
READ_LIMIT_S = 30.0  # seconds that a request waits for its blocks
RETRY = 16  # one in so many reads is tried though computing seems faster
REFRESH_S = 60.0  # seconds between two notes on disk that blocks are in use
_OWNER = "disk cache"
_NEWEST = 0.25  # weight of the latest read in the mean time per block


@dataclass(eq=False)
class _Read:
    """Blocks of a prompt that are read, after the first `num_found` ones, which are cached."""

    names: tuple[bytes, ...]
    num_found: int
    pages: PageLease
    slot: SlotLease | None
    epoch: int

    @property
    def move(self) -> BlockMove:
        return BlockMove(
            load=True,
            names=self.names[self.num_found :],
            page_ids=tuple(self.pages.page_ids[self.num_found :]),
            slot_id=NULL_INDEX if self.slot is None else self.slot.slot_id,
            state_of=b"" if self.slot is None else self.names[-1],
        )

    def end(self) -> None:
        self.pages.end()
        if self.slot is not None:
            self.slot.end()


@dataclass(eq=False)
class DiskCache:
    """The blocks of a pool's prefix cache on disk.

    `move` has all stages move blocks, and returns how many of the first ones all of them had. It
    belongs to the event loop's thread, except for `keep`.
    """

    cache: PrefixCache
    own: StageBlocks
    loop: EngineLoop
    move: Callable[[BlockMove], Awaitable[int]]
    metrics: DiskMetrics
    # Returns the least seconds in which the pool computes so many tokens; 0 if it is not known.
    least_s: Callable[[int], float] = lambda num_tokens: 0.0
    # Reads under way, oldest first, by their first blocks; with the time at which each began.
    _reads: dict[bytes, tuple[asyncio.Task[None], float]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _refreshed: set[bytes] = field(default_factory=set)  # last blocks of prompts, for a while
    _writing_pages: int = 0  # of the engine thread
    _block_s: float = 0.0  # mean seconds to read a block; 0 before the first
    _num_slower: int = 0  # prompts for which computing seemed faster

    def __post_init__(self) -> None:
        self._events = asyncio.get_running_loop()
        self.cache.on_stored = self.keep
        self.cache.holders = frozenset({_OWNER})

    def keep(self, stored: Stored) -> None:
        """Write what has entered the cache, unless too much waits already. For the engine thread."""
        page_ids, slot_id = stored.page_ids, stored.slot_id
        slots = self.cache.slots
        count = len(page_ids)
        if (self._writing_pages + count) * WRITE_SHARE > self.cache.pages.num_total or (
            slot_id is not None and 2 * slots.num_available < slots.num_total
        ):
            self.metrics.blocks.labels("skipped").inc(max(count, 1))
            return
        self._writing_pages += count
        leases: list[Lease] = [self.cache.pages.alloc(0, owner=_OWNER, shared=page_ids)]
        if slot_id is not None:
            leases.append(slots.share(slot_id, owner=_OWNER))
        move = BlockMove(
            load=False,
            names=stored.names,
            page_ids=page_ids,
            slot_id=NULL_INDEX if slot_id is None else slot_id,
            state_of=b"" if slot_id is None else stored.last,
        )
        self._events.call_soon_threadsafe(self._start_write, move, leases)

    async def bring(self, request: Request, names: tuple[bytes, ...]) -> None:
        """Bring the blocks of a prompt into the cache that only the disk has.

        It returns early if that fails, takes too long, or is not worth it.
        """
        if not names or self.cache.rule is None or request.num_prompt_logprobs is not None:
            return
        names = names[: self.cache.rule.last_point(len(request.prompt_token_ids))]
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                await self._bring(names)
        except TimeoutError:
            logger.warning("the disk cache did not answer within %g s", READ_LIMIT_S)

    async def finish(self, timeout_s: float) -> None:
        """Wait until all writes are over, but no longer than `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    @property
    def _is_stuck(self) -> bool:
        """Return whether a read has taken too long and goes on."""
        began_s = next((began_s for _, began_s in self._reads.values()), math.inf)
        return self._events.time() - began_s >= READ_LIMIT_S

    def _refresh(self, names: tuple[bytes, ...]) -> None:
        """Note on disk that memory has these blocks, so that they are not the first to go there."""
        if not names or names[-1] in self._refreshed:
            return
        if not self._refreshed:
            self._events.call_later(REFRESH_S, self._refreshed.clear)
        self._refreshed.add(names[-1])
        self.own.writing.submit(self.own.use, names)

    async def _bring(self, names: tuple[bytes, ...]) -> None:
        self._refresh(names[: self.cache.num_resumable(names)])
        tried = set[bytes]()  # first missing blocks that others have read
        while not self._is_stuck:
            known = self.cache.num_resumable(names)
            if known == len(names) or names[known] in tried:
                return
            first = names[known]
            if first not in self._reads:
                if len(self._reads) < MAX_READS:
                    read = asyncio.create_task(self._read(names, known))
                    self._reads[first] = read, self._events.time()
                    await asyncio.shield(read)
                return
            tried.add(first)
            await asyncio.shield(self._reads[first][0])

    async def _read(self, names: tuple[bytes, ...], known: int) -> None:
        try:
            await self._read_from(names, known)
        except BatonError as error:
            logger.warning("blocks were not read from the disk cache: %s", error)
        except Exception:  # the prompt is computed, whatever is wrong here
            logger.exception("blocks were not read from the disk cache")
        finally:
            del self._reads[names[known]]

    async def _read_from(self, names: tuple[bytes, ...], known: int) -> None:
        """Read the blocks of a prompt after the first `known` ones, as far as the disk has them."""
        count = await self._events.run_in_executor(
            self.own.reading, self._num_on_disk, names[known:]
        )
        if not count:
            return
        read = await self.loop.submit(lambda: self._lease(names[: known + count]), undo=_end)
        if read is None:
            return
        began_s = time.monotonic()
        num_read, move = 0, read.move
        try:
            num_read = await self.move(move)
        finally:
            self.loop.post(lambda: self._insert(read, num_read))
        seconds = time.monotonic() - began_s
        wanted = len(move.names)
        self.metrics.read_s.observe(seconds)
        self.metrics.blocks.labels("read").inc(num_read)
        self.metrics.blocks.labels("missing").inc(wanted - num_read)
        before_s = self._block_s or seconds / wanted
        self._block_s = before_s + _NEWEST * (seconds / wanted - before_s)

    def _num_on_disk(self, names: Sequence[bytes]) -> int:
        return self.own.num_known(names, with_state=self.cache.has_states)

    def _lease(self, names: tuple[bytes, ...]) -> _Read | None:
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
            leased = pages.alloc(missing, owner=_OWNER, shared=found.page_ids)
        except CapacityError:
            return None
        try:
            slot = slots.alloc(owner=_OWNER) if self.cache.has_states else None
        except CapacityError:
            leased.end()
            return None
        return _Read(names, num_found, leased, slot, self.cache.epoch)

    def _insert(self, read: _Read, num_read: int) -> None:
        """Put blocks into the cache and release their memory. For the engine thread.

        Nothing is put in if all was evicted meanwhile: a stage may have lost its memory since.
        """
        if num_read and read.epoch == self.cache.epoch:
            self.cache.insert(
                read.names[: read.num_found + num_read],
                read.pages.page_ids,
                None if read.slot is None else read.slot.slot_id,
                notify=False,
            )
        read.end()

    def _start_write(self, move: BlockMove, leases: Sequence[Lease]) -> None:
        task = asyncio.create_task(self._write(move, leases))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, move: BlockMove, leases: Sequence[Lease]) -> None:
        try:
            num_written = await self.move(move)
            self.metrics.blocks.labels("written").inc(num_written)
            self.metrics.num_bytes.set(self.own.num_bytes)
        except BatonError as error:
            logger.warning("blocks were not written to the disk cache: %s", error)
        except Exception:  # only a copy is missing
            logger.exception("blocks were not written to the disk cache")
        finally:
            self.loop.post(lambda: self._end_write(move, leases))

    def _end_write(self, move: BlockMove, leases: Sequence[Lease]) -> None:
        self._writing_pages -= len(move.names)
        for lease in leases:
            lease.end()

    def _is_faster(self, num_tokens: int, num_blocks: int) -> bool:
        least_s = self.least_s(num_tokens)
        if not least_s or self._block_s * num_blocks <= least_s:
            return True
        self._num_slower += 1
        if self._num_slower % RETRY == 0:
            return True
        self.metrics.blocks.labels("slower").inc(num_blocks)
        return False


def _end(read: _Read | None) -> None:
    if read is not None:
        read.end()

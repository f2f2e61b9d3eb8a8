"""One tier of a pool's prefix cache, as its leader runs it.

    a block enters the prefix cache ─▶ waits (`pool.tiers.block_writes`) ─▶ leased ─▶ every stage
                                       writes its part ─▶ released
    a prompt arrives ─▶ blocks that only the tier has are read (`pool.prefix.block_reads`)

Requests wait for a read, but never for a write. Memory stays leased until every stage has answered,
because a stage may use it until then.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from engine.core.request import Request
from engine.loop import EngineLoop
from engine.memory.leases import Lease
from pool.prefix.block_reads import BlockRead, BlockReads
from pool.prefix.cache import PrefixCache
from pool.tiers.block_store import Content, Tier
from pool.tiers.block_writes import BlockWrites
from pool.tiers.copies import WrittenBlocks
from pool.tiers.stage_blocks import BlockMove, StageBlocks
from runtime.errors import BatonError
from runtime.observe.metrics.caches import TierMetrics

logger = logging.getLogger(__name__)

READ_LIMIT_S = 30.0  # seconds that a request waits for its blocks
REFRESH_S = 60.0  # seconds between two notes in the tier that blocks are in use
_LOOK_S = 0.01  # between two looks at the writes that are left


class FindBlocks(Protocol):
    """A count of the blocks that could be read, from the first on."""

    async def __call__(self, names: Sequence[bytes], /, *, with_state: bool) -> int: ...


@dataclass(frozen=True)
class _TierBlocks:
    """Blocks in a tier. Implements `BlockOffer`."""

    tier: "BlockTier"
    num_blocks: int

    async def fill(self, read: BlockRead) -> int:
        tier, wanted = self.tier, read.missing
        move = BlockMove(
            tier.tier,
            load=True,
            names=wanted,
            page_ids=tuple(read.pages.page_ids[read.num_found :]),
            slot_id=read.slot_id,
            state_of=b"" if read.slot is None else read.names[-1],
        )
        num_read = await tier.move(move)
        tier.moved(move, num_read)
        if num_read < len(wanted) and not tier.data_rank:
            # Of a model with states, nothing is resumed from where the state is missing.
            lacked = (
                (wanted[num_read], Content.PAGE)
                if read.slot is None
                else (wanted[-1], Content.STATE)
            )
            # Before the same object is written again, which is skipped if it is there.
            tier.own.writing.submit(tier.own.forget, *lacked)
        return num_read


@dataclass(eq=False)
class BlockTier:
    """The copies of a data rank's blocks in one tier. Implements `BlockSource` for its reads.

    It belongs to the event loop's thread, except for its `writes`.

    Attributes:
        own: the tier of this process, which is of the first data rank.
        move: has all stages move blocks; returns how many of the first ones all of them had.
        find: returns how many of these blocks could be read, with a state after them if that is
            asked for.
        written: what is known of the tier if other data ranks have one each.
    """

    tier: Tier
    cache: PrefixCache
    own: StageBlocks
    loop: EngineLoop
    move: Callable[[BlockMove], Awaitable[int]]
    find: FindBlocks
    metrics: TierMetrics
    data_rank: int = 0
    written: WrittenBlocks | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _refreshed: set[bytes] = field(default_factory=set)  # last blocks of prompts, for a while

    def __post_init__(self) -> None:
        self._events = asyncio.get_running_loop()
        count = self.metrics.blocks
        self.writes = BlockWrites(
            self.cache,
            self.tier,
            start=lambda move, leases: self._events.call_soon_threadsafe(
                self._start_write, move, leases
            ),
            skipped=count.labels(self.tier, "skipped").inc,
        )
        self.cache.listeners.append(self.writes.add)
        self.reads = BlockReads(
            self.cache,
            self.loop,
            self.tier.owner,
            partial(count.labels, self.tier),
            self.metrics.read_s.labels(self.tier),
        )

    @property
    def is_own(self) -> bool:
        """Return whether the worker reports what is there to routers."""
        return self.tier is not Tier.SERVER

    async def bring(self, request: Request, names: tuple[bytes, ...]) -> int:
        """Bring the blocks of a prompt into the cache that the tier has and the cache lacks.

        Return what `BlockReads.bring` does. It returns early if that fails, takes too long, or is
        not worth it.
        """
        names = self.cache.names_to_resume(names, request)
        if not names or self.reads.oldest_s >= READ_LIMIT_S:
            return 0
        self._refresh(names[: self.cache.num_resumable(names)])
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                return await self.reads.bring(names, self)
        except TimeoutError:
            logger.warning("the %s did not answer within %g s", self.tier.owner, READ_LIMIT_S)
            return 0

    def num_more(self, names: Sequence[bytes]) -> int:
        """Return how many of these blocks only this data rank's tier may have; 0 if any rank reads
        it. For the engine thread.
        """
        if self.written is None:
            return 0
        return max(0, self.written.num_known(names) - self.cache.num_resumable(names))

    async def finish(self, timeout_s: float) -> None:
        """Wait until everything is written, but no longer than `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.writes.is_idle:  # noqa: ASYNC110 - known to the engine thread
                    await asyncio.sleep(_LOOK_S)

    @asynccontextmanager
    async def offer(
        self, names: Sequence[bytes], num_cached: int
    ) -> AsyncGenerator["_TierBlocks", None]:
        num_known = await self.find(names[num_cached:], with_state=self.cache.has_states)
        yield _TierBlocks(self, num_known)

    def _refresh(self, names: tuple[bytes, ...]) -> None:
        """Note in the tier that memory has these blocks, so that they are not the first to go."""
        if not names or names[-1] in self._refreshed:
            return
        if not self._refreshed:
            self._events.call_later(REFRESH_S, self._refreshed.clear)
        self._refreshed.add(names[-1])
        self.own.writing.submit(self.own.use, names)

    def moved(self, move: BlockMove, num_moved: int) -> None:
        """Note which points of a move are in the tier now."""
        if self.written is None:
            return
        if not self.cache.has_states:
            self.written.add(move.names[:num_moved][::-1])
        elif move.state_of and num_moved == len(move.names):
            self.written.add((move.state_of,))

    def _start_write(self, move: BlockMove, leases: Sequence[Lease]) -> None:
        task = asyncio.create_task(self._write(move, leases))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, move: BlockMove, leases: Sequence[Lease]) -> None:
        try:
            num_written = await self.move(move)
            self.metrics.blocks.labels(self.tier, "written").inc(num_written)
            self.metrics.num_bytes.labels(self.tier).set(self.own.store.num_bytes)
            self.moved(move, num_written)
        except BatonError as error:
            logger.warning("blocks were not written to the %s: %s", self.tier.owner, error)
        except Exception:  # only a copy is missing
            logger.exception("blocks were not written to the %s", self.tier.owner)
        finally:
            self.loop.post(lambda: self.writes.ended(move, leases))

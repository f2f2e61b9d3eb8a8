"""The disk cache of a pool, as its leader runs it.

    a block enters the prefix cache ─▶ waits (`pool.disk.block_writes`) ─▶ leased ─▶ every stage
                                       writes its part ─▶ released
    a prompt arrives ─▶ blocks that only the disk has are read (`pool.prefix.block_reads`)

Requests wait for a read, but never for a write. Memory stays leased until every stage has answered,
because a stage may use it until then.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from engine.core.request import Request
from engine.loop import EngineLoop
from engine.memory.leases import Lease
from pool.disk.block_writes import BlockWrites
from pool.disk.stage_blocks import BlockMove, StageBlocks
from pool.prefix.block_reads import BlockRead, BlockReads
from pool.prefix.cache import PrefixCache
from runtime.errors import BatonError
from runtime.observe.metrics.caches import DiskMetrics

logger = logging.getLogger(__name__)

READ_LIMIT_S = 30.0  # seconds that a request waits for its blocks
REFRESH_S = 60.0  # seconds between two notes on disk that blocks are in use
_OWNER = "disk cache"
_LOOK_S = 0.01  # between two looks at the writes that are left


@dataclass(frozen=True)
class _DiskBlocks:
    """Blocks on disk. Implements `BlockOffer`."""

    num_blocks: int
    move: Callable[[BlockMove], Awaitable[int]]

    async def fill(self, read: BlockRead) -> int:
        return await self.move(
            BlockMove(
                load=True,
                names=read.missing,
                page_ids=tuple(read.pages.page_ids[read.num_found :]),
                slot_id=read.slot_id,
                state_of=b"" if read.slot is None else read.names[-1],
            )
        )


@dataclass(eq=False)
class DiskCache:
    """The blocks of a pool's prefix cache on disk. Implements `BlockSource` for its reads.

    `move` has all stages move blocks, and returns how many of the first ones all of them had. It
    belongs to the event loop's thread, except for its `writes`.
    """

    cache: PrefixCache
    own: StageBlocks
    loop: EngineLoop
    move: Callable[[BlockMove], Awaitable[int]]
    metrics: DiskMetrics
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _refreshed: set[bytes] = field(default_factory=set)  # last blocks of prompts, for a while

    def __post_init__(self) -> None:
        self._events = asyncio.get_running_loop()
        self.writes = BlockWrites(
            self.cache,
            _OWNER,
            start=lambda move, leases: self._events.call_soon_threadsafe(
                self._start_write, move, leases
            ),
            skipped=self.metrics.blocks.labels("skipped").inc,
        )
        self.cache.on_stored = self.writes.add
        self.reads = BlockReads(
            self.cache, self.loop, _OWNER, self.metrics.blocks, self.metrics.read_s, notify=False
        )

    async def bring(self, request: Request, names: tuple[bytes, ...]) -> int:
        """Bring the blocks of a prompt into the cache that only the disk has.

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
            logger.warning("the disk cache did not answer within %g s", READ_LIMIT_S)
            return 0

    async def finish(self, timeout_s: float) -> None:
        """Wait until everything is written, but no longer than `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.writes.is_idle:  # noqa: ASYNC110 - known to the engine thread
                    await asyncio.sleep(_LOOK_S)

    @asynccontextmanager
    async def offer(
        self, names: Sequence[bytes], num_cached: int
    ) -> AsyncGenerator["_DiskBlocks", None]:
        yield _DiskBlocks(
            await self._events.run_in_executor(
                self.own.reading, self._num_on_disk, names[num_cached:]
            ),
            self.move,
        )

    def _num_on_disk(self, names: Sequence[bytes]) -> int:
        return self.own.num_known(names, with_state=self.cache.has_states)

    def _refresh(self, names: tuple[bytes, ...]) -> None:
        """Note on disk that memory has these blocks, so that they are not the first to go there."""
        if not names or names[-1] in self._refreshed:
            return
        if not self._refreshed:
            self._events.call_later(REFRESH_S, self._refreshed.clear)
        self._refreshed.add(names[-1])
        self.own.writing.submit(self.own.use, names)

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
            self.loop.post(lambda: self.writes.ended(move, leases))

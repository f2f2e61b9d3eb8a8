"""A tier of a stage: its part of blocks, copied from its pools and back into them.

A block may have been stored by stages with other layers, or by other numbers of ranks. Then the
part of this stage is put together from theirs, as in a handoff (`engine.memory.layout.stretches`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from engine.core.layer_range import LayerRange, TensorRank
from engine.kernels.host.codegen.one_thread import stand_back, use_one_thread
from engine.memory.layout import NULL_INDEX, CacheSpec, stretches
from engine.memory.records import RecordMemory
from pool.tiers.block_store import BlockStore, Content, ObjectKey, StagePart, Tier
from pool.tiers.part_format import PUBLIC_KEY, PartLayout
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_S = 10.0  # seconds between two warnings of damage
LIMIT_S = 30.0  # seconds after which a call is interrupted
AHEAD = 2  # blocks from the one that is read to the one that is prefetched


@dataclass(frozen=True)
class BlockMove:
    """Blocks that all stages write to a tier, or read from it.

    Attributes:
        tier: to or from which they are moved.
        load: whether they are read.
        names: of blocks that follow each other.
        page_ids: of their entries.
        slot_id: of the state after the block `state_of`; the null slot without a state.
    """

    tier: Tier
    load: bool
    names: tuple[bytes, ...]
    page_ids: tuple[int, ...]
    slot_id: int = NULL_INDEX
    state_of: bytes = b""


class StageBlocks:
    """One tier of a stage. Blocks that are written must not change meanwhile."""

    def __init__(
        self, store: BlockStore, memory: RecordMemory, *, key: bytes | None = PUBLIC_KEY
    ) -> None:
        """Create the tier and begin to look over its place.

        The objects are sealed with `key`, 32 bytes. Without one they consist of the records alone, for
        a place that is as safe as the pools.
        """
        self.store = store
        self._memory = memory
        self._key = key
        self._part = StagePart.of(memory.geometry)
        self._num_damaged = 0
        self._quiet_until_s = 0.0
        self._layouts: dict[tuple[Content, StagePart], PartLayout] = {}
        self.reading = ThreadPoolExecutor(1, "tier-read", initializer=use_one_thread)
        self.writing = ThreadPoolExecutor(1, "tier-write", initializer=stand_back)
        self.writing.submit(store.check)

    @property
    def bytes_per_block(self) -> int:
        return self._layout(Content.PAGE, self._part).starts[-1]

    async def run(self, executor: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        """Return what a call on one of the threads returns, which uses the place.

        It waits for the end even if it is cancelled, because the thread may use memory until then. A
        call that goes on for `LIMIT_S` is interrupted.
        """
        work = asyncio.get_running_loop().run_in_executor(executor, call)
        try:
            await self._until_ended(work)
        except asyncio.CancelledError:
            await self._until_ended(work)
            raise
        return work.result()

    async def _until_ended(self, work: asyncio.Future[T]) -> None:
        while not (await asyncio.wait([work], timeout=LIMIT_S))[0]:
            self.store.interrupt()

    def num_known(self, names: Sequence[bytes], *, with_state: bool) -> int:
        """Return how many of these blocks, from the first on, are there for this stage.

        With `with_state` the state after the last of them is there, too. For the thread of
        `reading`.
        """
        count = 0
        for parts in self.store.parts(names, Content.PAGE):
            if not self._is_covered(parts, Content.PAGE):
                break
            count += 1
        if with_state:
            for parts in self.store.parts(names[:count][::-1], Content.STATE):
                if self._is_covered(parts, Content.STATE):
                    break
                count -= 1
        return count

    def move(self, move: BlockMove) -> int:
        """Write or read blocks; return how many of them, from the first on, were intact.

        For the thread of `writing` or `reading`. Errors of the place are logged.
        """
        carry = self._load if move.load else self._store
        self._memory.begin(load=move.load)
        # All are tried, so that no damaged object stays in the way of its replacement.
        moved = list[bool]()
        for at, (name, page_id) in enumerate(zip(move.names, move.page_ids, strict=True)):
            if move.load and at + AHEAD < len(move.names):
                # The place works while this thread checks what it has read.
                ahead = move.names[at + AHEAD]
                self.store.prefetch(ObjectKey(ahead, Content.PAGE, self._part))
            moved.append(carry(name, Content.PAGE, page_id))
        count = moved.index(False) if False in moved else len(moved)
        if move.slot_id != NULL_INDEX:
            has_state = carry(move.state_of, Content.STATE, move.slot_id)
            count = count if has_state and count == len(moved) else 0
        if move.load:
            # The first blocks are the last to go, because the others are useless without them.
            self.use(move.names[:count])
        return count

    def use(self, names: Sequence[bytes]) -> None:
        """Note that blocks of a prompt were used, read or not."""
        self.store.use(
            ObjectKey(name, content, self._part) for name in reversed(names) for content in Content
        )

    def forget(self, name: bytes, content: Content) -> None:
        """Remove this stage's object of a block whose other parts are not all there.

        Else it would be asked for in vain each time.
        """
        self.store.remove(ObjectKey(name, content, self._part))

    def close(self) -> None:
        """End its threads after what they have begun, and let go of the place."""
        for executor in (self.reading, self.writing):
            executor.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    def _store(self, name: bytes, content: Content, index: int) -> bool:
        key = ObjectKey(name, content, self._part)
        if any(self._part in parts for parts in self.store.parts((name,), content)):
            self.store.use((key,))
            return True
        layout = self._layout(content, self._part)
        records = self._memory.fetched(layout.of_part, index)
        if self._key is None:
            return self.store.put(key, records)
        return self.store.put(key, layout.sealed(name, records, self._key))

    def _load(self, name: bytes, content: Content, index: int) -> bool:
        layout = self._layout(content, self._part)
        records = self._memory.blank(layout.of_part, index)
        is_loaded = self._read(ObjectKey(name, content, self._part), records) or self._compose(
            name, content, records
        )
        if is_loaded:
            self._memory.stored(layout.of_part, index)
        return is_loaded

    def _read(self, key: ObjectKey, records: Sequence[memoryview]) -> bool:
        """Read an object's tensors; return whether it is there and intact.

        If it is not, their bytes are undefined.
        """
        layout = self._layout(key.content, key.part)
        pieces = list(records) if self._key is None else layout.blank(records)
        size = self.store.get(key, pieces)
        if size is None:
            return False
        if size == sum(map(len, pieces)) and (
            self._key is None or layout.is_intact(key.block, pieces, self._key)
        ):
            return True
        self._report_damage(key)
        self.store.remove(key)
        return False

    def _report_damage(self, key: ObjectKey) -> None:
        """Log a damaged object, unless one was logged just now: there may be thousands."""
        self._num_damaged += 1
        if time.monotonic() < self._quiet_until_s:
            return
        self._quiet_until_s = time.monotonic() + QUIET_S
        logger.warning(
            "copies of blocks are damaged and not used, %d until now; the latest is %s of block %s",
            self._num_damaged,
            key.label,
            key.block.hex(),
        )

    def _compose(self, name: bytes, content: Content, records: Sequence[memoryview]) -> bool:
        """Fill the records of this stage's part from objects of other parts."""
        own = self._layout(content, self._part)
        parts = next(self.store.parts((name,), content))
        for group in self._groups(parts, content):
            missing = [spec.record_bytes for spec in own.of_part]
            for part, layers in group:
                layout = self._layout(content, part)
                source = [memoryview(bytearray(spec.record_bytes)) for spec in layout.of_part]
                if not self._read(ObjectKey(name, content, part), source):
                    continue
                for spec, record in zip(layout.of_whole, source, strict=True):
                    if spec.layer_id in layers and spec in own.of_whole:
                        at = own.of_whole.index(spec)
                        missing[at] -= self._copy(spec, part.tensor, record, records[at])
            if not any(missing):
                self.store.use(ObjectKey(name, content, part) for part, _ in group)
                return True
        return False

    def _is_covered(self, parts: Collection[StagePart], content: Content) -> bool:
        """Return whether these parts of a block have all of this stage's."""
        return self._part in parts or any(True for _ in self._groups(parts, content))

    def _groups(
        self, found: Collection[StagePart], content: Content
    ) -> Iterator[list[tuple[StagePart, LayerRange]]]:
        """Return sets of parts that have all layers of this stage, with those to take from each.

        The stages of a set have equal numbers of ranks.
        """
        parts = set(found)
        for size in sorted({part.tensor.size for part in parts}):
            if not self._divides(size, content):
                continue
            whole = [
                layers
                for layers in {part.layers for part in parts}
                if parts.issuperset(_ranks_of(layers, size))
            ]
            group = list[tuple[StagePart, LayerRange]]()
            covered = self._part.layers.start
            while covered < self._part.layers.end:
                reach = [layers for layers in whole if covered in layers]
                if not reach:
                    break
                longest = max(reach, key=lambda layers: layers.end)
                taken = LayerRange(covered, longest.end)
                group += ((part, taken) for part in _ranks_of(longest, size))
                covered = longest.end
            else:
                yield group

    def _divides(self, size: int, content: Content) -> bool:
        """Return whether objects of stages with this number of ranks can be used here."""
        try:
            _ = self._layout(content, StagePart(self._part.layers, TensorRank(0, size))).of_part
        except ConfigError:
            return False  # the model cannot be divided so
        return True

    def _copy(
        self, spec: CacheSpec, source: TensorRank, record: memoryview, target: memoryview
    ) -> int:
        """Copy this rank's part of a record of another one; return the number of its bytes."""
        moved = stretches(spec, source, self._part.tensor)
        if moved is None:
            target[:] = record
            return len(target)
        for stretch in moved:
            target[stretch.dest_start : stretch.dest_start + stretch.num_bytes] = record[
                stretch.source_start : stretch.source_start + stretch.num_bytes
            ]
        return sum(stretch.num_bytes for stretch in moved)

    def _layout(self, content: Content, part: StagePart) -> PartLayout:
        layout = self._layouts.get((content, part))
        if layout is None:
            layout = PartLayout(self._memory.geometry.specs, content, part)
            self._layouts[content, part] = layout
        return layout


def _ranks_of(layers: LayerRange, size: int) -> list[StagePart]:
    """Return the parts of the ranks of a stage."""
    return [StagePart(layers, TensorRank(rank, size)) for rank in range(size)]

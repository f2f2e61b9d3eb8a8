"""The disk cache of a stage: its part of blocks, written from its pools and read into them.

A block may have been written by stages with other layers, or by other numbers of ranks. Then the
part of this stage is put together from theirs, as in a handoff (`engine.memory.layout.stretches`).
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.core.layer_range import LayerRange, TensorRank
from engine.kernels.host.codegen.one_thread import stand_back, use_one_thread
from engine.memory.layout import NULL_INDEX, CacheSpec, stretches
from engine.memory.pools import StagePools
from pool.disk.folder import CacheFolder
from pool.disk.part_file import (
    Content,
    PartLayout,
    StagePart,
    prefetch_part,
    read_part,
    write_part,
)
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)

AHEAD = 2  # blocks from the one that is read to the one that the kernel begins to read


@dataclass(frozen=True)
class BlockMove:
    """Blocks that all stages write to the disk cache, or read from it.

    Attributes:
        load: whether they are read.
        names: of blocks that follow each other.
        page_ids: of their entries.
        slot_id: of the state after the block `state_of`; the null slot without a state.
    """

    load: bool
    names: tuple[bytes, ...]
    page_ids: tuple[int, ...]
    slot_id: int = NULL_INDEX
    state_of: bytes = b""


class StageBlocks:
    """The disk cache of a stage. Blocks that are written must not change meanwhile."""

    def __init__(self, folder: CacheFolder, pools: StagePools) -> None:
        self._folder = folder
        self._pools = pools
        self._part = StagePart.of(pools.geometry)
        self._layouts: dict[tuple[Content, StagePart], PartLayout] = {}
        self.reading = ThreadPoolExecutor(1, "disk-read", initializer=use_one_thread)
        self.writing = ThreadPoolExecutor(1, "disk-write", initializer=stand_back)
        self.writing.submit(folder.check)

    @property
    def num_bytes(self) -> int:
        """Return the size of the folder, without what others have written lately."""
        return self._folder.num_bytes

    @property
    def max_bytes(self) -> int:
        """Return the size to which the folder is bounded."""
        return self._folder.max_bytes

    @property
    def bytes_per_block(self) -> int:
        return self._layout(Content.PAGE, self._part).starts[-1]

    def num_known(self, names: Sequence[bytes], *, with_state: bool) -> int:
        """Return how many of these blocks, from the first on, are there for this stage.

        With `with_state` the state after the last of them is there, too. Any thread.
        """
        count = 0
        for name in names:
            if not self._has(name, Content.PAGE):
                break
            count += 1
        while with_state and count and not self._has(names[count - 1], Content.STATE):
            count -= 1
        return count

    def move(self, move: BlockMove) -> int:
        """Write or read blocks; return how many of them, from the first on, were intact.

        For the thread of `writing` or `reading`. Errors of the disk are logged.
        """
        carry = self._load if move.load else self._store
        # All are tried, so that no damaged file stays in the way of its replacement.
        moved = list[bool]()
        for at, (name, page_id) in enumerate(zip(move.names, move.page_ids, strict=True)):
            if move.load and at + AHEAD < len(move.names):
                # The disk works while this thread checks what it has read.
                prefetch_part(
                    self._folder.path_of(move.names[at + AHEAD], Content.PAGE, self._part)
                )
            moved.append(carry(name, Content.PAGE, page_id))
        count = moved.index(False) if False in moved else len(moved)
        if move.slot_id != NULL_INDEX:
            has_state = carry(move.state_of, Content.STATE, move.slot_id)
            count = count if has_state and count == len(moved) else 0
        if move.load:
            # The first blocks are the last to go, because the others are useless without them.
            self._folder.use(self._own_paths(move.names[:count]))
        return count

    def use(self, names: Sequence[bytes]) -> None:
        """Note that blocks were used though they were not read. For the thread of `writing`."""
        self._folder.use(self._own_paths(names))

    def close(self) -> None:
        """End its threads after what they have begun."""
        for executor in (self.reading, self.writing):
            executor.shutdown(wait=False, cancel_futures=True)

    def _own_paths(self, names: Sequence[bytes]) -> Iterator[str]:
        for name in reversed(names):
            for content in Content:
                yield self._folder.path_of(name, content, self._part)

    def _store(self, name: bytes, content: Content, index: int) -> bool:
        layout = self._layout(content, self._part)
        path = self._folder.path_of(name, content, self._part)
        try:
            if not self._folder.prepare(name) and self._folder.has(name, content, self._part):
                self._folder.use([path])
                return True
            num_bytes = write_part(path, layout, name, self._records(layout.of_part, index))
            self._folder.written(num_bytes)
        except OSError as error:
            self._folder.refused(error)
            return False
        return True

    def _load(self, name: bytes, content: Content, index: int) -> bool:
        layout = self._layout(content, self._part)
        path = self._folder.path_of(name, content, self._part)
        records = self._records(layout.of_part, index)
        if self._folder.has(name, content, self._part):
            if read_part(path, layout, name, records):
                return True
            self._drop(path)
        return self._compose(name, content, records)

    def _compose(self, name: bytes, content: Content, records: Sequence[memoryview]) -> bool:
        """Fill the records of this stage's part from files of other parts."""
        own = self._layout(content, self._part)
        for group in self._groups(name, content):
            missing = [spec.record_bytes for spec in own.of_part]
            for part, layers in group:
                layout = self._layout(content, part)
                source = [memoryview(bytearray(spec.record_bytes)) for spec in layout.of_part]
                path = self._folder.path_of(name, content, part)
                if not read_part(path, layout, name, source):
                    self._drop(path)
                    continue
                for spec, record in zip(layout.of_whole, source, strict=True):
                    if spec.layer_id in layers and spec in own.of_whole:
                        at = own.of_whole.index(spec)
                        missing[at] -= self._copy(spec, part.tensor, record, records[at])
            if not any(missing):
                self._folder.use(self._folder.path_of(name, content, part) for part, _ in group)
                return True
        return False

    def _has(self, name: bytes, content: Content) -> bool:
        if self._folder.has(name, content, self._part):
            return True
        return any(True for _ in self._groups(name, content))

    def _groups(
        self, name: bytes, content: Content
    ) -> Iterator[list[tuple[StagePart, LayerRange]]]:
        """Return sets of parts that have all layers of this stage, with those to take from each.

        The stages of a set have equal numbers of ranks.
        """
        parts = set(self._folder.parts(name, content))
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
        """Return whether files of stages with this number of ranks can be used here."""
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

    def _drop(self, path: str) -> None:
        logger.warning("a file of the disk cache is damaged, and is not used: %s", path)
        self._folder.remove(path)

    def _records(self, specs: Sequence[CacheSpec], index: int) -> list[memoryview]:
        return [self._pools.view(spec.layer_id, spec.kind, index, 1) for spec in specs]

    def _layout(self, content: Content, part: StagePart) -> PartLayout:
        layout = self._layouts.get((content, part))
        if layout is None:
            layout = PartLayout(self._pools.geometry.specs, content, part)
            self._layouts[content, part] = layout
        return layout


def _ranks_of(layers: LayerRange, size: int) -> list[StagePart]:
    """Return the parts of the ranks of a stage."""
    return [StagePart(layers, TensorRank(rank, size)) for rank in range(size)]

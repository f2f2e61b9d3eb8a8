"""Cache events for gateways that choose between routers: cached blocks of prompts with their
tokens.

`router.api.vllm_events` and `router.api.zmq_events` send them. Workers report only digests of
resume points (`router.workers.prefix_index`). The tokens come from prompts that this router has
placed and still remembers. Blocks known only from other routers' prompts, or forgotten, are not published. Salted
prompts are not published either, because no other client can resume from them. A block is published
while some worker can resume from it or from a block after it.

Pure. A subscriber first gets a snapshot, then changes; one that falls behind gets another snapshot.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from router.workers.prefix_index import RoutedPrompt
from runtime.model_files.adapter_folders import adapter_name

MAX_BLOCKS = 65_536  # remembered, of any size
MAX_EVENTS = 4096  # pending for one subscriber; more are replaced by a snapshot
CHUNK_BLOCKS = 1024  # of a snapshot, per message


@dataclass(eq=False, slots=True)
class TokenBlock:
    """A block of a prompt, with the adapter of that name or with none.

    `num_published`: number of published blocks that directly follow it.
    """

    name: bytes
    parent: "TokenBlock | None"
    token_ids: Sequence[int]
    depth: int
    adapter: str
    is_point: bool = False
    is_published: bool = False
    num_published: int = 0

    @property
    def key(self) -> int:
        """Return the first 8 bytes of the name, which is the size of a key in the contract."""
        return int.from_bytes(self.name[:8], "little", signed=True)


@dataclass(frozen=True)
class CacheEvent:
    """Consecutive blocks of a prompt that are published, parents first; or blocks that are not any more."""

    blocks: Sequence[TokenBlock]
    is_removal: bool = False

    @property
    def adapter(self) -> str:
        return self.blocks[0].adapter


@dataclass(frozen=True)
class SnapshotChunk:
    """The part of a snapshot that a batch is: its place, the number of parts, and that of blocks."""

    place: int
    num_parts: int
    num_blocks: int


@dataclass(frozen=True)
class CacheEventBatch:
    """Events in order. The first part of a snapshot replaces all that was published before."""

    number: int
    events: Sequence[CacheEvent]
    chunk: SnapshotChunk | None = None

    @property
    def clears(self) -> bool:
        return self.chunk is not None and not self.chunk.place


class CacheEvents:
    """Publisher of cache events. Implements `IndexListener`; called on the event loop's thread."""

    def __init__(self, is_held: Callable[[bytes], bool]) -> None:
        """`is_held` returns whether some worker can resume from the block of this name."""
        self._is_held = is_held
        self._blocks: dict[bytes, TokenBlock] = {}
        # In eviction order: a block comes after the blocks that follow it in a prompt.
        self._unpublished: OrderedDict[bytes, None] = OrderedDict()
        self._subscriptions: list[Subscription] = []

    def placed(self, prompt: RoutedPrompt, page_size: int, compatibility: str) -> None:
        """Remember the blocks of a placed prompt. Implements `IndexListener.placed`."""
        if prompt.salt:
            return
        names = prompt.block_names(page_size, compatibility)
        adapter = adapter_name(prompt.adapter)
        self._keep_longest(names)
        parent = None
        for depth, name in enumerate(names):
            block = self._blocks.get(name)
            if block is None:
                if not self._has_room(names):
                    break
                tokens = array("I", prompt.token_ids[depth * page_size : (depth + 1) * page_size])
                block = self._blocks[name] = TokenBlock(name, parent, tokens, depth, adapter)
                self._unpublished[name] = None
            parent = block
        self._keep_longest(names)
        for name in names:
            if self._is_held(name):
                self.stored(name)

    def stored(self, name: bytes) -> None:
        """Publish this block and its parents: a worker can resume from it."""
        block = self._blocks.get(name)
        if block is None:
            return
        block.is_point = True
        found: list[TokenBlock] = []
        node: TokenBlock | None = block
        while node is not None and not node.is_published:
            node.is_published = True
            self._unpublished.pop(node.name, None)
            found.append(node)
            if node.parent is not None:
                node.parent.num_published += 1
            node = node.parent
        if found:
            self._publish(CacheEvent(found[::-1]))

    def removed(self, name: bytes) -> None:
        """Unpublish this block and parents that are not needed: no worker can resume from it."""
        block = self._blocks.get(name)
        if block is None:
            return
        block.is_point = False
        gone: list[TokenBlock] = []
        node: TokenBlock | None = block
        while (
            node is not None and node.is_published and not node.is_point and not node.num_published
        ):
            node.is_published = False
            self._unpublished[node.name] = None
            gone.append(node)
            node = node.parent
            if node is not None:
                node.num_published -= 1
        if gone:
            self._publish(CacheEvent(gone, is_removal=True))

    @contextmanager
    def subscribe(
        self, last_number: int = 0, adapter: str | None = None
    ) -> "Iterator[Subscription]":
        """Subscribe for the duration of the block to blocks with this adapter, None for all blocks.

        `last_number`: last batch that the subscriber received.
        """
        subscription = Subscription(self._published, last_number, adapter)
        self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)

    def _published(self, adapter: str | None) -> list[TokenBlock]:
        """Return the published blocks with this adapter, None for all blocks; parents first."""
        return sorted(
            (
                block
                for block in self._blocks.values()
                if block.is_published and adapter in (None, block.adapter)
            ),
            key=lambda block: block.depth,
        )

    def _publish(self, event: CacheEvent) -> None:
        for subscription in self._subscriptions:
            subscription.note(event)

    def _keep_longest(self, names: Sequence[bytes]) -> None:
        """Mark the blocks of one prompt, given in order, as the last to evict."""
        for name in reversed(names):
            if name in self._unpublished:
                self._unpublished.move_to_end(name)

    def _has_room(self, names: Sequence[bytes]) -> bool:
        if len(self._blocks) >= MAX_BLOCKS:
            if next(iter(self._unpublished), names[0]) in names:
                return False  # only blocks of this prompt could be evicted: keep its parents
            name, _ = self._unpublished.popitem(last=False)
            del self._blocks[name]
        return True


class Subscription:
    """Events that one subscriber has not been sent yet."""

    def __init__(
        self,
        published: Callable[[str | None], list[TokenBlock]],
        last_number: int,
        adapter: str | None,
    ) -> None:
        self._published = published
        self._number = last_number
        self._adapter = adapter
        self._events: list[CacheEvent] | None = None  # None: a snapshot is due
        self._has_news = asyncio.Event()
        self._has_news.set()

    def note(self, event: CacheEvent) -> None:
        if self._events is not None and self._adapter in (None, event.adapter):
            self._events.append(event)
            if len(self._events) > MAX_EVENTS:
                self._events = None
            self._has_news.set()

    def start_over(self) -> None:
        """Send a snapshot next."""
        self._events = None
        self._has_news.set()

    @property
    def last_number(self) -> int:
        """Return the number of the last batch."""
        return self._number

    async def news(self, timeout_s: float | None = None) -> list[CacheEventBatch]:
        """Wait for events and return them in batches, which are numbered consecutively.

        The list is empty if there were none for `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            return []
        self._has_news.clear()
        events = self._events
        self._events = []
        return self._snapshot() if events is None else [self._batch(events)]

    def _snapshot(self) -> list[CacheEventBatch]:
        blocks = self._published(self._adapter)
        firsts = range(0, max(len(blocks), 1), CHUNK_BLOCKS)
        return [
            self._batch(
                [CacheEvent([block]) for block in blocks[first : first + CHUNK_BLOCKS]],
                SnapshotChunk(place, len(firsts), len(blocks)),
            )
            for place, first in enumerate(firsts)
        ]

    def _batch(
        self, events: Sequence[CacheEvent], chunk: SnapshotChunk | None = None
    ) -> CacheEventBatch:
        self._number += 1
        return CacheEventBatch(self._number, events, chunk)

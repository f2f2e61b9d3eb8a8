"""Which blocks of prompts are cached, with their tokens, for gateways that choose between routers:
the events of `SubscribeKvEvents` in the vLLM engine contract.

Workers report digests of where prompts can go on (`router.workers.prefix_index`). The tokens behind
them are those of prompts that this router has placed, as far as it remembers: of blocks that only
other routers' prompts had, or that were forgotten, nothing is published. Nor of salted prompts,
from which nobody else can go on. A block is published while some worker can go on from it or from
one behind it.

Pure. A subscriber first gets everything, as a snapshot, then what changes; one that falls behind
gets another snapshot.
"""

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2 as pb

from router.workers.prefix_index import RoutedPrompt

MAX_BLOCKS = 65_536  # remembered, of whatever size
MAX_EVENTS = 4096  # not sent to a subscriber yet; more are a snapshot
CHUNK_BLOCKS = 1024  # of a snapshot in one message


@dataclass(eq=False, slots=True)
class TokenBlock:
    """`num_published`: blocks right behind it that are published."""

    name: bytes
    parent: "TokenBlock | None"
    token_ids: Sequence[int]
    depth: int
    is_point: bool = False
    is_published: bool = False
    num_published: int = 0

    @property
    def key(self) -> int:
        """The name, as far as the contract has room for it."""
        return int.from_bytes(self.name[:8], "little", signed=True)


class CacheEvents:
    """Satisfies `router.workers.prefix_index.IndexListener`. Event loop's thread."""

    def __init__(self, is_held: Callable[[bytes], bool]) -> None:
        """`is_held`: whether some worker can go on from the block of this name."""
        self._is_held = is_held
        self._blocks: dict[bytes, TokenBlock] = {}
        # In the order in which they are dropped, a block after what is behind it.
        self._unpublished: OrderedDict[bytes, None] = OrderedDict()
        self._subscriptions: list[Subscription] = []

    def placed(self, prompt: RoutedPrompt, page_size: int, compatibility: str) -> None:
        """A prompt was given to a worker whose blocks have so many tokens."""
        if prompt.salt:
            return
        names = prompt.block_names(page_size, compatibility)
        self._keep_longest(names)
        parent = None
        for depth, name in enumerate(names):
            block = self._blocks.get(name)
            if block is None:
                if not self._has_room():
                    break
                tokens = array("I", prompt.token_ids[depth * page_size : (depth + 1) * page_size])
                block = self._blocks[name] = TokenBlock(name, parent, tokens, depth)
                self._unpublished[name] = None
            parent = block
        self._keep_longest(names)
        for name in names:
            if self._is_held(name):
                self.stored(name)

    def stored(self, name: bytes) -> None:
        """Some worker can go on from this block."""
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
            self._publish(_stored(found[::-1]))

    def removed(self, name: bytes) -> None:
        """No worker can any more."""
        block = self._blocks.get(name)
        if block is None:
            return
        block.is_point = False
        gone: list[int] = []
        node: TokenBlock | None = block
        while (
            node is not None and node.is_published and not node.is_point and not node.num_published
        ):
            node.is_published = False
            self._unpublished[node.name] = None
            gone.append(node.key)
            node = node.parent
            if node is not None:
                node.num_published -= 1
        if gone:
            self._publish(pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=gone)))

    @contextmanager
    def subscribe(self, last_number: int = 0) -> "Iterator[Subscription]":
        """`last_number`: of the batches that the subscriber had before."""
        subscription = Subscription(self._published, last_number)
        self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)

    def _published(self) -> list[TokenBlock]:
        """Parents before what is behind them."""
        return sorted(
            (block for block in self._blocks.values() if block.is_published),
            key=lambda block: block.depth,
        )

    def _publish(self, event: pb.KvCacheEvent) -> None:
        for subscription in self._subscriptions:
            subscription.note(event)

    def _keep_longest(self, names: Sequence[bytes]) -> None:
        """Blocks of one prompt, in order."""
        for name in reversed(names):
            if name in self._unpublished:
                self._unpublished.move_to_end(name)

    def _has_room(self) -> bool:
        if len(self._blocks) >= MAX_BLOCKS:
            if not self._unpublished:
                return False
            name, _ = self._unpublished.popitem(last=False)
            del self._blocks[name]
        return True


class Subscription:
    """What one subscriber has not been sent yet."""

    def __init__(self, published: Callable[[], list[TokenBlock]], last_number: int) -> None:
        self._published = published
        self._number = last_number
        self._events: list[pb.KvCacheEvent] | None = None  # None: a snapshot is due
        self._has_news = asyncio.Event()
        self._has_news.set()

    def note(self, event: pb.KvCacheEvent) -> None:
        if self._events is not None:
            self._events.append(event)
            if len(self._events) > MAX_EVENTS:
                self._events = None
            self._has_news.set()

    async def news(self) -> list[pb.KvEventBatch]:
        """What there is, once there is some; numbers of batches follow one another."""
        await self._has_news.wait()
        self._has_news.clear()
        events, self._events = self._events, []
        return self._snapshot() if events is None else [self._batch(events)]

    def _snapshot(self) -> list[pb.KvEventBatch]:
        blocks = self._published()
        firsts = range(0, max(len(blocks), 1), CHUNK_BLOCKS)
        batches = []
        for index, first in enumerate(firsts):
            cleared = [] if index else [pb.KvCacheEvent(cleared=pb.KvCacheCleared())]
            batches.append(
                self._batch(
                    [
                        *cleared,
                        *(_stored([block]) for block in blocks[first : first + CHUNK_BLOCKS]),
                    ]
                )
            )
            batches[-1].snapshot.CopyFrom(
                pb.KvSnapshotChunk(index=index, count=len(firsts), blocks=len(blocks))
            )
        return batches

    def _batch(self, events: Sequence[pb.KvCacheEvent]) -> pb.KvEventBatch:
        self._number += 1
        return pb.KvEventBatch(sequence_number=self._number, timestamp=time.time(), events=events)


def _stored(blocks: Sequence[TokenBlock]) -> pb.KvCacheEvent:
    """Of blocks that follow one another."""
    parent = blocks[0].parent
    return pb.KvCacheEvent(
        stored=pb.KvBlocksStored(
            blocks=[
                pb.KvBlock(
                    block_hash=block.key, token_ids=block.token_ids, block_size=len(block.token_ids)
                )
                for block in blocks
            ],
            parent_block_hash=None if parent is None else parent.key,
        )
    )

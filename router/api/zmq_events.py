"""Cache events over ZeroMQ, in the form of vLLM's: for routers in front that know its engines.

A PUB socket sends each batch as topic, number (8 bytes, big-endian) and content (MessagePack:
seconds since the epoch, events, data rank). A ROUTER socket takes the number of the first batch
that a subscriber has missed. It sends that batch and all later ones, as number and content, and
then the number -1. If that batch is gone, a snapshot is published to all: blocks that the
subscriber knows are cleared by its first event.
"""

import asyncio
import logging
import time
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from router.api.kv_events import CacheEvent, CacheEventBatch, CacheEvents, Subscription
from runtime.errors import ConfigError

MAX_BUFFERED = 10_000  # batches
MAX_BUFFERED_BYTES = 64 << 20
SNAPSHOT_PAUSE_S = 1.0  # at least, between two snapshots that subscribers ask for
DEVICE_MEMORY = "GPU"  # what subscribers know as the memory of workers
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)

logger = logging.getLogger(__name__)


class BlockStored(msgspec.Struct, tag_field="type"):
    """Consecutive blocks of a prompt that a worker has cached."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag_field="type"):
    """Blocks that no worker has cached any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag_field="type"):
    """No block is cached except for those of the events that follow."""


class ContentOfBatch(msgspec.Struct, array_like=True):
    """The content of a batch; the data rank is always 0."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class ReplayBuffer:
    """The last batches, up to a number of them and of their bytes."""

    def __init__(
        self, max_batches: int = MAX_BUFFERED, max_bytes: int = MAX_BUFFERED_BYTES
    ) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    def append(self, number: int, content: bytes) -> None:
        self._batches.append((number, content))
        self._num_bytes += len(content)
        while len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._batches.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]] | None:
        """Return this batch and all later ones; None if it is gone, or has never been.

        The next one to come may be asked for, too.
        """
        if not self._batches:
            return None
        first, last = self._batches[0][0], self._batches[-1][0]
        if not first <= number <= last + 1:
            return None
        return [each for each in self._batches if each[0] >= number]


class ZmqEvents:
    """Publisher of cache events on one address, and of those that were missed on another."""

    def __init__(self, events: CacheEvents, topic: str, address: str, replay_address: str) -> None:
        """Bind the addresses; without `replay_address` nothing can be asked for again.

        Raises:
            ConfigError: an address cannot be used; it names the field.
        """
        self._events = events
        self._topic = topic.encode()
        self._buffer = ReplayBuffer()
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._snapshot_at_s = 0.0
        try:
            self._published = self._bound(zmq.SocketType.PUB, address, "kv_events")
            self._replayed = (
                self._bound(zmq.SocketType.ROUTER, replay_address, "kv_events_replay")
                if replay_address
                else None
            )
        except ConfigError:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the bound addresses, with the ports that the system chose."""
        bound = (self._published, self._replayed)
        return tuple(
            each.get_string(zmq.SocketOption.LAST_ENDPOINT) for each in bound if each is not None
        )

    def close(self) -> None:
        """Close the sockets; what is not sent is lost."""
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """Publish events, and answer subscribers that have missed some, until cancelled."""
        # Numbers of an earlier process are smaller, so its subscribers notice that they miss some.
        first_number = int(time.time() * 1000)
        with self._events.subscribe(last_number=first_number - 1) as subscription:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish(subscription))
                if self._replayed is not None:
                    tasks.create_task(self._replay(self._replayed, subscription))

    async def _publish(self, subscription: Subscription) -> None:
        while True:
            for batch in await subscription.news():
                content = self._encoder.encode(content_of(batch))
                self._buffer.append(batch.number, content)
                number = batch.number.to_bytes(NUMBER_BYTES, "big")
                await self._published.send_multipart([self._topic, number, content])

    async def _replay(self, socket: zmq.asyncio.Socket, subscription: Subscription) -> None:
        while True:
            subscriber, *rest = await socket.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != NUMBER_BYTES:
                logger.debug("a request for missed cache events is not a number of 8 bytes")
                continue
            missed = self._buffer.since(int.from_bytes(rest[1], "big"))
            if missed is None and time.monotonic() >= self._snapshot_at_s:
                self._snapshot_at_s = time.monotonic() + SNAPSHOT_PAUSE_S
                subscription.start_over()
            for number, content in missed or ():
                frames = [subscriber, b"", number.to_bytes(NUMBER_BYTES, "big"), content]
                await socket.send_multipart(frames, copy=False)
            await socket.send_multipart([subscriber, b"", END, b""])

    def _bound(self, kind: zmq.SocketType, address: str, field: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(MAX_BUFFERED + 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error}", field=field) from error
        return socket


def content_of(batch: CacheEventBatch) -> ContentOfBatch:
    """Return the content of the message for a batch."""
    cleared = [AllBlocksCleared()] if batch.clears else []
    return ContentOfBatch(time.time(), [*cleared, *map(_event, batch.events)], 0)


def _event(event: CacheEvent) -> BlockStored | BlockRemoved:
    hashes = [block.key % (1 << 64) for block in event.blocks]
    if event.is_removal:
        return BlockRemoved(hashes, DEVICE_MEMORY)
    parent = event.blocks[0].parent
    return BlockStored(
        hashes,
        None if parent is None else parent.key % (1 << 64),
        [token for block in event.blocks for token in block.token_ids],
        len(event.blocks[0].token_ids),
        None,
        DEVICE_MEMORY,
        event.adapter or None,
    )

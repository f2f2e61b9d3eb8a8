"""Cache events over ZeroMQ: a subscriber written from vLLM's definition knows what the router knows,
whatever it has missed."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from protos import worker_pb2
from router.api import zmq_events
from router.api.kv_events import CacheEvents, TokenBlock
from router.api.zmq_events import ReplayBuffer, ZmqEvents
from router.config import RouterConfig
from router.workers.prefix_index import PrefixIndex, RoutedPrompt
from runtime.digests import block_names
from runtime.errors import ConfigError

PAGE = 2
TOPIC = "kv@pod@model"
MODEL = Path("model")
WAIT_S = 10.0
ANSWER_MS = 1000


class Subscriber:
    """The blocks that a router in front knows, by what it reads from the two sockets.

    It does not share code with the publisher.
    """

    def __init__(self, address: str, replay_address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SocketType.SUB)
        self._events.connect(address)
        self._events.subscribe("kv@")
        self._missed = self._context.socket(zmq.SocketType.DEALER)
        self._missed.connect(replay_address)
        self._next = 0
        # Tokens of whole prompts, from their first block on, by the hash of the last one.
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.adapters: dict[int, str | None] = {}

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def read(self, *, loses: bool = False) -> bool:
        """Apply the next message, or lose it; return whether there was one."""
        if not await self._events.poll(50):
            return False
        topic, number, content = await self._events.recv_multipart()
        assert topic.decode() == TOPIC
        if not loses:
            await self._apply(int.from_bytes(number, "big"), content)
        return True

    async def catch_up(self) -> None:
        """Ask for everything from the next number on."""
        await self._missed.send_multipart([b"", self._next.to_bytes(8, "big")])
        while await self._missed.poll(ANSWER_MS):
            _, number, content = await self._missed.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return
            await self._apply(int.from_bytes(number, "big"), content, is_replay=True)

    async def _apply(self, number: int, content: bytes, *, is_replay: bool = False) -> None:
        _, events, rank = msgspec.msgpack.decode(content)
        assert rank == 0
        clears = bool(events) and events[0]["type"] == "AllBlocksCleared"
        if number < self._next and not clears:
            return  # known from a replay
        if number > self._next and not clears and not is_replay:
            await self.catch_up()
            if number < self._next:
                return
            assert number == self._next or not self.prompts
        self._next = number + 1
        for event in events:
            self._event(event)

    def _event(self, event: dict[str, object]) -> None:
        match event:
            case {"type": "AllBlocksCleared"}:
                self.prompts.clear()
            case {"type": "BlockRemoved", "block_hashes": list(hashes)}:
                for key in hashes:
                    self.prompts.pop(key, None)
            case {
                "type": "BlockStored",
                "block_hashes": list(hashes),
                "parent_block_hash": parent,
                "token_ids": list(tokens),
                "block_size": int(size),
                "lora_name": adapter,
                "medium": "GPU",
            }:
                before = self.prompts.get(parent, ()) if isinstance(parent, int) else ()
                for place, key in enumerate(hashes):
                    assert 0 <= key < 1 << 64
                    before = (*before, *tokens[place * size : (place + 1) * size])
                    self.prompts[key] = before
                    self.adapters[key] = str(adapter) if adapter else None
            case _:
                pytest.fail(f"unknown event {event}")


class Publisher:
    """An index of workers, whose events are published."""

    def __init__(self, address: str, replay_address: str) -> None:
        self.index = PrefixIndex()
        self.index.listener = self.events = CacheEvents(self.index.is_held)
        self._zmq = ZmqEvents(self.events, TOPIC, address, replay_address)
        self.address, self.replay_address = self._zmq.addresses
        self._task = asyncio.create_task(self._zmq.run())
        self._numbers = itertools.count()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._zmq.close()

    def place(self, *token_ids: int, adapter: str = "") -> tuple[bytes, ...]:
        self.events.placed(RoutedPrompt((*token_ids, 0), adapter=adapter), PAGE, "m")
        return block_names(token_ids, PAGE, compatibility="m", adapter=adapter)

    def report(self, *, stored: tuple[bytes, ...] = (), removed: tuple[bytes, ...] = ()) -> None:
        number = next(self._numbers)
        report = worker_pb2.CacheReport(
            number=number, whole=not number, stored=b"".join(stored), removed=b"".join(removed)
        )
        assert self.index.report("h:1", report)

    @property
    def prompts(self) -> set[tuple[int, ...]]:
        """Return what is published, as whole prompts."""

        def whole(block: TokenBlock | None) -> tuple[int, ...]:
            return () if block is None else (*whole(block.parent), *block.token_ids)

        return {whole(block) for block in self.events._published(None)}


@asynccontextmanager
async def publishing(
    address: str = "tcp://127.0.0.1:*", replay_address: str = "tcp://127.0.0.1:*"
) -> AsyncIterator[Publisher]:
    publisher = Publisher(address, replay_address)
    try:
        yield publisher
    finally:
        await publisher.close()


@asynccontextmanager
async def subscribed(publisher: Publisher) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(publisher.address, publisher.replay_address)
    try:
        yield subscriber
    finally:
        subscriber.close()


async def agree(publisher: Publisher, subscriber: Subscriber) -> None:
    """Read, and ask for what was missed, until both know the same."""
    async with asyncio.timeout(WAIT_S):
        while set(subscriber.prompts.values()) != publisher.prompts:
            if not await subscriber.read():
                await subscriber.catch_up()


async def test_a_subscriber_learns_whole_prompts_and_their_adapters() -> None:
    async with publishing() as publisher, subscribed(publisher) as subscriber:
        names = publisher.place(1, 2, 3, 4)
        publisher.report(stored=names)
        await agree(publisher, subscriber)
        assert set(subscriber.prompts.values()) == {(1, 2), (1, 2, 3, 4)}
        publisher.report(stored=publisher.place(1, 2, adapter="a@digest"))
        await asyncio.sleep(0.1)
        await subscriber.catch_up()
        assert sorted(map(str, subscriber.adapters.values())) == ["None", "None", "a"]
        publisher.report(removed=names[1:])
        await agree(publisher, subscriber)
        assert set(subscriber.prompts.values()) == {(1, 2)}


@pytest.mark.parametrize("seed", range(6))
async def test_lost_messages_are_asked_for_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a buffer of four batches, some are gone: then a snapshot comes."""
    dice = random.Random(seed)
    monkeypatch.setattr(zmq_events, "SNAPSHOT_PAUSE_S", 0.0)
    monkeypatch.setattr(ReplayBuffer.__init__, "__defaults__", (4, 1 << 20))
    async with publishing() as publisher, subscribed(publisher) as subscriber:
        held = set[bytes]()
        for _ in range(40):
            names = publisher.place(*(dice.randrange(1, 3) for _ in range(6)))
            name = dice.choice(names)
            if name in held:
                held.discard(name)
                publisher.report(removed=(name,))
            else:
                held.add(name)
                publisher.report(stored=(name,))
            if dice.random() < 0.5:
                await subscriber.read(loses=dice.random() < 0.4)
        await agree(publisher, subscriber)


async def test_a_subscriber_survives_a_restart_of_the_router() -> None:
    async with publishing() as publisher:
        publisher.report(stored=publisher.place(1, 2, 3, 4))
        async with subscribed(publisher) as subscriber:
            await agree(publisher, subscriber)
            await publisher.close()
            async with publishing(publisher.address, publisher.replay_address) as restarted:
                restarted.report(stored=restarted.place(5, 6))
                await agree(restarted, subscriber)
                assert set(subscriber.prompts.values()) == {(5, 6)}


async def test_garbage_on_the_replay_socket_is_ignored() -> None:
    async with publishing() as publisher, subscribed(publisher) as subscriber:
        context = zmq.asyncio.Context()
        try:
            hostile = context.socket(zmq.SocketType.DEALER)
            hostile.connect(publisher.replay_address)
            for frames in (
                [b""],
                [b"", b"short"],
                [b"", bytes(9)],
                [b"a", b"b", bytes(8)],
                [b"", b"\xff" * 8],
            ):
                await hostile.send_multipart(frames)
            publisher.report(stored=publisher.place(1, 2))
            await agree(publisher, subscriber)
            assert not publisher._task.done()
        finally:
            context.destroy(linger=0)


def test_the_buffer_is_bounded_by_batches_and_bytes() -> None:
    buffer = ReplayBuffer(max_batches=3, max_bytes=10)
    assert buffer.since(0) is None
    for number in range(5):
        buffer.append(number, b"12")
    assert buffer.since(2) == [(2, b"12"), (3, b"12"), (4, b"12")]
    assert buffer.since(1) is None
    assert buffer.since(5) == []
    assert buffer.since(6) is None
    buffer.append(5, b"123456789")
    assert buffer.since(4) is None
    assert buffer.since(5) == [(5, b"123456789")]


async def test_an_address_in_use_is_refused_by_its_field() -> None:
    async with publishing() as publisher:
        with pytest.raises(ConfigError, match="cannot listen on") as refused:
            ZmqEvents(publisher.events, TOPIC, publisher.address, "")
        assert refused.value.field == "kv_events"
        with pytest.raises(ConfigError, match="cannot listen on") as refused:
            ZmqEvents(publisher.events, TOPIC, "tcp://127.0.0.1:*", "nonsense")
        assert refused.value.field == "kv_events_replay"


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"kv_events": "5557"}, "kv_events", "must be tcp://HOST:PORT or ipc://PATH"),
        ({"kv_events": "udp://*:1"}, "kv_events", "must be tcp://HOST:PORT or ipc://PATH"),
        ({"kv_events": "ipc://"}, "kv_events", "must be tcp://HOST:PORT or ipc://PATH"),
        ({"kv_events": "tcp://*:99999"}, "kv_events", "port from 0 to 65535"),
        (
            {"kv_events": "tcp://*:0", "kv_events_replay": "tcp://h"},
            "kv_events_replay",
            "must be HOST:PORT",
        ),
        ({"kv_events_replay": "tcp://*:5558"}, "kv_events_replay", "needs kv_events"),
    ],
)
def test_addresses_are_checked_before_the_start(
    settings: dict[str, Any], field: str, said: str
) -> None:
    config = RouterConfig(model=MODEL, prefill=("h:1",), decode=("h:2",), **settings)
    with pytest.raises(ConfigError, match=said) as refused:
        config.check()
    assert refused.value.field == field

"""One flipped byte between real pools over real UCX: always caught, always named, nothing wrong is emitted.

The three roles run in this process, so that the transport of the sending pool can be told to flip a byte of one
message after its digest was taken.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient
from baton.values import Chunk, Query
from decode.worker import DecodeRole
from pool import stage as stage_module
from pool.config import WorkerConfig
from pool.process import run_worker
from prefill.worker import PrefillRole
from router.app import serve
from router.config import RouterConfig
from runtime.announce import read_announcement
from runtime.errors import BatonError, IntegrityError, UnavailableError
from runtime.supervision import StopSignal
from tests.cluster.conftest import Reference
from tests.cluster.test_equality import on_the_wire
from tests.support.clusters import is_clean
from tests.support.questions import as_query, make_questions, shown
from transfer.transport import Operation, Peer
from transfer.ucx import UcxTransport


class FlippingTransport(UcxTransport):
    """Flips one bit of the `flip_at`-th message that is sent while armed."""

    flip_at: int | None = None
    num_sent = 0

    def send(self, peer: Peer, tag: int, buffer: memoryview) -> Operation:
        cls = FlippingTransport
        position, cls.num_sent = cls.num_sent, cls.num_sent + 1
        if position != cls.flip_at:
            return super().send(peer, tag, buffer)
        damaged = bytearray(buffer)
        damaged[len(damaged) // 2] ^= 0x10
        return super().send(peer, tag, memoryview(damaged))


@pytest.fixture(autouse=True)
def _flipping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stage_module, "UcxTransport", FlippingTransport)
    FlippingTransport.flip_at, FlippingTransport.num_sent = None, 0
    yield
    FlippingTransport.flip_at = None


async def announced(path: Path) -> str:
    async with asyncio.timeout(60):
        while (announcement := read_announcement(path)) is None:  # noqa: ASYNC110 - a file has no event to wait for
            await asyncio.sleep(0.02)
    return announcement.address


@asynccontextmanager
async def in_process(checkpoint: Path, folder: Path) -> AsyncIterator[AsyncBatonClient]:
    stop = StopSignal()
    tasks, addresses = [], {}
    try:
        for role in (PrefillRole(), DecodeRole()):
            config = WorkerConfig(model=checkpoint, announce=folder / f"{role.name}.json", drain_s=0.5)
            tasks.append(asyncio.create_task(run_worker(config, role, stop)))
            addresses[role.name] = await announced(folder / f"{role.name}.json")
        router = RouterConfig(model=checkpoint, prefill=(addresses["prefill"],), decode=(addresses["decode"],),
                              listen="127.0.0.1:0", announce=folder / "router.json", drain_s=0.5)
        tasks.append(asyncio.create_task(serve(router, stop)))
        async with AsyncBatonClient(await announced(folder / "router.json")) as client:
            await until_ready(client)
            yield client
    finally:
        stop.set("the test is over")
        await asyncio.gather(*tasks)


async def until_ready(client: AsyncBatonClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await client.complete(as_query(make_questions(1)[0]), timeout_s=20)
                return
            except UnavailableError:
                await asyncio.sleep(0.1)


async def outcome(client: AsyncBatonClient, query: Query) -> tuple[list[int], BatonError | None]:
    """Tokens that were sent, and the error that ended the stream; None if it finished."""
    seen: list[int] = []
    try:
        async for event in client.generate(query, timeout_s=30):
            seen += event.token_ids if isinstance(event, Chunk) else ()
    except BatonError as error:
        return seen, error
    return seen, None


async def test_a_flipped_byte_is_caught_and_named_wherever_it_is(checkpoint: Path, reference: Reference,
                                                               tmp_path: Path) -> None:
    question = make_questions(3, seed=21)[2]
    right = on_the_wire(reference.answers([question]))[0]
    async with in_process(checkpoint, tmp_path) as client:
        FlippingTransport.num_sent = 0
        assert shown(await client.complete(as_query(question), timeout_s=30)) == right
        num_messages = FlippingTransport.num_sent
        named = set()
        for position in range(num_messages):
            FlippingTransport.flip_at, FlippingTransport.num_sent = position, 0
            seen, error = await outcome(client, as_query(question))
            assert isinstance(error, IntegrityError), error
            named.add(str(error))
            assert seen in ([], [right[0][0]]), "only the first token, which prefill drew, may have been sent"
        FlippingTransport.flip_at = None
        assert shown(await client.complete(as_query(question), timeout_s=30)) == right
        async with asyncio.timeout(20):
            while not is_clean(await client.cluster_status()):  # noqa: ASYNC110 - polled as a person would
                await asyncio.sleep(0.1)
    assert any("kv" in text and "layer 3" in text for text in named), named
    assert any("state" in text for text in named), named
    assert any("conv" in text for text in named), named

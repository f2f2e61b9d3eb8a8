"""A small cluster in the test's own process whose parts can be broken on purpose: bytes damaged in
transfer, pages held or lost, workers stopped and started at their old addresses, workers that no
router knows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient
from decode.request_memory import Reservation
from decode.scheduler import DecodeScheduler
from decode.worker import DecodeRole
from engine.core.request import Request, SamplingParams
from engine.memory.layout import Buffer
from pool import leader_server
from pool.pipeline import leader as leader_module
from pool.pipeline.leader import Leader
from pool.process import run_worker
from pool.role import PoolRole
from pool.stage.config import WorkerConfig
from prefill.worker import PrefillRole
from router.app import serve
from router.config import RouterConfig
from runtime.errors import CapacityError
from runtime.process.announce import Announcement, read_announcement
from runtime.process.supervision import StopSignal
from tests.support.transfer.damaging_transport import send_damaged
from transfer.transport.protocol import Operation, Peer
from transfer.ucx.transport import UcxTransport

NUM_PAGES, PAGE_SIZE = 9, 64  # one of the pages is the null page
PLENTY = 1_000_000  # requests per minute


class DamagingUcx(UcxTransport):
    """A transport that, while armed, flips a bit of every message large enough to be state."""

    armed = False

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        if not DamagingUcx.armed or buffer.nbytes < 256:
            return super().send(peer, tag, buffer)
        return send_damaged(super().send, peer, tag, buffer)


@dataclass
class Running:
    """One role; `announcement` is its address, now and after a restart."""

    announcement: Announcement
    stop: StopSignal
    task: asyncio.Task[None]

    async def end(self) -> None:
        self.stop.set("the test says so")
        await self.task


@dataclass
class Laboratory:
    """`ports` are those of /metrics, by name."""

    folder: Path
    base: WorkerConfig
    client: AsyncBatonClient = field(init=False)
    roles: dict[str, Running] = field(default_factory=dict)
    leaders: list[Leader] = field(default_factory=list)
    schedulers: list[DecodeScheduler] = field(default_factory=list)

    async def start_worker(self, name: str, role: PoolRole) -> None:
        """Start a worker, under its old addresses if it ran before."""
        announce = self.folder / f"{name}.json"
        announce.unlink(missing_ok=True)
        before = self.roles.get(name)
        known = (
            {}
            if before is None
            else {
                "listen": before.announcement.address,
                "metrics_port": before.announcement.metrics_port,
            }
        )
        config, stop = self.base.model_copy(update={"announce": announce, **known}), StopSignal()
        task = asyncio.create_task(run_worker(config, role, stop))
        self.roles[name] = Running(await _announced(announce, task), stop, task)

    def limit_clients(self, requests_per_minute: int) -> None:
        """Set the quota of all clients, which the router reads within a second."""
        text = f'["*"]\nrequests_per_minute = {requests_per_minute}\n'
        (self.folder / "clients.new").write_text(text)
        (self.folder / "clients.new").rename(self.folder / "clients.toml")

    async def start_router(self) -> None:
        announce, stop = self.folder / "router.json", StopSignal()
        self.limit_clients(PLENTY)
        config = RouterConfig(
            model=self.base.model,
            prefill=(self.roles["prefill"].announcement.address,),
            decode=(self.roles["decode"].announcement.address,),
            listen="127.0.0.1:0",
            metrics_port=0,
            announce=announce,
            drain_s=0.5,
            peer_wait_s=0.5,
            client_limits=self.folder / "clients.toml",
        )
        task = asyncio.create_task(serve(config, stop))
        self.roles["router"] = Running(await _announced(announce, task), stop, task)

    async def until_serving(self) -> None:
        async with asyncio.timeout(60):
            while not all(  # noqa: ASYNC110
                worker.serving for worker in (await self.client.cluster_status()).workers
            ):
                await asyncio.sleep(0.05)

    async def hold_every_page(self) -> Reservation:
        """Send a request that fills the decode pool and is never committed; wait until no page is
        free."""
        tokens = (NUM_PAGES - 1) * PAGE_SIZE - 1
        request = Request("holder", (0,) * tokens, 1, SamplingParams(temperature=0))
        scheduler = self.schedulers[-1]
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self.leaders[-1].loop.submit(
                        lambda: scheduler.reserve(request, lambda event: None)
                    )
                except CapacityError:
                    await asyncio.sleep(0.05)

    async def release(self, held: Reservation) -> None:
        scheduler = self.schedulers[-1]
        await self.leaders[-1].loop.submit(lambda: scheduler.release(held.key))

    async def lose_a_page(self) -> None:
        """Take a lease without an owner, as a leak does."""
        scheduler = self.schedulers[-1]
        await self.leaders[-1].loop.submit(lambda: scheduler.pages.alloc(1, owner="nobody"))


@asynccontextmanager
async def laboratory(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Laboratory]:
    """Run one prefill and one decode worker of one stage each, and a router."""
    made = Laboratory(
        folder,
        WorkerConfig(
            model=checkpoint, drain_s=0.5, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_running=1
        ),
    )

    class SeenLeader(Leader):
        def start(self) -> None:
            scheduler = self.loop._schedulers[0]
            if isinstance(scheduler, DecodeScheduler):
                made.leaders.append(self)
                made.schedulers.append(scheduler)
            super().start()

    monkeypatch.setattr(leader_server, "Leader", SeenLeader)
    monkeypatch.setattr(leader_module, "LINGER_S", 600.0)  # a test ends it
    monkeypatch.setattr("transfer.ucx.transport.UcxTransport", DamagingUcx)
    try:
        await made.start_worker("prefill", PrefillRole())
        await made.start_worker("decode", DecodeRole())
        await made.start_router()
        async with AsyncBatonClient(made.roles["router"].announcement.address) as client:
            made.client = client
            await made.until_serving()
            yield made
    finally:
        DamagingUcx.armed = False
        await asyncio.gather(*(role.end() for role in made.roles.values()))


async def _announced(path: Path, task: asyncio.Task[None]) -> Announcement:
    async with asyncio.timeout(60):
        while (announcement := read_announcement(path)) is None:
            if task.done():
                task.result()
            await asyncio.sleep(0.01)
    return announcement

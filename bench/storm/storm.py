"""One storm: a cluster of two of each role, load, faults, and a check for leaks."""

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig
from baton.retry import Retry
from baton.values import Query
from bench.storm import leaks, truth
from bench.storm.adapters import StormAdapters
from bench.storm.cache_server import StormServer
from bench.storm.clients import StormClients
from bench.storm.faults import Equipment, Injector, SmallDisk, StormPlaces
from bench.storm.layouts import StormLayout
from bench.storm.schedule import FaultKind, StormFault, Weather, forecast
from bench.storm.traffic import Seen, Shares, Traffic, make_questions, plan
from bench.storm.verdict import Counts, Pace, Truth, recoveries

NUM_QUESTIONS = 16
SETTLE_S = 60.0
WARM_UP = 8  # questions to each router before the storm
PATIENT = Retry(
    attempts=400, resumptions=400, lost=4, last_pause_s=1.0
)  # as long as a deadline allows
ENDED_S = 5.0  # for the processes of a stopped cluster to exit
UNHEALTHY = "the pool is unhealthy"
SETTINGS = (
    "[router]\nclient_stall_s = 5\n"  # so that stalled clients are disconnected within a storm
)


@dataclass(frozen=True)
class StormConfig:
    """Configuration of a storm.

    `timeout_s` is the deadline of each request, `adapters` a folder of adapters; `sink` takes the
    processes' lines.
    """

    weather: Weather
    seed: int
    model: Path
    layout: StormLayout
    adapters: Path | None
    shares: Shares
    rate: float = 8.0
    timeout_s: float = 30.0
    sink: Callable[[str, str], None] = lambda name, line: None

    def cluster(self, equipment: Equipment) -> ClusterConfig:
        (settings := equipment.folder / "settings.toml").write_text(SETTINGS)
        return ClusterConfig(
            model=self.model,
            **self.layout.pools,
            routers=2,
            listen="127.0.0.1:0",
            worker_flags=(
                *self.layout.flags_of_workers(equipment.folder),
                *equipment.server.worker_flags,
            ),
            router_flags=(*self.layout.router_flags, *equipment.clients.router_flags),
            config_file=settings,
            adapters=None if equipment.adapters is None else equipment.adapters.folder,
            stop_grace_s=5,
            places=equipment.places,
        )


@dataclass
class Storm:
    """Results of a storm, with times of `time.monotonic`.

    `untried` are the kinds of faults that this machine does not permit.
    """

    faults: list[StormFault] = field(default_factory=list)
    untried: frozenset[FaultKind] = frozenset()
    requests: list[Seen] = field(default_factory=list)
    truths: Sequence[Truth] = ()
    start_s: float = 0.0
    end_s: float = 0.0
    held: leaks.StillHeld = leaks.UNKNOWN
    settled_s: float = 0.0
    num_descriptors: int = 0
    num_processes: int = 0
    num_unhealthy: int = 0  # log lines about broken invariants

    @property
    def counts(self) -> Counts:
        return Counts.of(self.requests, self.truths)

    @property
    def calm_share(self) -> float:
        """Return the share of running requests that were at pace before the first fault."""
        first_s = min([fault.at_s for fault in self.faults], default=self.end_s - self.start_s)
        return Pace(self.requests).mean(self.start_s, self.start_s + first_s)

    @cached_property
    def recoveries_s(self) -> list[float]:
        """Return the recovery time of each fault that is over."""
        return recoveries(Pace(self.requests), self.faults, self.start_s, self.end_s)

    @property
    def num_leaked(self) -> int:
        """Return the number of leaks.

        They are pages, slots, sessions, requests, missing workers, descriptors and processes. A pool
        with a broken invariant is one, too: it ends, and another process releases what it holds.
        """
        return self.held.total + self.num_descriptors + self.num_processes + self.num_unhealthy

    def shown(self, line: str) -> None:
        """Look at a line of a process's log."""
        self.num_unhealthy += UNHEALTHY in line


async def run_storm(config: StormConfig) -> Storm:
    """Run a storm, or raise BatonError if the cluster fails before it begins."""
    storm = Storm()
    mark = uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory(prefix="storm-") as name,
        SmallDisk(Path(name) / "disk") as disk,
        StormServer(Path(name) / "server", is_wanted=config.layout.has_server) as server,
    ):
        with _environment(**{leaks.MARK: mark}), _temporary_files_in(disk.folder):
            await _run(config, storm, _equipment(config, Path(name), disk, server))
        storm.num_processes = await _left_running(mark)
    return storm


def _equipment(
    config: StormConfig, folder: Path, disk: SmallDisk, server: StormServer
) -> Equipment:
    return Equipment(
        folder,
        StormPlaces(folder),
        disk,
        StormClients(config.layout.clients, config.layout.limits, folder / "clients"),
        None if config.adapters is None else StormAdapters(config.adapters, folder / "adapters"),
        server,
    )


async def _run(config: StormConfig, storm: Storm, equipment: Equipment) -> None:
    def sink(name: str, line: str) -> None:
        storm.shown(line)
        config.sink(name, line)

    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            LocalCluster(config.cluster(equipment), sink=sink)
        )
        askers = [
            await stack.enter_async_context(
                AsyncBatonClient(*cluster.addresses, security=security, retry=PATIENT)
            )
            for security in equipment.clients.clients
        ]
        clients = [
            await stack.enter_async_context(
                AsyncBatonClient(address, security=equipment.clients.operator)
            )
            for address in cluster.addresses
        ]
        questions = make_questions(
            await clients[0].model_info(),
            NUM_QUESTIONS,
            seed=config.seed,
            adapters=() if equipment.adapters is None else equipment.adapters.names,
            has_all_features=config.layout.has_all_features,
        )
        warm_up = asyncio.gather(*(_warm_up(client, questions[:WARM_UP]) for client in clients))
        arithmetic = config.layout.arithmetic
        storm.truths = (
            await truth.truths(config.model, questions, arithmetic=arithmetic)
            if equipment.adapters is None
            else await equipment.adapters.truths(config.model, questions, arithmetic)
        )
        await warm_up
        before = leaks.descriptors(cluster)
        traffic = Traffic(askers, questions, config.timeout_s)
        await _blow(config, storm, traffic, Injector(cluster, equipment))
        storm.held = await leaks.settled(clients, SETTLE_S)
        storm.settled_s = time.monotonic() - storm.end_s
        storm.num_descriptors = leaks.grown(before, leaks.descriptors(cluster))


async def _warm_up(client: AsyncBatonClient, questions: Sequence[Query]) -> None:
    """Ask one after the other, because a router may let only few requests wait."""
    for question in questions:
        await client.complete(question, timeout_s=60)


async def _blow(config: StormConfig, storm: Storm, traffic: Traffic, injector: Injector) -> None:
    """Send all requests during the faults."""
    storm.untried = config.weather.kinds - injector.possible
    storm.faults = [
        fault
        for fault in forecast(config.weather, injector.processes, seed=config.seed)
        if fault.kind not in storm.untried
    ]
    planned = plan(
        config.weather.seconds, config.rate, NUM_QUESTIONS, config.shares, seed=config.seed
    )
    storm.requests, storm.start_s = traffic.seen, time.monotonic()
    faults = asyncio.create_task(injector.run(storm.faults, storm.start_s))
    try:
        await asyncio.gather(traffic.run(planned, storm.start_s), faults)
    finally:
        faults.cancel()
        injector.heal()
    storm.end_s = time.monotonic()


async def _left_running(mark: str) -> int:
    """Return the number of processes that outlive their cluster."""
    until_s = time.monotonic() + ENDED_S
    while (left := leaks.marked(mark)) and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return len(left)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for processes that start in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Place temporary files of this process and its children in `folder`."""
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        with _environment(TMPDIR=str(folder)):
            yield
    finally:
        tempfile.tempdir = before

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
from bench.storm.faults import Injector, SmallDisk, StormPlaces
from bench.storm.layouts import StormLayout
from bench.storm.schedule import FaultKind, StormFault, Weather, forecast
from bench.storm.traffic import Seen, Shares, Traffic, make_questions, plan
from bench.storm.verdict import Counts, Pace, Truth, recoveries

NUM_QUESTIONS = 16
SETTLE_S = 60.0
WARM_UP = 8  # questions to each router before the storm
PATIENT = Retry(
    attempts=40, resumptions=40, lost=4, last_pause_s=1.0
)  # as long as a deadline allows
ENDED_S = 5.0  # for the processes of a stopped cluster to exit
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

    def cluster(
        self, places: StormPlaces, settings: Path, adapters: StormAdapters | None
    ) -> ClusterConfig:
        return ClusterConfig(
            model=self.model,
            **self.layout.pools,
            routers=2,
            listen="127.0.0.1:0",
            worker_flags=self.layout.flags_of_workers(settings.parent),
            router_flags=self.layout.router_flags,
            config_file=settings,
            adapters=None if adapters is None else adapters.folder,
            stop_grace_s=5,
            places=places,
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

        They are pages, slots, sessions, requests, missing workers, descriptors and processes.
        """
        return self.held.total + self.num_descriptors + self.num_processes


async def run_storm(config: StormConfig) -> Storm:
    """Run a storm, or raise BatonError if the cluster fails before it begins."""
    storm = Storm()
    mark = uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory(prefix="storm-") as name,
        SmallDisk(Path(name) / "disk") as disk,
    ):
        with _environment(**{leaks.MARK: mark}), _temporary_files_in(disk.folder):
            (settings := Path(name) / "settings.toml").write_text(SETTINGS)
            places = StormPlaces(Path(name))
            adapters = (
                None
                if config.adapters is None
                else StormAdapters(config.adapters, Path(name) / "adapters")
            )
            cluster = config.cluster(places, settings, adapters)
            await _run(config, storm, cluster, places, disk, adapters)
        storm.num_processes = await _left_running(mark)
    return storm


async def _run(
    config: StormConfig,
    storm: Storm,
    what: ClusterConfig,
    places: StormPlaces,
    disk: SmallDisk,
    adapters: StormAdapters | None,
) -> None:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(what, sink=config.sink))
        asker = await stack.enter_async_context(AsyncBatonClient(*cluster.addresses, retry=PATIENT))
        clients = [
            await stack.enter_async_context(AsyncBatonClient(address))
            for address in cluster.addresses
        ]
        questions = make_questions(
            await clients[0].model_info(),
            NUM_QUESTIONS,
            seed=config.seed,
            adapters=() if adapters is None else adapters.names,
        )
        warm_up = asyncio.gather(
            *(
                client.complete(question, timeout_s=60)
                for question in questions[:WARM_UP]
                for client in clients
            )
        )
        storm.truths = await asyncio.to_thread(_truths, config.model, questions, adapters)
        await warm_up
        before = leaks.descriptors(cluster)
        storm.untried = frozenset() if disk.is_there else config.weather.kinds & {FaultKind.DISK}
        storm.faults = [
            fault
            for fault in forecast(config.weather, sorted(cluster.processes), seed=config.seed)
            if fault.kind not in storm.untried
        ]
        traffic = Traffic(asker, questions, config.timeout_s)
        storm.requests, storm.start_s = traffic.seen, time.monotonic()
        injector = Injector(cluster, places, disk, adapters)
        planned = plan(
            config.weather.seconds, config.rate, len(questions), config.shares, seed=config.seed
        )
        faults = asyncio.create_task(injector.run(storm.faults, storm.start_s))
        try:
            await asyncio.gather(traffic.run(planned, storm.start_s), faults)
        finally:
            faults.cancel()
            injector.heal()
        storm.end_s = time.monotonic()
        storm.held = await leaks.settled(clients, SETTLE_S)
        storm.settled_s = time.monotonic() - storm.end_s
        storm.num_descriptors = leaks.grown(before, leaks.descriptors(cluster))


def _truths(
    model: Path, questions: Sequence[Query], adapters: StormAdapters | None
) -> Sequence[Truth]:
    if adapters is None:
        return truth.truths(model, questions)
    return adapters.truths(model, questions)


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

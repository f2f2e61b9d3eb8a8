"""Edges of a cluster, cut one after another under load, each for some seconds, and restored."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig
from baton.cluster_plan import ClusterPlan
from baton.fork_server import ProcessPlaces
from baton.retry import Retry
from baton.values import Query
from bench.storm import leaks, truth
from bench.storm.layouts import DRAIN, StormLayout
from bench.storm.traffic import Shares, Traffic, make_questions, plan
from bench.storm.verdict import Counts, Fate, Truth, stalls
from tests.support.network.hosts import Network

NUM_QUESTIONS = 12
# of load before a cut and after it is restored
LEAD_S = 1.0
TAIL_S = 2.0
SETTLE_S = 60.0
BETWEEN_HOSTS = ("--transport", "tcp", "--transport-interface", "eth0")


class Edge(StrEnum):
    """Ends of a cut edge; always the first process of each role."""

    ROUTER_PREFILL = "router-prefill"
    ROUTER_DECODE = "router-decode"
    PREFILL_DECODE = "prefill-decode"
    STAGE_STAGE = "stage-stage"

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the pairs of processes, from one end to the other."""
        return {
            Edge.ROUTER_PREFILL: (("router", "prefill-0"),),
            Edge.ROUTER_DECODE: (("router", "decode-0.0"),),
            Edge.PREFILL_DECODE: (("prefill-0", "decode-0.0"), ("prefill-0", "decode-0.1")),
            Edge.STAGE_STAGE: (("decode-0.0", "decode-0.1"),),
        }[self]


class Way(StrEnum):
    """Direction of lost packets; on an edge of the router, back loses the worker's reports."""

    BOTH = "both"
    THERE = "there"
    BACK = "back"

    def of(self, pair: tuple[str, str]) -> list[tuple[str, str]]:
        there = pair
        back = (pair[1], pair[0])
        return {Way.BOTH: [there, back], Way.THERE: [there], Way.BACK: [back]}[self]


@dataclass(frozen=True)
class ProcessPair:
    """Ends of a cut edge, by name."""

    first: str
    second: str

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return ((self.first, self.second),)

    def __str__(self) -> str:
        return f"{self.first}-{self.second}"


@dataclass(frozen=True)
class Cell:
    """One cut."""

    edge: Edge | ProcessPair
    way: Way
    seconds: float


@dataclass(frozen=True)
class CellResult:
    """Result of one cut.

    `longest_wait_s` is the longest wait of a client for its next message. `settled_s` is the time
    from the end of the last request until every worker serves and holds nothing.
    """

    cell: Cell
    counts: Counts
    longest_wait_s: float
    settled_s: float
    held: leaks.StillHeld
    num_restarts: int  # ended processes; a lost connection should end none
    failures: tuple[str, ...]

    @property
    def num_failed(self) -> int:
        """Return the requests without a right response."""
        return sum(count for fate, count in self.counts.fates.items() if fate is not Fate.RIGHT)


class Apart(ProcessPlaces):
    """Each process on its own host."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def host(self, name: str) -> str:
        return self._network.host(name)

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        return "bench.partition.child", (name, module, *arguments)


def plain_layout(pools: int) -> StormLayout:
    """Return this number of prefill workers, and of decode pools of two stages."""
    roles = {"prefill": pools, "decode": pools, "decode_pp": 2}
    return StormLayout(roles, DRAIN, DRAIN)


def process_names(model: Path, layout: StormLayout) -> list[str]:
    """Return the names of a layout's processes; the first one is the router."""
    plan = ClusterPlan(ClusterConfig(model=model, **layout.pools, listen="127.0.0.1:0"))
    return [*plan.router_names, *(spec.name for spec in plan.workers(Path()))]


@dataclass(frozen=True)
class Grid:
    """Running cluster whose edges can be cut."""

    network: Network
    client: AsyncBatonClient
    cluster: LocalCluster
    questions: Sequence[Query]
    truths: Sequence[Truth]
    rate: float
    timeout_s: float

    async def run(self, cell: Cell, *, seed: int) -> CellResult:
        """Cut the edge; return when all requests have ended and the cluster is clean, or after
        `SETTLE_S`."""
        starts = self._num_starts
        traffic = Traffic([self.client], self.questions, self.timeout_s)
        planned = plan(
            LEAD_S + cell.seconds + TAIL_S,
            self.rate,
            len(self.questions),
            Shares(0.0, 0.0, 0.0),
            seed=seed,
        )
        load = asyncio.create_task(traffic.run(planned, time.monotonic()))
        try:
            await asyncio.sleep(LEAD_S)
            for pair in cell.edge.pairs:
                for source, destination in cell.way.of(pair):
                    self.network.cut(source, destination)
            await asyncio.sleep(cell.seconds)
        finally:
            self.network.mend()
            await load
        ended_s = time.monotonic()
        held = await leaks.settled([self.client], SETTLE_S)
        waits = [end - begin for seen in traffic.seen for begin, end in stalls(seen)]
        failures = tuple(
            f"{seen.error}: {seen.text}" for seen in traffic.seen if seen.error is not None
        )
        return CellResult(
            cell,
            Counts.of(traffic.seen, self.truths),
            max(waits, default=0.0),
            time.monotonic() - ended_s,
            held,
            self._num_starts - starts,
            failures,
        )

    @property
    def _num_starts(self) -> int:
        return sum(process.num_starts for process in self.cluster.processes.values())


@asynccontextmanager
async def grid(
    model: Path,
    layout: StormLayout,
    *,
    retry: Retry,
    rate: float,
    timeout_s: float,
    seed: int,
    sink: Callable[[str, str], None],
) -> AsyncIterator[Grid]:
    """Run a router and the layout's workers, on a host per process."""
    with (
        Network(process_names(model, layout)) as network,
        tempfile.TemporaryDirectory(prefix="partition-") as folder,
    ):
        places = Apart(network)
        config = ClusterConfig(
            model=model,
            **layout.pools,
            listen=f"{places.host('router')}:0",
            worker_flags=(*layout.flags_of_workers(Path(folder)), *BETWEEN_HOSTS),
            router_flags=layout.router_flags,
            stop_grace_s=5,
            places=places,
        )
        async with (
            LocalCluster(config, sink=sink) as cluster,
            AsyncBatonClient(cluster.address, retry=retry) as client,
        ):
            questions = make_questions(
                await client.model_info(),
                NUM_QUESTIONS,
                seed=seed,
                has_all_features=layout.has_all_features,
            )
            warm_up = asyncio.gather(
                *(client.complete(question, timeout_s=60) for question in questions)
            )
            truths = await truth.truths(model, questions, arithmetic=layout.arithmetic)
            await warm_up
            yield Grid(network, client, cluster, questions, truths, rate, timeout_s)

"""Cost of a local cluster's processes: core seconds by role, for an amount of work. Needs Linux."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.load import Outcome
from baton.load_run import run_load
from baton.values import ModelInfo
from baton.workload import Arrivals, Planned, Shape, make_queries, plan
from bench.pool_metrics import port_of, scrape
from runtime.errors import ConfigError

PREFILL, DECODE, OTHERS = (
    "prefill",
    "decode",
    "others",
)  # last: routers and the client program
MOST_PER_S = 100.0  # requests prepared for one turn
SETTLE_S = 0.3  # from the last response until its processing has ended
_STEPS = "baton_pp_step_seconds_count"


@dataclass(frozen=True)
class Asked:
    """Requests of one turn with their responses in any order, and the duration."""

    planned: Sequence[Planned]
    outcomes: Sequence[Outcome]
    seconds: float


@dataclass(frozen=True)
class ClosedLoad:
    """Closed loop: a number of concurrent requests of a shape, for some time."""

    shape: Shape
    at_once: int
    seconds: float

    async def ask(self, client: AsyncBatonClient, info: ModelInfo, seed: int) -> Asked:
        planned = plan(
            round(MOST_PER_S * self.seconds), Arrivals(rate=MOST_PER_S), self.shape, seed=seed
        )
        left = iter(list(zip(planned, make_queries(info, planned, seed=seed), strict=True)))
        asked = list[Planned]()
        outcomes = list[Outcome]()
        began_s = time.monotonic()

        async def one_after_the_other() -> None:
            while (
                time.monotonic() < began_s + self.seconds
                and (following := next(left, None)) is not None
            ):
                asked.append(following[0])
                outcomes.extend(await run_load(client, [following[1]], [0.0]))

        await asyncio.gather(*(one_after_the_other() for _ in range(self.at_once)))
        return Asked(asked, outcomes, time.monotonic() - began_s)


@dataclass(frozen=True)
class OpenLoad:
    """Open loop: requests of a shape at a rate, for some time."""

    shape: Shape
    rate: float
    seconds: float

    async def ask(self, client: AsyncBatonClient, info: ModelInfo, seed: int) -> Asked:
        planned = plan(
            max(2, round(self.rate * self.seconds)), Arrivals(rate=self.rate), self.shape, seed=seed
        )
        queries = make_queries(info, planned, seed=seed)
        began_s = time.monotonic()
        outcomes = await run_load(client, queries, [item.at_s for item in planned])
        return Asked(planned, outcomes, time.monotonic() - began_s)


@dataclass(frozen=True)
class Spent:
    """Cost of some requests.

    `sampled`: output tokens except first ones; `chunks` and `rounds`: steps of prefill and decode
    pools; `core_s`: by role.
    """

    requests: int
    prompt_tokens: int
    sampled: int
    chunks: float
    rounds: float
    core_s: Mapping[str, float]


@dataclass(frozen=True)
class _CostCounts:
    core_s: Mapping[str, float]
    steps: Mapping[str, float]


class Meter:
    """Meter of a running cluster and of this program."""

    def __init__(self, pids: Mapping[str, int], ports: Mapping[str, int]) -> None:
        self._pids = {**pids, OTHERS: os.getpid()}
        self._ports = ports

    @classmethod
    async def of(cls, cluster: LocalCluster) -> "Meter":
        """Return a meter, or raise ConfigError if the system does not show processes' CPU time."""
        if sys.platform != "linux":
            raise ConfigError(
                "what processes spend is read from /proc, which Linux has", field="cluster"
            )
        pids = {
            name: process.pid
            for name, process in cluster.processes.items()
            if process.pid is not None
        }
        return cls(
            pids, {name: await port_of(cluster, name) for name in pids if _role(name) != OTHERS}
        )

    async def spent(
        self, client: AsyncBatonClient, info: ModelInfo, load: ClosedLoad | OpenLoad, seed: int
    ) -> tuple[Spent, Asked]:
        """Run a load and return its cost, or raise InternalError if a request fails."""
        before = await self._read()
        asked = await load.ask(client, info, seed)
        await asyncio.sleep(SETTLE_S)
        after = await self._read()
        failed = [outcome.error for outcome in asked.outcomes if outcome.error is not None]
        assert not failed, failed[0]
        return Spent(
            len(asked.planned),
            sum(item.prompt_tokens for item in asked.planned),
            sum(item.output_tokens - 1 for item in asked.planned),
            after.steps[PREFILL] - before.steps[PREFILL],
            after.steps[DECODE] - before.steps[DECODE],
            {role: after.core_s[role] - before.core_s[role] for role in after.core_s},
        ), asked

    async def _read(self) -> _CostCounts:
        core_s = dict.fromkeys((PREFILL, DECODE, OTHERS), 0.0)
        steps = dict.fromkeys((PREFILL, DECODE), 0.0)
        for name, port in self._ports.items():
            steps[_role(name)] += (await asyncio.to_thread(scrape, port)).value(_STEPS)
        for name, pid in self._pids.items():
            core_s[_role(name)] += _core_s(pid)
        return _CostCounts(core_s, steps)


def _role(name: str) -> str:
    role = name.partition("-")[0]
    return role if role in (PREFILL, DECODE) else OTHERS


def _core_s(pid: int) -> float:
    """Return the core seconds of all threads that a process has, and had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

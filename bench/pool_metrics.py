"""Metrics of a pool, as benchmarks read them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from baton.cluster import LocalCluster
from testing.past_proxies import local_page

PATHS = ("target", "draft_extend", "draft_round")


@dataclass(frozen=True)
class PoolPorts:
    """Metrics ports of a pool's stages, by rank."""

    ports: tuple[int, ...]

    async def leader(self) -> "Figures":
        return await asyncio.to_thread(scrape, self.ports[0])

    async def last_stage(self) -> "Figures":
        return await asyncio.to_thread(scrape, self.ports[-1])


@dataclass(frozen=True)
class Figures:
    """Samples by name and labels at one moment."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum over the labels not given; 0 if there is no sample."""
        wanted = set(labels.items())
        return sum(
            value for (found, own), value in self.samples.items() if found == name and wanted <= own
        )

    def mean(self, histogram: str, **labels: str) -> float | None:
        """Return the mean, or None without observations."""
        count = self.value(f"{histogram}_count", **labels)
        return self.value(f"{histogram}_sum", **labels) / count if count else None

    def since(self, before: "Figures") -> "Figures":
        """Return the increase since `before`."""
        return Figures(
            {key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()}
        )


def scrape(port: int) -> Figures:
    text = local_page(f"http://127.0.0.1:{port}/metrics", timeout_s=5)
    samples = (
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    )
    return Figures(
        {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    )


async def decode_ports(cluster: LocalCluster) -> PoolPorts:
    """Return the ports of the first decode pool of a running cluster."""
    names = [name for name in cluster.processes if name.partition(".")[0] == "decode-0"]
    return PoolPorts(tuple([await port_of(cluster, name) for name in sorted(names)]))


async def port_of(cluster: LocalCluster, name: str) -> int:
    """Return the metrics port of a process of the cluster."""
    port = (await cluster.processes[name].announced(timeout_s=10)).metrics_port
    assert port is not None, "workers serve metrics"
    return port


def planner_calls(figures: Figures) -> dict[str, float]:
    """Return the calls per forward of the stage, by path."""
    forwards = figures.value("baton_pp_stage_step_seconds_count")
    return {
        path: figures.value("baton_plans_total", path=path) / forwards if forwards else 0.0
        for path in PATHS
    }

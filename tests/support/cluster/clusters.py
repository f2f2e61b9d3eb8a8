"""Real clusters for tests: real processes, real gRPC, real UCX, checkpoints from disk."""

import asyncio
import atexit
import os
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig
from baton.fork_server import HERE, ForkServer, ProcessPlaces
from baton.values import ClusterStatus, WorkerStatus
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity

READY_TIMEOUT_S = 120.0


@cache
def shared_fork_server() -> ForkServer:
    """Share one fork server between all clusters of this process, so that torch is loaded once."""
    fork_server = ForkServer()
    atexit.register(fork_server.close)
    return fork_server


@dataclass
class RunningCluster:
    """A serving cluster with a client, and its last log lines for failures that need explaining."""

    cluster: LocalCluster
    client: AsyncBatonClient
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=2000))

    async def workers(self, role: str) -> list[WorkerStatus]:
        return [
            worker for worker in (await self.client.cluster_status()).workers if worker.role == role
        ]

    async def until(
        self, holds: Callable[[ClusterStatus], bool], what: str, timeout_s: float = 60
    ) -> ClusterStatus:
        """Return the first status for which `holds` is true."""
        status: ClusterStatus | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    status = await self.client.cluster_status()
                    if holds(status):
                        return status
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(
                f"not within {timeout_s} s: {what}; last {status}\n{self.log_tail()}"
            ) from None

    async def until_clean(self, timeout_s: float = 60) -> ClusterStatus:
        """Wait until all pages and slots are free, nothing is open or running, and all workers
        serve."""
        return await self.until(is_clean, "every page, slot and session is given back", timeout_s)

    def log_tail(self, count: int = 60) -> str:
        return "\n".join(list(self.lines)[-count:])

    async def metrics_port(self, name: str) -> int:
        announcement = await self.cluster.processes[name].announced(timeout_s=60)
        assert announcement.metrics_port is not None
        return announcement.metrics_port

    def resident_bytes(self) -> dict[str, int]:
        """Return the unshared memory of every process."""
        pids = {name: process.pid for name, process in self.cluster.processes.items()}
        return {
            name: psutil.Process(pid).memory_full_info().uss
            for name, pid in pids.items()
            if pid is not None
        }


def is_clean(status: ClusterStatus) -> bool:
    return (
        not status.running_requests
        and not status.waiting_requests
        and all(
            worker.serving
            and worker.pages_free == worker.pages_total
            and worker.slots_free == worker.slots_total
            and not worker.open_sessions
            and not worker.running_requests
            and not worker.queued_requests
            for worker in status.workers
        )
    )


@asynccontextmanager
async def running_cluster(
    model: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    worker: int = 0,
    worker_pp: int = 1,
    worker_tp: int = 1,
    worker_dp_attention: int = 1,
    prefill_pp: int = 1,
    decode_pp: int = 1,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    prefill_dp_attention: int = 1,
    decode_dp_attention: int = 1,
    prefill_partition: str = "",
    decode_partition: str = "",
    worker_flags: tuple[str, ...] = (),
    router_flags: tuple[str, ...] = (),
    http: str = "",
    aggregated: bool = False,
    adapters: Path | None = None,
    model_alias: tuple[str, ...] = (),
    places: ProcessPlaces = HERE,
    security: ChannelSecurity = PLAIN_CHANNEL,
    client_security: ChannelSecurity = PLAIN_CHANNEL,
    routers: int = 1,
    ready_timeout_s: float = READY_TIMEOUT_S,
) -> AsyncIterator[RunningCluster]:
    """Run a cluster inside the block; the client is that of the first router."""
    lines: deque[str] = deque(maxlen=2000)
    config = ClusterConfig(
        model=model,
        prefill=prefill,
        decode=decode,
        worker=worker,
        worker_pp=worker_pp,
        worker_tp=worker_tp,
        worker_dp_attention=worker_dp_attention,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_dp_attention=prefill_dp_attention,
        decode_dp_attention=decode_dp_attention,
        prefill_partition=prefill_partition,
        decode_partition=decode_partition,
        listen="127.0.0.1:0",
        routers=routers,
        worker_flags=worker_flags,
        router_flags=router_flags,
        http=http,
        aggregated=aggregated,
        adapters=adapters,
        model_alias=model_alias,
        ready_timeout_s=ready_timeout_s,
        stop_grace_s=5,
        security=security,
        fork_server=shared_fork_server(),
        places=places,
    )
    try:
        async with (
            LocalCluster(
                config, sink=lambda name, line: lines.append(f"{name:12} {line}")
            ) as cluster,
            AsyncBatonClient(cluster.address, security=client_security) as client,
        ):
            yield RunningCluster(cluster, client, lines)
    except BaseException:
        print("\n".join(lines))
        raise


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def scrape(port: int) -> dict[str, float]:
    """Return the largest sample of each of Baton's metric families."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        text = response.read().decode()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("baton_") and not family.name.endswith("_created"):
            samples = [sample.value for sample in family.samples]
            values[family.name] = max([values.get(family.name, 0.0), *samples])
    return values


def samples_of(port: int, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of this name by the values of their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        text = response.read().decode()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }

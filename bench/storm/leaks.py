"""Possible leaks of a storm: memory and sessions of workers, open files, processes."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.values import ClusterStatus
from runtime.errors import BatonError

SPARE_DESCRIPTORS = 10  # connections that open and close
PEER_DESCRIPTORS = 2  # of a connection over UCX, which opens with the first handoff to a peer
MARK = "BATON_STORM"  # in the environment of all processes of a storm


@dataclass(frozen=True)
class StillHeld:
    """Resources that idle workers hold, as a router sees them, summed over all workers."""

    pages: int
    slots: int
    sessions: int
    requests: int
    away: int  # workers that do not serve

    @property
    def total(self) -> int:
        return self.pages + self.slots + self.sessions + self.requests + self.away

    @property
    def is_clean(self) -> bool:
        return self.total == 0

    @classmethod
    def of(cls, status: ClusterStatus) -> "StillHeld":
        workers = status.workers
        return cls(
            sum(worker.pages_total - worker.pages_free for worker in workers),
            sum(worker.slots_total - worker.slots_free for worker in workers),
            sum(worker.open_sessions for worker in workers),
            status.running_requests
            + status.waiting_requests
            + sum(worker.running_requests + worker.queued_requests for worker in workers),
            sum(not worker.serving for worker in workers),
        )


UNKNOWN = StillHeld(0, 0, 0, 0, 1)  # an unreachable router counts as away


async def settled(clients: Sequence[AsyncBatonClient], timeout_s: float) -> StillHeld:
    """Return the held resources when every router sees none, or at the timeout."""
    held = UNKNOWN
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                seen = []
                for client in clients:
                    with suppress(BatonError):
                        seen.append(StillHeld.of(await client.cluster_status()))
                held = next((one for one in seen if not one.is_clean), held)
                if len(seen) == len(clients) and all(one.is_clean for one in seen):
                    return seen[0]
                await asyncio.sleep(0.1)
    return held


def descriptors(cluster: LocalCluster) -> dict[str, int]:
    """Return the number of open files of each process."""
    found = {}
    for name, process in cluster.processes.items():
        with suppress(FileNotFoundError):
            found[name] = len(os.listdir(f"/proc/{process.pid}/fd"))
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return the growth of open files beyond that of changing connections, and new ones to peers."""
    spare = SPARE_DESCRIPTORS + PEER_DESCRIPTORS * len(before)
    return sum(max(0, count - before.get(name, count) - spare) for name, count in after.items())


def marked(mark: str) -> list[int]:
    """Return the other processes that were started with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(folder.name)
            wanted = f"{MARK}={mark}".encode()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if (
                pid != os.getpid()
                and state != "Z"
                and wanted in (folder / "environ").read_bytes().split(b"\0")
            ):
                found.append(pid)
    return found

"""An idle cluster uses almost no CPU time."""

import asyncio
import time
from pathlib import Path

import psutil

from tests.support.cluster.clusters import RunningCluster, running_cluster

MAX_SHARE = 0.01  # of a core that adds as fast as ADDITIONS_S says, for each process
NUM_ADDITIONS, ADDITIONS_S = 1_000_000, 0.04
WINDOW_S, NUM_WINDOWS = (
    5.0,
    16,
)  # the cheapest window counts: what polls without end is cheap in none


def used_s(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def additions_s() -> float:
    began_s, total = time.process_time(), 0
    for number in range(NUM_ADDITIONS):
        total += number
    return time.process_time() - began_s


async def shares(running: RunningCluster) -> dict[str, float]:
    """Return the share of a core that each process uses while the cluster is idle.

    On a slower core, which needs more time for everything, it counts for less.
    """
    processes = {
        name: psutil.Process(process.pid) for name, process in running.cluster.processes.items()
    }
    before, began_s = used_s(processes), time.monotonic()
    await asyncio.sleep(WINDOW_S)
    slower = max(1.0, additions_s() / ADDITIONS_S)
    return {
        name: (after - before[name]) / (time.monotonic() - began_s) / slower
        for name, after in used_s(processes).items()
    }


async def test_an_idle_process_uses_less_than_a_hundredth_of_a_core(checkpoint: Path) -> None:
    async with running_cluster(checkpoint, prefill_pp=2, decode_pp=2) as running:
        await running.until_clean()
        least = await shares(running)
        for _ in range(NUM_WINDOWS - 1):
            if max(least.values()) < MAX_SHARE:
                break
            least = {
                name: min(share, least[name]) for name, share in (await shares(running)).items()
            }
        assert {name: share for name, share in least.items() if share >= MAX_SHARE} == {}

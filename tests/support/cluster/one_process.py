"""A whole cluster in the test's own process: the real roles over real gRPC and real UCX, without
the seconds that starting processes takes. Processes of their own, and their deaths, are in
`tests/support/cluster/clusters.py`."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import torch

from baton.client import AsyncBatonClient
from baton.retry import DEFAULT_RETRY, Retry
from decode.worker import DecodeRole
from pool.process import run_worker
from pool.role import PoolRole
from pool.stage.config import WorkerConfig
from prefill.worker import PrefillRole
from router.api.readiness import SERVICE
from router.app import serve
from router.config import RouterConfig
from runtime.process.announce import read_announcement
from runtime.process.supervision import StopSignal
from runtime.rpc.client import open_channel, wait_serving
from tests.support.cluster.clusters import is_clean
from tests.support.cluster.stuck import report_stuck_requests
from worker.config import RolesConfig
from worker.role import AggregatedRole

START_TIMEOUT_S = 120.0


@asynccontextmanager
async def cluster_in_process(
    checkpoint: Path,
    *,
    prefill_pp: int = 1,
    decode_pp: int = 1,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    worker_pp: int = 1,
    worker_tp: int = 1,
    prefill_partition: str = "",
    decode_partition: str = "",
    worker: Mapping[str, object] | None = None,
    num_workers: int = 1,
    other_prefill: tuple[int, int] | None = None,
    prefill: Mapping[str, object] = MappingProxyType({}),
    decode: Mapping[str, object] = MappingProxyType({}),
    router: Mapping[str, object] = MappingProxyType({}),
    retry: Retry = DEFAULT_RETRY,
    announced: Path | None = None,
    **settings: object,
) -> AsyncIterator[AsyncBatonClient]:
    """Yield a client of a serving cluster.

    `settings` are `WorkerConfig` fields for every stage; `prefill`, `decode` and `router` are those
    of one role only. With `worker`, `num_workers` pools of both roles replace those of one. `other_prefill` are
    the stages and ranks of each of a second prefill pool. `announced` is a folder where all announce
    themselves, as `decode-0.json` (role and rank). On leaving, all resources must have been
    released.
    """
    torch.set_num_threads(1)
    stop = StopSignal()
    tasks: list[asyncio.Task[None]] = []
    with tempfile.TemporaryDirectory() as own_folder:
        folder = announced or Path(own_folder)
        try:
            leaders: dict[str, list[str]] = {}
            pools: list[tuple[PoolRole, int, int, str, Mapping[str, object]]] = [
                (PrefillRole(), prefill_pp * prefill_tp, prefill_tp, prefill_partition, prefill),
                (DecodeRole(), decode_pp * decode_tp, decode_tp, decode_partition, decode),
            ]
            if other_prefill is not None:
                pp, tp = other_prefill
                pools.append((PrefillRole(), pp * tp, tp, "", prefill))
            if worker is not None:
                pools = [(AggregatedRole(), worker_pp * worker_tp, worker_tp, "", worker)]
                pools *= num_workers
            for role, size, tp, partition, own in pools:
                pool = (RolesConfig if worker is not None else WorkerConfig).model_validate(
                    {
                        "model": checkpoint,
                        "drain_s": 0.5,
                        **settings,
                        **own,
                        "world_size": size,
                        "tp": tp,
                        "partition": partition,
                    }
                )
                number = len(leaders.get(next(iter(role.services)), ()))
                leader = await _start_pool(role, pool, folder / str(number or ""), tasks, stop)
                for service in role.services:
                    leaders.setdefault(service, []).append(leader)
            config = RouterConfig.model_validate(
                {
                    "model": checkpoint,
                    "prefill": tuple(leaders["prefill"]),
                    "decode": tuple(leaders["decode"]),
                    "listen": "127.0.0.1:0",
                    "announce": folder / "router.json",
                    "drain_s": 0.5,
                    **router,
                }
            )
            tasks.append(asyncio.create_task(serve(config, stop)))
            address = await _announced(folder / "router.json", tasks)
            async with open_channel(address) as channel:
                await wait_serving(
                    channel, SERVICE, timeout_s=START_TIMEOUT_S
                )  # and its warm-up out of the way
            watching = asyncio.create_task(report_stuck_requests())
            try:
                async with AsyncBatonClient(address, retry=retry) as client:
                    await _until_clean(client)  # the router serves with the first pools
                    yield client
                    await _until_clean(client)
            finally:
                watching.cancel()
        finally:
            stop.set("the test is over")
            # All of them, also where one has failed: a loop that closes under the others leaves
            # their threads in UCX, and what they use is taken from under them.
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                task.result()


async def _start_pool(
    role: PoolRole,
    config: WorkerConfig,
    folder: Path,
    tasks: list[asyncio.Task[None]],
    stop: StopSignal,
) -> str:
    """Start a pool; return the address of its leader."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 (a test's folder)
    leader = ""
    for rank in range(config.world_size):
        announce = folder / f"{role.name}-{rank}.json"
        stage = config.model_copy(update={"rank": rank, "leader": leader, "announce": announce})
        stage.check()
        tasks.append(asyncio.create_task(run_worker(stage, role, stop)))
        address = await _announced(announce, tasks)
        leader = leader or address
    return leader


async def _announced(path: Path, tasks: list[asyncio.Task[None]]) -> str:
    async with asyncio.timeout(START_TIMEOUT_S):
        while (announcement := read_announcement(path)) is None:
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
    return announcement.address


async def _until_clean(client: AsyncBatonClient) -> None:
    """Wait until every worker serves and all resources are released."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not is_clean(await client.cluster_status()):  # noqa: ASYNC110 (gRPC gives no event)
            await asyncio.sleep(0.02)

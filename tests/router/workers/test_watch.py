"""A router that misses a prefix-cache report requests a full one: it restarts the watch."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from router.workers.watch import follow_stream, watch_worker
from router.workers.worker import Worker, WorkerRole
from runtime.rpc.client import ChannelOptions
from runtime.rpc.redial import RedialingChannel
from runtime.security.access import PLAIN_CHANNEL
from tests.router.harness import FACTS, eventually, worker_info
from tests.support.network.names import NameServer
from tests.support.router.fake_workers import CachelessWorker

Context = grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse]
NAMES = [bytes([number]) * 16 for number in range(2)]


class ScriptedWorker(CachelessWorker):
    """A worker whose first stream sends `script`, and every other one a full report of both
    names."""

    def __init__(self, script: Sequence[pb.WatchResponse]) -> None:
        self._scripts = [script]
        self.num_streams = 0

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        self.num_streams += 1
        yield pb.WatchResponse(info=worker_info(WorkerRole.PREFILL))
        whole = (cache(0, *NAMES, whole=True), load(1))
        for response in self._scripts.pop() if self._scripts else whole:
            yield response
        await asyncio.Event().wait()


def cache(number: int, *stored: bytes, whole: bool = False) -> pb.WatchResponse:
    return pb.WatchResponse(
        cache=pb.CacheReport(number=number, stored=b"".join(stored), whole=whole)
    )


def load(cache_reports: int) -> pb.WatchResponse:
    return pb.WatchResponse(load=pb.WorkerLoad(serving=True, cache_reports=cache_reports))


@pytest.mark.parametrize(
    ("script", "num_streams"),
    [
        ((cache(0, NAMES[0], whole=True), load(1), cache(1, NAMES[1]), load(2)), 1),
        ((cache(0, NAMES[0], whole=True), load(1), cache(2, NAMES[1])), 2),
        ((cache(0, NAMES[0], whole=True), load(1), load(2)), 2),
        ((load(1),), 2),
    ],
    ids=["nothing is missing", "one between", "the last", "the first"],
)
async def test_a_missing_report_is_noticed(
    script: Sequence[pb.WatchResponse], num_streams: int
) -> None:
    server, scripted = grpc.aio.server(), ScriptedWorker(script)
    worker_pb2_grpc.add_WorkerServicer_to_server(scripted, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker = Worker(
        WorkerRole.PREFILL, address, grpc.aio.insecure_channel(address), lambda: None, lambda: None
    )
    watching = asyncio.create_task(
        watch_worker(worker, FACTS, 0.05, random.Random(0), follow_stream)
    )
    try:
        await eventually(
            lambda: worker.caches.memory.depths(NAMES) == {address: 2} and worker.is_usable,
            "a missing report",
        )
        assert scripted.num_streams == num_streams
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await worker.channel.close()
        await server.stop(None)


@pytest.mark.parametrize("answers", ["another role", "another worker's incarnation"])
async def test_a_name_served_by_another_worker_is_looked_up_again(answers: str) -> None:
    """A worker that was given the address that the named one had before does not keep the name."""
    role = WorkerRole.DECODE if answers == "another role" else WorkerRole.PREFILL
    with NameServer() as names:
        names.answers["prefill.test"] = ["127.0.0.2"]
        async with (
            _watched_worker("127.0.0.2", role, "theirs") as port,
            _watched_worker("127.0.0.3", WorkerRole.PREFILL, "ours", port),
        ):
            target, options = (
                f"dns://{names.address}/prefill.test:{port}",
                ChannelOptions().as_grpc(),
            )
            channel = RedialingChannel(
                PLAIN_CHANNEL, lambda _: grpc.aio.insecure_channel(target, options), is_named=True
            )
            worker = Worker(
                WorkerRole.PREFILL, f"prefill.test:{port}", channel, lambda: None, lambda: None
            )
            if role is WorkerRole.PREFILL:
                worker.stand_in_for(
                    "127.0.0.2:1"
                )  # as `WorkerSet` does for one that it knows by this address
            watching = asyncio.create_task(
                watch_worker(worker, FACTS, 0.05, random.Random(0), follow_stream)
            )
            try:
                await eventually(lambda: worker.incarnation == "theirs", "no report")
                names.answers["prefill.test"] = ["127.0.0.3"]
                await eventually(
                    lambda: worker.incarnation == "ours", "the other worker", within_s=6
                )
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await channel.close()


class Named(CachelessWorker):
    """A worker that sends its info and that it serves."""

    def __init__(self, role: WorkerRole, incarnation: str) -> None:
        self._info = worker_info(role, incarnation=incarnation)

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        yield pb.WatchResponse(info=self._info)
        while True:
            yield load(0)
            await asyncio.sleep(request.interval_s)


@asynccontextmanager
async def _watched_worker(
    host: str, role: WorkerRole, incarnation: str, port: int = 0
) -> AsyncIterator[int]:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(Named(role, incarnation), server)
    port = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    yield port
    await server.stop(None)

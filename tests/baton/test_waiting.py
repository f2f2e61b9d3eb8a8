"""Reasons that processes of a local cluster report while they do not serve."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from baton import waiting
from baton.process import ProcessSpec, RoleProcess
from baton.waiting import reason_of, until_cluster_serves
from protos import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime.errors import UnavailableError
from runtime.observe.metrics.calls import RpcMetrics
from runtime.process.announce import Announcement, write_announcement
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.security.access import OPEN_SERVER, PLAIN_CHANNEL, ChannelSecurity, ServerSecurity
from tests.support.network.authority import Authority
from tests.support.router.fake_workers import CachelessWorker
from tests.support.router.generation import EchoGeneration

SERVICES = {
    "prefill": "baton.v1.Prefill",
    "decode": "baton.v1.Decode",
    "router": "baton.v1.Generation",
}


class Waiting(CachelessWorker):
    """A leader whose pool has not formed."""

    async def Watch(
        self,
        request: worker_pb2.WatchRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        yield worker_pb2.WatchResponse(info=worker_pb2.WorkerInfo(role="decode"))
        yield worker_pb2.WatchResponse(
            load=worker_pb2.WorkerLoad(reason="waiting for 1 more stages to join")
        )


def process_of(folder: Path, role: str, *, leads: bool = True) -> RoleProcess:
    async def never(announcement: Announcement) -> None:
        raise UnavailableError("it does not")

    spec = ProcessSpec(
        f"{role}-0", role, (), "127.0.0.1:0", None, folder / "announced.json", leads=leads
    )
    return RoleProcess(spec, lambda name, line: None, never)


@asynccontextmanager
async def announced(
    folder: Path, role: str, security: ServerSecurity = OPEN_SERVER, *, serves: bool = False
) -> AsyncIterator[RoleProcess]:
    """Announce a process that listens."""
    server = GrpcServer(
        ServerOptions(listen="127.0.0.1:0"),
        services=(SERVICES[role],),
        security=security,
        metrics=RpcMetrics.create(CollectorRegistry()),
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(Waiting(), server.grpc)
    generation_pb2_grpc.add_GenerationServicer_to_server(EchoGeneration(), server.grpc)
    process = process_of(folder, role)
    address = await server.start()
    if serves:
        await server.health.set_serving(SERVICES[role])
    write_announcement(process.spec.announce, Announcement(address, None, 1, "x"))
    try:
        yield process
    finally:
        await server.drain(grace_s=0)


async def test_a_leader_reports_the_stages_its_pool_lacks(tmp_path: Path) -> None:
    async with announced(tmp_path, "decode") as process:
        assert await reason_of(process, PLAIN_CHANNEL) == "waiting for 1 more stages to join"


async def test_a_router_reports_unusable_workers(tmp_path: Path) -> None:
    async with announced(tmp_path, "router") as process:
        assert await reason_of(process, PLAIN_CHANNEL) == "decode 127.0.0.1:1: warming up"


async def test_certificates_that_do_not_fit_are_the_reason(tmp_path: Path) -> None:
    authority = Authority()
    stranger = ChannelSecurity(Authority("other").store(tmp_path / "stranger", "operator"))
    security = ServerSecurity(authority.store(tmp_path / "prefill", "prefill"))
    async with announced(tmp_path, "prefill", security) as process:
        reason = await reason_of(process, stranger)
        assert reason.startswith("cannot be asked: 127.0.0.1:")
        assert reason.endswith(": its certificate is not signed by an authority in tls_ca")
        await process.announced(timeout_s=10)
        with pytest.raises(
            UnavailableError,
            match=r"^prefill-0: baton.v1.Prefill is not serving after 1 s: .* its "
            r"certificate is not signed by an authority in tls_ca",
        ):
            await until_cluster_serves(process, stranger, timeout_s=1)
        # A certificate of the authority, though of none that may see a worker's load: its health is
        # for all.
        client = ChannelSecurity(authority.store(tmp_path / "client", "client"))
        assert await reason_of(process, client) == ""


async def test_serving_and_unreachable_processes_are_not_reported(tmp_path: Path) -> None:
    assert await reason_of(process_of(tmp_path, "prefill"), PLAIN_CHANNEL) == ""
    async with announced(tmp_path, "prefill", serves=True) as process:
        assert await reason_of(process, PLAIN_CHANNEL) == ""


async def test_unresponsive_processes_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "ASK_S", 0.3)
    process = process_of(tmp_path, "prefill")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_announcement(
            process.spec.announce, Announcement("{}:{}".format(*silent.getsockname()), None, 1, "x")
        )
        assert await reason_of(process, PLAIN_CHANNEL) == "does not respond"

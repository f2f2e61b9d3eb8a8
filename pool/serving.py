"""The gRPC server of a pool's process, with its health, its metrics and its announced address."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pool.role import PoolRole
from pool.stage.config import WorkerConfig
from pool.stage.stage import Stage
from runtime.errors import InternalError
from runtime.observe.exposition import Exposition
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.metrics.stages import RefusalMetrics
from runtime.observe.tracing import Tracing
from runtime.process.announce import Announcement, write_announcement
from runtime.process.supervision import StopSignal
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.security.access import PeerRole, ServerSecurity
from runtime.security.certificates import CertificateStore
from transfer.agent.agent import TransferAgent

logger = logging.getLogger(__name__)

PIPELINE_SERVICE = "baton.v1.Pipeline"
ENDLESS_METHODS = frozenset(
    {
        "/baton.v1.Worker/Watch",
        "/baton.v1.Pipeline/Join",
        "/baton.v1.Prefill/Serve",
        "/baton.v1.Decode/Serve",
    }
)


@dataclass(frozen=True)
class PoolProcess:
    """The components that a leader and a follower are built from."""

    config: WorkerConfig
    role: PoolRole
    stage: Stage
    registry: CollectorRegistry
    refusals: RefusalMetrics
    incarnation: str
    stop: StopSignal
    certificates: CertificateStore | None
    tracing: Tracing

    @property
    def peer_role(self) -> PeerRole:
        """Return the TLS role of this process and of the other stages of its pool."""
        return PeerRole(next(iter(self.role.services)))


class HealthSetter:
    """Setter of the services' health for code that cannot await."""

    def __init__(self, server: GrpcServer, services: tuple[str, ...]) -> None:
        self._health = server.health
        self._services = services
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, serving: bool) -> None:  # noqa: FBT001 - a listener's signature
        setter = self._health.set_serving if serving else self._health.set_not_serving
        for service in self._services:
            task = asyncio.create_task(setter(service))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def make_server(process: PoolProcess, services: tuple[str, ...]) -> GrpcServer:
    config = process.config
    # Each request takes the place of a call, whichever router sent it. So the server's limit is
    # raised by what the pool takes, and clients meet the pool's own limits first.
    num_taken = config.dp_attention * (process.stage.plan.max_held + config.max_queued)
    options = ServerOptions(
        listen=config.listen,
        health_listen=config.health_listen,
        write_s=config.caller_stall_s,
        max_calls=ServerOptions.max_calls + num_taken,
    )
    return GrpcServer(
        options,
        services=services,
        metrics=RpcMetrics.create(process.registry),
        background_methods=ENDLESS_METHODS,
        security=ServerSecurity(process.certificates, pool=process.peer_role),
        tracing=process.tracing,
    )


@asynccontextmanager
async def listening(process: PoolProcess, server: GrpcServer) -> AsyncIterator[None]:
    """Serve gRPC and metrics for the length of the block, and announce their addresses."""
    config = process.config
    exposition = Exposition.start(
        process.registry, port=config.metrics_port, host=config.metrics_host
    )
    try:
        address = await server.start()
        logger.info("listening on %s, metrics on port %d", address, exposition.port)
        if config.announce is not None:
            write_announcement(
                config.announce,
                Announcement(address, exposition.port, os.getpid(), process.incarnation),
            )
        yield
    finally:
        await server.stop()
        exposition.close()


async def watch_agent(agent: TransferAgent) -> None:
    """Raise InternalError when the transfer thread has failed.

    The stage can then serve no more, so the process ends and is replaced.
    """
    while agent.failure is None:  # noqa: ASYNC110 - a thread's end sets no event
        await asyncio.sleep(0.5)
    raise InternalError(f"the transfer agent has failed: {agent.failure!r}")

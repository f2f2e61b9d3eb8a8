"""A prefill or decode process from start to end: build the stage, lead or follow its pool, serve, drain.

What differs between the two roles is a `Role`; what a leader and a follower share is here.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from engine.loop import LoopObserver, Scheduler
from engine.pipeline.executor import LayerObserver
from engine.sampling.sampler import sample
from pool.config import WorkerConfig
from pool.follower import Follower, FollowerEngine
from pool.janitor import Janitor
from pool.leader import Leader
from pool.metrics import StageMeters
from pool.stage import Stage, build_stage, max_frame_bytes, plan_stage
from pool.watch import WorkerService, worker_info
from protos import pipeline_pb2_grpc, worker_pb2_grpc
from protos import worker_pb2 as pb
from runtime.announce import Announcement, write_announcement
from runtime.metrics import Exposition, RpcMetrics, new_registry
from runtime.server import GrpcServer, ServerOptions
from runtime.supervision import StopSignal, background
from runtime.version import VERSION
from transfer.agent import TransferAgent
from transfer.stage_channel import UcxStageChannel
from transfer.terms import StageSessionEvent
from transfer.ucx_settings import TransportProfile

logger = logging.getLogger(__name__)

WATCH_METHODS = frozenset({"/baton.v1.Worker/Watch", "/baton.v1.Pipeline/Join"})
PIPELINE_SERVICE = "baton.v1.Pipeline"
WORKER_SERVICE = "baton.v1.Worker"


@dataclass(frozen=True)
class LeaderParts:
    """What a role's services are built from."""

    config: WorkerConfig
    stage: Stage
    leader: Leader
    janitor: Janitor
    meters: StageMeters


class Role(Protocol):
    """What differs between prefill and decode. One object per process; `scheduler` is used by leaders only."""

    name: str
    service: str  # full gRPC name, also its health name
    speculates: bool  # whether a draft has anything to do in this role

    @property
    def scheduler(self) -> Scheduler: ...

    def prepare(self, config: WorkerConfig, stage: Stage) -> None:
        """Build the scheduler for this stage's pools."""
        ...

    def observe_layers(self, agent: TransferAgent) -> LayerObserver | None: ...

    def add_service(self, server: GrpcServer, parts: LeaderParts) -> None: ...

    async def load(self, parts: LeaderParts) -> pb.WorkerLoad: ...

    async def warm_up(self, parts: LeaderParts) -> None:
        """One token through all stages of the pool."""
        ...


async def run_worker(config: WorkerConfig, role: Role, stop: StopSignal) -> None:
    """Until `stop`. Raises ConfigError when checkpoint, flags and memory do not fit together."""
    incarnation = secrets.token_hex(8)
    loop = asyncio.get_running_loop()
    listeners: list[Callable[[StageSessionEvent], None]] = []

    def on_event(event: StageSessionEvent) -> None:
        loop.call_soon_threadsafe(lambda: [listener(event) for listener in listeners])

    plan = plan_stage(config, speculates=role.speculates)
    _log_plan(config, role, plan.geometry.num_pages, plan.geometry.num_slots, str(plan.geometry.layers))
    stage = build_stage(config, plan, incarnation=incarnation, on_event=on_event, observe_layers=role.observe_layers)
    registry = new_registry(role=role.name, version=VERSION)
    try:
        if config.rank == 0:
            await _lead(config, role, stage, registry, listeners, incarnation, stop)
        else:
            await _follow(config, role, stage, registry, listeners, incarnation, stop)
    finally:
        await asyncio.to_thread(stage.agent.shutdown, 5.0)


async def _lead(config: WorkerConfig, role: Role, stage: Stage, registry: CollectorRegistry,
                listeners: list[Callable[[StageSessionEvent], None]], incarnation: str, stop: StopSignal) -> None:
    meters = StageMeters.create(registry, stage.plan.geometry)
    role.prepare(config, stage)
    server = _server(config, registry, (role.service, WORKER_SERVICE, PIPELINE_SERVICE))
    health: set[asyncio.Task[None]] = set()

    def on_serving(serving: bool, reason: str) -> None:  # noqa: FBT001 - a listener's signature
        setter = server.health.set_serving if serving else server.health.set_not_serving
        for service in (role.service, WORKER_SERVICE, PIPELINE_SERVICE):
            task = asyncio.create_task(setter(service))
            health.add(task)
            task.add_done_callback(health.discard)
        worker_service.changed()

    events = asyncio.get_running_loop()
    observer = LoopObserver(step_s=meters.on_step, waited_s=meters.on_wait,
                            unhealthy=lambda reason: events.call_soon_threadsafe(leader.unhealthy, reason))
    leader = Leader(config, stage, role.scheduler, sample, warm_up=lambda: role.warm_up(parts), on_serving=on_serving,
                    observer=observer)
    janitor = Janitor(leader.group, leader.loop, leader.unhealthy)
    parts = LeaderParts(config, stage, leader, janitor, meters)
    worker_service = WorkerService(worker_info(config, stage.plan, role=role.name, incarnation=incarnation),
                                   lambda: role.load(parts))
    listeners.append(lambda event: leader.stage_event(0, event))
    role.add_service(server, parts)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker_service, server.grpc)
    if leader.service is not None:
        pipeline_pb2_grpc.add_PipelineServicer_to_server(leader.service, server.grpc)
    async with _listening(config, registry, server, incarnation):
        leader.start()
        try:
            async with background(stop, _refresh(meters, role, parts)):
                await stop.wait()
        finally:
            await server.drain(grace_s=config.drain_s)
            leader.stop()


async def _follow(config: WorkerConfig, role: Role, stage: Stage, registry: CollectorRegistry,
                  listeners: list[Callable[[StageSessionEvent], None]], incarnation: str, stop: StopSignal) -> None:
    meters = StageMeters.create(registry, stage.plan.geometry)
    server = _server(config, registry, (PIPELINE_SERVICE,))
    channel = UcxStageChannel(rank=config.rank, max_frame_bytes=max_frame_bytes(config, stage.plan),
                              profile=TransportProfile(config.transport))
    engine = FollowerEngine(stage, sample, channel, rank=config.rank, size=config.world_size,
                            on_step=meters.on_forward)
    follower = Follower(config, stage, engine, channel.address)
    listeners.append(follower.on_stage_event)
    tasks: set[asyncio.Task[None]] = set()

    def on_joined(joined: bool) -> None:  # noqa: FBT001 - a listener's signature
        setter = server.health.set_serving if joined else server.health.set_not_serving
        task = asyncio.create_task(setter(PIPELINE_SERVICE))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async with _listening(config, registry, server, incarnation):
        engine.start()
        try:
            async with background(stop, follower.run(on_joined)):
                await stop.wait()
        finally:
            await server.drain(grace_s=0.5)
            engine.stop()
            channel.close()


def _server(config: WorkerConfig, registry: CollectorRegistry, services: tuple[str, ...]) -> GrpcServer:
    return GrpcServer(ServerOptions(listen=config.listen), services=services, metrics=RpcMetrics.create(registry),
                      background_methods=WATCH_METHODS)


@asynccontextmanager
async def _listening(config: WorkerConfig, registry: CollectorRegistry, server: GrpcServer,
                     incarnation: str) -> AsyncIterator[None]:
    """Serve gRPC and metrics for the length of the block, and announce where."""
    exposition = Exposition.start(registry, port=config.metrics_port, host=config.metrics_host)
    try:
        address = await server.start()
        logger.info("listening on %s, metrics on port %d", address, exposition.port)
        if config.announce is not None:
            write_announcement(config.announce, Announcement(address, exposition.port, os.getpid(), incarnation))
        yield
    finally:
        exposition.close()


async def _refresh(meters: StageMeters, role: Role, parts: LeaderParts) -> None:
    """Keep the gauges current."""
    while True:
        meters.on_load(await role.load(parts))
        await asyncio.sleep(0.25)


def _log_plan(config: WorkerConfig, role: Role, num_pages: int, num_slots: int, layers: str) -> None:
    logger.info("%s stage %d of %d: layers %s, %d pages of %d tokens, %d state slots, %s numerics", role.name,
                config.rank, config.world_size, layers, num_pages - 1, config.page_size, max(0, num_slots - 1),
                config.numerics)


"""Lifecycle of a prefill or decode process: build the stage, lead or follow a pool, serve, drain.

A `PoolRole` holds the differences between the two roles. This module holds the code that they
share.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from engine.loop import LoopObserver, Scheduler
from engine.memory.budget import describe_pools
from engine.pipeline.stages import LayerObserver
from engine.sampling.guided import GuidedSampler
from pool.pipeline.follower import Follower, FollowerEngine
from pool.pipeline.group import SessionReports
from pool.pipeline.leader import Leader
from pool.pipeline.membership import JoinReports
from pool.pipeline.stage_channel import open_pool_channel
from pool.prefix.journal import PointJournal
from pool.request.entry import RankScheduler
from pool.request.handler import EventPost, MemoryReclaimer
from pool.stage.config import WorkerConfig
from pool.stage.handoff import LayerMark
from pool.stage.kernels import compile_kernels
from pool.stage.metrics import LeaderMeters, LoadBoard, ReportingScheduler, StageMeters
from pool.stage.plan import max_frame_bytes, naming_memory, plan_stage
from pool.stage.stage import Stage, build_stage
from pool.watch import WorkerService, formed_info, worker_info, worker_load
from protos import pipeline_pb2_grpc, worker_pb2_grpc
from runtime.clock import SystemClock
from runtime.config import parse_address
from runtime.errors import InternalError
from runtime.model_files.tokenizer_files import make_tokenizer
from runtime.observe.exposition import Exposition, new_registry
from runtime.observe.metrics import RefusalMetrics, RpcMetrics, StageMetrics
from runtime.observe.tracing import Tracing
from runtime.observe.tracing_setup import open_tracing
from runtime.process.announce import (
    Announcement,
    announced_address,
    announcement_path,
    write_announcement,
)
from runtime.process.supervision import StopSignal, background
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.security.access import ChannelSecurity, PeerRole, ServerSecurity
from runtime.security.certificates import CertificateStore
from runtime.version import VERSION
from transfer.agent.agent import TransferAgent
from transfer.plan.handoff_terms import StageSessionEvent
from transfer.ucx.binding import loopback_device

logger = logging.getLogger(__name__)

ENDLESS_METHODS = frozenset(
    {
        "/baton.v1.Worker/Watch",
        "/baton.v1.Pipeline/Join",
        "/baton.v1.Prefill/Serve",
        "/baton.v1.Decode/Serve",
    }
)
PIPELINE_SERVICE = "baton.v1.Pipeline"
WORKER_SERVICE = "baton.v1.Worker"
REFRESH_S = 0.25  # seconds between two updates of the gauges


class PoolScheduler(Scheduler, RankScheduler, Protocol):
    """A scheduler that an engine loop runs and a pool reports on."""


class PoolRanks(ReportingScheduler, Protocol):
    """The `pool.request.entry.DataRanks` of a role's schedulers."""

    @property
    def schedulers(self) -> Sequence[PoolScheduler]: ...

    def flush(self) -> int:
        """Empty the prefix caches on the engine thread; return the number of evicted pages."""
        ...


@dataclass(frozen=True)
class LeaderParts:
    """The components that a role's services are built from."""

    config: WorkerConfig
    stage: Stage
    leader: Leader
    reclaimer: MemoryReclaimer
    meters: LeaderMeters
    post: EventPost
    registry: CollectorRegistry


class RoleLeader(Protocol):
    """A role as the leader of its pool runs it."""

    @property
    def ranks(self) -> PoolRanks: ...

    @property
    def journal(self) -> PointJournal:
        """Return the journal of its prefix caches, empty if it has none."""
        ...

    def add_service(self, server: GrpcServer, parts: LeaderParts) -> None: ...

    async def warm_up(self, parts: LeaderParts) -> None:
        """Run one token through all stages of the pool."""
        ...


class PoolRole(Protocol):
    """The differences between prefill and decode."""

    name: str
    service: str  # full gRPC name, also its health name
    speculates: bool  # whether it verifies drafts, or only lets a draft model prefill prompts
    keeps_states: bool  # whether its prefix cache keeps recurrent states as well
    reads_prompts: bool  # whether its forwards have several tokens of a request

    def max_held(self, config: WorkerConfig) -> int:
        """Return how many requests may hold memory at a time when `max_running` compute."""
        ...

    def observe_layers(self, agent: TransferAgent, mark: LayerMark | None) -> LayerObserver | None:
        """Return the observer of computed layers, or None.

        On a device, `mark` records a layer's place in the queue of work.
        """
        ...

    def lead(self, config: WorkerConfig, stage: Stage) -> RoleLeader:
        """Create the schedulers over this stage's pools and the services that use them."""
        ...


@dataclass(frozen=True)
class _Process:
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
        return PeerRole(self.role.name)


async def run_worker(
    config: WorkerConfig, role: PoolRole, stop: StopSignal, *, age_s: float = 0.0
) -> None:
    """Run a worker until `stop`. `age_s` is how long the process has already been starting.

    Raises:
        ConfigError: checkpoint, flags, files and memory do not fit together.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time() - age_s
    # Checked here only for errors; the router reports the effect of a missing tokenizer.
    await asyncio.to_thread(make_tokenizer, config.model)
    if config.rank == 0:
        reports = SessionReports(loop)
        process = _build(config, role, stop, reports.report)
        work = _lead(process, reports, began_s)
    else:
        joined = JoinReports(loop)
        process = _build(config, role, stop, joined.report)
        work = _follow(process, joined)
    try:
        await work
    finally:
        if process.stage.grammars is not None:
            await asyncio.to_thread(process.stage.grammars.close)
        await asyncio.to_thread(process.stage.agent.shutdown, 5.0)
        await asyncio.to_thread(process.tracing.close)


def _build(
    config: WorkerConfig,
    role: PoolRole,
    stop: StopSignal,
    on_event: Callable[[StageSessionEvent], None],
) -> _Process:
    """Build the stage and its surroundings; `on_event` receives the transfer agent's events."""
    incarnation, certificates = secrets.token_hex(8), config.certificates()
    tracing = open_tracing(config.otel_endpoint, role=role.name, worker=incarnation)
    plan = plan_stage(
        config,
        max_held=role.max_held(config),
        speculates=role.speculates,
        keeps_states=role.keeps_states,
        reads_prompts=role.reads_prompts,
    )
    # Only the leader reports at INFO: the other stages have the same figures for their layers.
    level = logging.DEBUG if config.rank else logging.INFO
    place = config.placement
    logger.log(
        level,
        "%s stage %d of %d%s: %s, %s numerics",
        role.name,
        place.pipeline_rank,
        place.pipeline_size,
        f", rank {place.tensor.rank} of {place.tensor.size}" if place.tensor.size > 1 else "",
        describe_pools(plan.geometry),
        config.numerics,
    )
    for notice in plan.notices if config.rank == 0 else ():
        logger.warning(notice)
    registry = new_registry(role=role.name, version=VERSION)
    refusals = RefusalMetrics.create(registry)
    with naming_memory(config, plan):
        compile_kernels(config, plan, reads_prompts=role.reads_prompts)
        stage = build_stage(
            config,
            plan,
            incarnation=incarnation,
            on_event=on_event,
            observe_layers=role.observe_layers,
            speculates=role.speculates,
            on_refused=refusals.count("handoff"),
        )
    _show_where_ucx_listens(config)
    return _Process(
        config, role, stage, registry, refusals, incarnation, stop, certificates, tracing
    )


def _show_where_ucx_listens(config: WorkerConfig) -> None:
    """Log where UCX listens, as a warning if gRPC is limited to this machine and UCX is not."""
    places = config.binding.places()
    where = ", ".join(map(str, places)) + (
        f", in TCP ports {config.transport_ports}" if config.transport_ports else ""
    )
    if parse_address(config.listen).is_loopback and not all(place.is_loopback for place in places):
        logger.warning(
            "UCX listens on %s, but gRPC only on loopback: set --transport-interface, to %s for this "
            "machine only",
            where,
            loopback_device(),
        )
    else:
        logger.info("UCX listens on %s", where)


async def _lead(process: _Process, reports: SessionReports, began_s: float) -> None:
    config, role, stage = process.config, process.role, process.stage
    meters = LeaderMeters.create(
        process.registry, stage.plan.geometry, stage.counts, num_data_ranks=config.dp_attention
    )
    leading = role.lead(config, stage)
    services = (role.service, WORKER_SERVICE, PIPELINE_SERVICE)
    server = _server(process, services)
    show_health = _HealthSetter(server, services)
    start_s: list[float] = []  # set once it has served

    def on_serving(serving: bool, reason: str) -> None:  # noqa: FBT001 - a listener's signature
        show_health(serving)
        if serving and not start_s:
            start_s.append(loop.time() - began_s)
        if leader.weights is not None:
            meters.pool.compat.info({"hash": leader.compatibility.digest})
        worker_service.changed()

    def on_settled() -> None:
        post.flush()
        board.publish()

    def on_unhealthy(reason: str) -> None:
        meters.pool.imbalances.inc()
        leader.unhealthy(reason)

    loop, board = asyncio.get_running_loop(), LoadBoard(leading.ranks, SystemClock())
    post = EventPost(loop)
    observer = LoopObserver(
        launched_s=meters.on_launch,
        step_s=meters.on_step,
        waited_s=meters.on_wait,
        settled=on_settled,
        unhealthy=lambda reason: loop.call_soon_threadsafe(on_unhealthy, reason),
    )
    leader = Leader(
        config,
        stage,
        leading.ranks.schedulers,
        GuidedSampler(stage.grammars),
        reports=reports,
        warm_up=lambda: leading.warm_up(parts),
        on_serving=on_serving,
        empty=lambda grace_s: server.empty(grace_s=grace_s),
        hand_back=server.hand_back,
        observer=observer,
        on_frame=meters.on_frame,
        count_refused=process.refusals.count,
    )
    reclaimer = MemoryReclaimer(reports, leader.loop, on_unhealthy)
    parts = LeaderParts(config, stage, leader, reclaimer, meters, post, process.registry)
    info = worker_info(config, stage.plan, role=role.name, incarnation=process.incarnation)
    worker_service = WorkerService(
        lambda: formed_info(info, leader, stage.plan),
        lambda: worker_load(leader, board.load, meters, sum(start_s)),
        leading.journal,
        lambda: leader.loop.submit(leading.ranks.flush),
    )
    leading.add_service(server, parts)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker_service, server.grpc)
    if leader.service is not None:
        pipeline_pb2_grpc.add_PipelineServicer_to_server(leader.service, server.grpc)
    async with _listening(process, server):
        leader.start()
        try:
            async with background(
                process.stop,
                _refresh(parts, board),
                _watch_agent(stage.agent),
                _watch_engine(leader),
            ):
                await process.stop.wait()
        finally:
            leader.drain()
            await server.drain(grace_s=config.drain_s)
            leader.stop()


async def _follow(process: _Process, reports: JoinReports) -> None:
    """Follow the leader, after waiting for its announcement if it announces itself in a file.

    Such a leader may still be loading, as this stage did until now.
    """
    config, path = process.config, announcement_path(process.config.leader)
    if path is not None:
        logger.info("waiting for the leader to announce itself in %s", path)
        address = asyncio.create_task(announced_address(path))
        stopped = asyncio.create_task(process.stop.wait())
        try:
            await asyncio.wait({address, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not address.done():
                return
            config = config.model_copy(update={"leader": address.result()})
        finally:
            address.cancel()
            stopped.cancel()
    await _follow_leader(process, config, reports)


async def _follow_leader(process: _Process, config: WorkerConfig, reports: JoinReports) -> None:
    stage = process.stage
    meters = StageMeters(
        StageMetrics.create(process.registry), config.placement.pipeline_rank, stage.counts
    )
    server = _server(process, (PIPELINE_SERVICE,))
    channel = open_pool_channel(
        config,
        stage.device,
        max_bytes=max_frame_bytes(config, stage.plan),
        on_sent=meters.on_frame,
        count_refused=process.refusals.count,
    )
    engine = FollowerEngine(
        stage,
        GuidedSampler(stage.grammars),
        channel,
        rank=config.rank,
        size=config.world_size,
        on_step=meters.on_forward,
        frame_timeout_s=config.frame_timeout_s,
    )
    security = ChannelSecurity(process.certificates).to(process.peer_role)
    follower = Follower(config, stage, engine, channel.address, security, reports)
    async with _listening(process, server):
        engine.start()
        try:
            joined = follower.run(_HealthSetter(server, (PIPELINE_SERVICE,)))
            async with background(process.stop, joined, _watch_agent(stage.agent)):
                await process.stop.wait()
                await follower.leave(config.drain_s)
        finally:
            await server.drain(grace_s=0.5)
            engine.stop()
            channel.close()


class _HealthSetter:
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


def _server(process: _Process, services: tuple[str, ...]) -> GrpcServer:
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
async def _listening(process: _Process, server: GrpcServer) -> AsyncIterator[None]:
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


async def _refresh(parts: LeaderParts, board: LoadBoard) -> None:
    """Keep the gauges current."""
    while True:
        parts.meters.on_load(worker_load(parts.leader, board.load, parts.meters))
        parts.meters.on_occupancy(board.occupancy, num_draining=parts.reclaimer.open_tasks)
        await asyncio.sleep(REFRESH_S)


async def _watch_agent(agent: TransferAgent) -> None:
    """Raise InternalError when the transfer thread has failed.

    The stage can then serve no more, so the process ends and is replaced.
    """
    while agent.failure is None:  # noqa: ASYNC110 - a thread's end sets no event
        await asyncio.sleep(0.5)
    raise InternalError(f"the transfer agent has failed: {agent.failure!r}")


async def _watch_engine(leader: Leader) -> None:
    """Raise the error of a leader that can never serve again."""
    raise await leader.until_failed()

"""Lifecycle of a prefill or decode process: build the stage, lead or follow a pool, serve, drain.

A `PoolRole` holds the differences between the two roles. This module holds the code that they
share.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

from engine.memory.budget import describe_pools
from engine.sampling.guided import GuidedSampler
from pool.leader_server import LeaderServer
from pool.pipeline.follower import Follower
from pool.pipeline.follower_engine import FollowerEngine
from pool.pipeline.join import JoinReports
from pool.pipeline.session_reports import SessionReports
from pool.pipeline.stage_channel import open_pool_channel
from pool.role import PoolRole
from pool.serving import (
    PIPELINE_SERVICE,
    HealthSetter,
    PoolProcess,
    listening,
    make_server,
    watch_agent,
)
from pool.stage.config import WorkerConfig
from pool.stage.kernels import compile_kernels
from pool.stage.metrics import StageMeters
from pool.stage.plan import max_frame_bytes, naming_memory, plan_stage
from pool.stage.stage import build_stage
from runtime.config import parse_address
from runtime.model_files.tokenizer_files import make_tokenizer
from runtime.observe.exposition import new_registry
from runtime.observe.metrics.stages import RefusalMetrics, StageMetrics
from runtime.observe.tracing_setup import open_tracing
from runtime.process.announce import announced_address, announcement_path
from runtime.process.supervision import StopSignal, background
from runtime.security.access import ChannelSecurity
from runtime.version import VERSION
from transfer.plan.handoff_terms import StageSessionEvent
from transfer.transport.binding import loopback_device

logger = logging.getLogger(__name__)


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
        for tier in process.stage.tiers.blocks.values():
            tier.close()
        await asyncio.to_thread(process.stage.agent.shutdown, 5.0)
        await asyncio.to_thread(process.tracing.close)


def _build(
    config: WorkerConfig,
    role: PoolRole,
    stop: StopSignal,
    on_event: Callable[[StageSessionEvent], None],
) -> PoolProcess:
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
    return PoolProcess(
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


async def _lead(process: PoolProcess, reports: SessionReports, began_s: float) -> None:
    await LeaderServer(process, reports, began_s=began_s).run()


async def _follow(process: PoolProcess, reports: JoinReports) -> None:
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


async def _follow_leader(process: PoolProcess, config: WorkerConfig, reports: JoinReports) -> None:
    stage = process.stage
    meters = StageMeters(
        StageMetrics.create(process.registry), config.placement.pipeline_rank, stage.counts
    )
    server = make_server(process, (PIPELINE_SERVICE,))
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
    async with listening(process, server):
        engine.start()
        try:
            joined = follower.run(HealthSetter(server, (PIPELINE_SERVICE,)))
            async with background(process.stop, joined, watch_agent(stage.agent)):
                await process.stop.wait()
                await follower.leave(config.drain_s)
        finally:
            await server.drain(grace_s=0.5)
            engine.stop()
            channel.close()

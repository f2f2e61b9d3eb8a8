"""The leader of a pool with its gRPC services, its metrics and its load reports."""

import asyncio
from functools import partial
from itertools import chain

from engine.loop import LoopObserver
from engine.sampling.guided import GuidedSampler
from pool.adapters_service import PoolAdaptersService
from pool.caches_service import PoolCachesService
from pool.pipeline.leader import Leader
from pool.pipeline.reclaimer import MemoryReclaimer
from pool.pipeline.session_reports import SessionReports
from pool.pipeline.tiers import find_blocks
from pool.prefix.cache import PrefixCache
from pool.pulls.lender import Lender
from pool.pulls.puller import Puller
from pool.request.adapter_memory import StagesAdapters
from pool.request.adapters import PoolAdapters
from pool.request.handler import EventPost
from pool.request.role_switch import RoleSwitch
from pool.role import LeaderParts
from pool.serving import (
    PIPELINE_SERVICE,
    HealthSetter,
    PoolProcess,
    listening,
    make_server,
    watch_agent,
)
from pool.stage.metrics import LeaderMeters, LoadBoard
from pool.tiers.block_store import Tier
from pool.tiers.block_tier import BlockTier
from pool.tiers.copies import ReportedCopies, WrittenBlocks
from pool.tiers.stage_blocks import StageBlocks
from pool.watch import WorkerService, current_info, worker_info, worker_load
from protos import (
    adapters_pb2_grpc,
    caches_pb2_grpc,
    lending_pb2_grpc,
    pipeline_pb2_grpc,
    worker_pb2_grpc,
)
from protos import worker_pb2 as pb
from runtime.clock import SystemClock
from runtime.errors import BatonError
from runtime.observe.metrics.caches import PullMetrics, TierMetrics
from runtime.observe.metrics.pools import AdapterMetrics
from runtime.process.supervision import background
from runtime.security.access import ChannelSecurity

WORKER_SERVICE = "baton.v1.Worker"
WRITES_S = 5.0  # seconds for writes to the tiers after the last request
PULLS_S = 5.0  # seconds for pulls under way after the last request
REFRESH_S = 0.25  # seconds between two updates of the gauges


class LeaderServer:
    """A leader and the services that report on it. Belongs to the event loop's thread.

    Implements `PoolListener` and `Evictor` of its leader. The engine thread calls `_on_settled` and
    the meters.
    """

    def __init__(self, process: PoolProcess, reports: SessionReports, *, began_s: float) -> None:
        """Build everything; `run` starts it. `began_s` is the loop time at which the start began."""
        config, stage = process.config, process.stage
        self._process = process
        self._events = asyncio.get_running_loop()
        self._began_s = began_s
        self._start_s = 0.0  # seconds until it first served, 0 before
        self._meters = LeaderMeters.create(
            process.registry, stage.plan.geometry, stage.counts, num_data_ranks=config.dp_attention
        )
        self._role = process.role.lead(config, stage)
        own, roles = (WORKER_SERVICE, PIPELINE_SERVICE), process.role.services
        self._switch = RoleSwitch(tuple(roles), process.role.first_roles(config), self._on_switched)
        self._server = make_server(process, (*roles.values(), *own))
        self._show_health = HealthSetter(self._server, own)
        self._show_role = {
            role: HealthSetter(self._server, (service,)) for role, service in roles.items()
        }
        self._board = LoadBoard(self._role.ranks, SystemClock(), self._role.views)
        self._post = EventPost(self._events)
        self._leader = Leader(
            config,
            stage,
            self._role.ranks.schedulers,
            GuidedSampler(stage.grammars),
            reports=reports,
            listener=self,
            evictor=self,
            observer=self._observer(),
            on_frame=self._meters.on_frame,
            count_refused=process.refusals.count,
        )
        self._adapters = self._make_adapters()
        self._tiers = self._open_tiers()
        reclaimer = MemoryReclaimer(reports, self._leader.loop, self._on_unhealthy)
        self._lender, self._pullers = self._share_caches(reclaimer)
        self._parts = LeaderParts(
            config,
            stage,
            self._leader,
            reclaimer,
            self._meters,
            self._post,
            process.registry,
            self._switch,
            self._adapters,
            self._tiers,
            self._pullers,
        )
        self._worker_service = self._make_worker_service()
        self._adapters.changed = self._worker_service.changed
        self._add_services()

    async def run(self) -> None:
        """Serve until the process stops or can never serve again, then drain."""
        process, leader = self._process, self._leader
        async with listening(process, self._server):
            leader.start()
            try:
                async with background(
                    process.stop,
                    self._refresh(),
                    watch_agent(process.stage.agent),
                    _watch_engine(leader),
                ):
                    await process.stop.wait()
            finally:
                leader.drain()
                await self._server.drain(grace_s=process.config.drain_s)
                await asyncio.gather(*(each.reads.finish(PULLS_S) for each in self._pullers))
                await asyncio.gather(*(tier.finish(WRITES_S) for tier in chain(*self._tiers)))
                leader.stop()

    def _make_adapters(self) -> PoolAdapters:
        stage, leader = self._process.stage, self._leader
        return PoolAdapters(
            self._process.config.adapters,
            stage.plan.description,
            () if stage.adapters is None else stage.adapters.keys,
            StagesAdapters(
                lambda keys: leader.group.hold_adapters(stage.adapters, keys, leader.loop.submit),
                lambda key: leader.loop.submit(lambda: self._role.ranks.has_adapter(key)),
            ),
            AdapterMetrics.create(self._process.registry),
        )

    @property
    def _caches(self) -> list[PrefixCache]:
        """Return the caches of the data ranks from which other pools could resume prompts.

        There are none in a decode pool that keeps no states after its blocks.
        """
        specs = self._process.stage.plan.geometry.specs
        needs_states = any(spec.kind.is_state for spec in specs)
        caches = [scheduler.cache for scheduler in self._role.ranks.schedulers]
        return [
            cache for cache in caches if cache.rule is not None and cache.has_states is needs_states
        ]

    def _share_caches(self, reclaimer: MemoryReclaimer) -> tuple[Lender | None, list[Puller]]:
        """Return what lends blocks to other pools, and what pulls theirs into each cache."""
        process, caches = self._process, self._caches
        plan, metrics = process.stage.plan, PullMetrics.create(process.registry)
        lender = Lender(self._leader, plan, caches, reclaimer, metrics) if caches else None
        security = ChannelSecurity(process.certificates)
        return lender, [
            Puller(data_rank, cache, self._leader, plan, reclaimer, security, metrics)
            for data_rank, cache in enumerate(caches)
        ]

    def _open_tiers(self) -> list[list[BlockTier]]:
        """Return the tiers of each prefix cache, by data rank."""
        leader, metrics = self._leader, TierMetrics.create(self._process.registry)
        return [
            [
                BlockTier(
                    tier,
                    cache,
                    own,
                    leader.loop,
                    partial(leader.group.move_blocks, own, data_rank),
                    partial(leader.group.find_blocks, own, tier, data_rank)
                    if data_rank
                    else partial(find_blocks, own),
                    metrics,
                    data_rank,
                    self._written(tier, own, data_rank),
                )
                for tier, own in self._process.stage.tiers.blocks.items()
            ]
            for data_rank, cache in enumerate(self._caches)
        ]

    def _written(self, tier: Tier, own: StageBlocks, data_rank: int) -> WrittenBlocks | None:
        """Return what is known of host memory that data ranks have each for themselves.

        What the leader's own has is reported by itself.
        """
        if tier is not Tier.HOST or self._process.config.dp_attention == 1:
            return None
        reported = self._process.stage.tiers.copies if data_rank else ReportedCopies()
        most = own.store.max_bytes // max(own.bytes_per_block, 1)
        return WrittenBlocks(most, reported.of_tier())

    def _observer(self) -> LoopObserver:
        return LoopObserver(
            launched_s=self._meters.on_launch,
            step_s=self._meters.on_step,
            waited_s=self._meters.on_wait,
            settled=self._on_settled,
            unhealthy=lambda reason: self._events.call_soon_threadsafe(self._on_unhealthy, reason),
        )

    def _make_worker_service(self) -> WorkerService:
        process, leader = self._process, self._leader
        plan = process.stage.plan
        info = worker_info(
            process.config, plan, roles=self._switch.able, incarnation=process.incarnation
        )
        info.lends_blocks = self._lender is not None
        return WorkerService(
            lambda: current_info(info, leader, plan, self._adapters),
            lambda role: self._load(role, self._start_s),
            self._role.journal,
            lambda: leader.loop.submit(self._role.ranks.flush),
            self._switch,
            process.stage.tiers.copies.journal if any(self._tiers) else None,
        )

    def _add_services(self) -> None:
        server, pipeline_service = self._server, self._leader.service
        self._role.add_service(server, self._parts)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._worker_service, server.grpc)
        adapters_pb2_grpc.add_AdaptersServicer_to_server(
            PoolAdaptersService(self._adapters), server.grpc
        )
        kept = [each.cache for each in self._role.ranks.schedulers if each.cache.rule is not None]
        caches_pb2_grpc.add_CachesServicer_to_server(
            PoolCachesService(
                kept, self._leader.loop, chain(*self._tiers[:1]), self._process.registry
            ),
            server.grpc,
        )
        if self._lender is not None:
            lending_pb2_grpc.add_LendingServicer_to_server(self._lender, server.grpc)
        if pipeline_service is not None:
            pipeline_pb2_grpc.add_PipelineServicer_to_server(pipeline_service, server.grpc)

    async def warm_up(self) -> None:
        """Implement `PoolListener`."""
        await self._adapters.formed()
        await self._role.warm_up(self._parts)

    async def empty(self, grace_s: float) -> None:
        """Implement `Evictor`."""
        await self._server.empty(grace_s=grace_s)

    async def hand_back(self, error: BatonError) -> None:
        """Implement `Evictor`."""
        await self._server.hand_back(error)

    def serving_changed(self, reason: str, *, serving: bool) -> None:
        """Implement `PoolListener`: the reason is in the load reports."""
        self._show_roles()
        if serving and not self._start_s:
            self._start_s = self._events.time() - self._began_s
        if self._leader.weights is not None:
            self._meters.pool.compat.info({"hash": self._leader.compatibility.digest})
        self._worker_service.changed()

    def _on_switched(self) -> None:
        self._show_roles()
        self._worker_service.changed()

    def _show_roles(self) -> None:
        """Show by health and metrics what the pool serves."""
        serving = self._leader.serving
        self._show_health(serving)
        for role, show in self._show_role.items():
            is_active = serving and not self._switch.reason_against(role)
            show(is_active)
            self._meters.pool.roles.labels(role).set(is_active)

    def _on_settled(self) -> None:
        self._post.flush()
        self._board.publish()

    def _on_unhealthy(self, reason: str) -> None:
        self._meters.pool.imbalances.inc()
        self._leader.unhealthy(reason)

    def _load(self, role: str = "", start_s: float = 0.0) -> pb.WorkerLoad:
        load = worker_load(self._leader, self._board.load_of(role), self._meters, start_s)
        load.roles.extend(self._switch.active)
        load.roles_epoch = self._switch.epoch
        load.pull_cost = max((each.reads.cost for each in self._pullers), default=0.0)
        tiers = (tier for tier in chain(*self._tiers) if tier.is_own)
        load.copy_cost = max((tier.reads.cost for tier in tiers), default=0.0)
        if load.serving and (reason := self._switch.reason_against(role)):
            load.serving, load.reason = False, reason
        return load

    async def _refresh(self) -> None:
        """Keep the gauges current."""
        while True:
            self._meters.on_load(self._load())
            num_draining = self._parts.reclaimer.open_tasks
            self._meters.on_occupancy(self._board.occupancy, num_draining=num_draining)
            await asyncio.sleep(REFRESH_S)


async def _watch_engine(leader: Leader) -> None:
    """Raise the error of a leader that can never serve again."""
    raise await leader.until_failed()

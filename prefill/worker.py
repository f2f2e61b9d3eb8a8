"""The prefill role, as `pool.process` runs it."""

from collections.abc import Mapping
from functools import partial
from itertools import count
from types import MappingProxyType

from engine.core.request import Request, SamplingParams
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.stage_executor import LayerObserver
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import DataRanks, Failed
from pool.role import LeaderParts
from pool.stage.config import WorkerConfig
from pool.stage.handoff import LayerMark, layer_observer
from pool.stage.metrics import ReportingScheduler
from pool.stage.plan import StagePlan
from pool.stage.stage import Stage
from pool.stage.warmup import run_inside
from prefill.prompts import FirstToken, PrefillEntryEvent, PrefillLimits
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillParts, PrefillService
from protos import prefill_pb2_grpc
from runtime.clock import SystemClock
from runtime.errors import BatonError, ConfigError
from runtime.observe.metrics.caches import CacheMetrics
from runtime.rpc.server import GrpcServer
from transfer.agent.agent import TransferAgent

PREFILL_SERVICE = "baton.v1.Prefill"


class PrefillRole:
    """The prefill role. Implements `pool.role.PoolRole`."""

    name = "prefill"
    services: Mapping[str, str] = MappingProxyType({"prefill": PREFILL_SERVICE})
    speculates = False
    keeps_states = True
    reads_prompts = True

    def first_roles(self, config: WorkerConfig) -> tuple[str, ...]:
        return ("prefill",)

    def max_held(self, config: WorkerConfig) -> int:
        return config.max_running

    def observe_layers(self, agent: TransferAgent, mark: LayerMark | None) -> LayerObserver:
        return layer_observer(agent, mark)

    def lead(self, config: WorkerConfig, stage: Stage) -> "PrefillLeader":
        """Create the schedulers of the leader.

        Raises:
            ConfigError: `chunk_tokens` is no multiple of the model's grid.
        """
        geometry = stage.plan.geometry
        limits = prefill_limits(config, stage.plan)
        keys = count(1)
        journal = PointJournal()
        return PrefillLeader(
            DataRanks(
                tuple(
                    PrefillScheduler(
                        pages=PageAllocator(geometry.num_pages),
                        slots=SlotAllocator(geometry.num_slots),
                        clock=SystemClock(),
                        cache_rule=prompt_rule(config, stage.plan),
                        limits=limits,
                        data_rank=data_rank,
                        keys=keys,
                        journal=journal,
                    )
                    for data_rank in range(config.dp_attention)
                )
            ),
            journal,
        )


def prefill_limits(config: WorkerConfig, plan: StagePlan) -> PrefillLimits:
    """Return the limits of a scheduler of prompts.

    Raises:
        ConfigError: `chunk_tokens` is no multiple of the model's grid.
    """
    grid = plan.description.facts.chunk_grid
    if config.chunk_tokens % grid:
        raise ConfigError(
            f"chunk_tokens must be a multiple of {grid} for this model, got {config.chunk_tokens}",
            field="chunk_tokens",
        )
    return PrefillLimits(
        page_size=config.page_size,
        chunk_tokens=config.chunk_tokens,
        grid=grid,
        max_running=config.max_running,
        max_queued=config.max_queued,
        drafts=plan.has_draft_model,
    )


def prompt_rule(config: WorkerConfig, plan: StagePlan) -> ResumeRule | None:
    """Return where prompts resume from the prefix cache, or None without one."""
    if not config.prefix_cache:
        return None
    has_states = any(spec.kind.is_state for spec in plan.geometry.specs)
    return ResumeRule(config.page_size, plan.description.facts.chunk_grid, has_states)


class PrefillLeader:
    """The leader of a prefill pool. Implements `pool.role.RoleLeader`."""

    def __init__(self, ranks: DataRanks[PrefillScheduler], journal: PointJournal) -> None:
        self.ranks = ranks
        self.journal = journal

    @property
    def views(self) -> Mapping[str, ReportingScheduler]:
        """Return nothing: the load of the only role is that of the pool."""
        return {}

    def add_service(self, server: GrpcServer, parts: LeaderParts) -> None:
        metrics = CacheMetrics.create(parts.registry)
        for scheduler in self.ranks.schedulers:
            scheduler.cache.metrics = metrics
        self.serve_prompts(server, parts)

    def serve_prompts(
        self, server: GrpcServer, parts: LeaderParts, *, may_decode: bool = False
    ) -> None:
        """Add the Prefill service over these schedulers, of a pool that also decodes or not."""
        sources = zip(parts.pullers, parts.tiers, self.ranks.schedulers, strict=False)
        for puller, tiers, scheduler in sources:
            for reads in (puller.reads, *(tier.reads for tier in tiers)):
                reads.likely_s = scheduler.best_pace.likely_s
        service = PrefillService(
            PrefillParts(
                leader=parts.leader,
                plan=parts.stage.plan,
                reclaimer=parts.reclaimer,
                meters=parts.meters,
                post=parts.post,
                switch=parts.switch,
                adapters=parts.adapters,
                tiers=parts.tiers,
                pullers=parts.pullers,
                grammars=parts.leader.grammars,
                caches=parts.config.prefix_cache,
                ranks=self.ranks,
                chunk_tokens=parts.config.chunk_tokens,
                may_decode=may_decode,
            ),
            server.calls,
        )
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.grpc)

    async def warm_up(self, parts: LeaderParts) -> None:
        """Prefill a prompt of one token and sample one token on every data rank."""
        request = Request("warm-up", (0,), 1, SamplingParams(temperature=0))

        def end(key: int) -> None:
            parts.reclaimer.end(
                lambda: self.ranks.of(key).release(key),
                close=lambda: parts.leader.group.close_request(key, None),
            )

        for scheduler in self.ranks.schedulers:
            await run_inside(parts.leader.loop, partial(scheduler.submit, request), _outcome, end)


def _outcome(event: PrefillEntryEvent) -> bool | BatonError:
    return event.error if isinstance(event, Failed) else isinstance(event, FirstToken)

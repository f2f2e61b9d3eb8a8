"""The decode role, as `pool.process` runs it."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from decode.adaptive import AdaptiveDraft
from decode.entry import MAX_REPLAYED, DecodeEntryEvent, DecodeLimits, Finished
from decode.handler import DecodeParts
from decode.local_prompts import PromptReader
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from decode.speculation import MAX_DRAFT_TOKENS, DraftLength, VerifiedStep
from engine.core.numerics import HOST
from engine.core.request import Request, SamplingParams
from engine.memory.budget import decode_requests
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.stage_executor import LayerObserver
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import DataRanks, Failed
from pool.role import LeaderParts
from pool.stage.config import WorkerConfig
from pool.stage.handoff import LayerMark
from pool.stage.metrics import ReportingScheduler
from pool.stage.plan import StagePlan
from pool.stage.speculation_plan import SpeculationPlan
from pool.stage.stage import Stage
from pool.stage.warmup import run_inside
from protos import decode_pb2_grpc
from runtime.clock import SystemClock
from runtime.errors import BatonError
from runtime.observe.metrics.caches import CacheMetrics
from runtime.observe.metrics.handoffs import ArrivalMetrics
from runtime.observe.metrics.pools import SpeculationMetrics
from runtime.rpc.server import GrpcServer
from transfer.agent.agent import TransferAgent

DECODE_SERVICE = "baton.v1.Decode"


class DecodeRole:
    """The decode role. Implements `pool.role.PoolRole`."""

    name = "decode"
    services: Mapping[str, str] = MappingProxyType({"decode": DECODE_SERVICE})
    speculates = True
    keeps_states = False  # states arrive with the prompts
    reads_prompts = False  # only short rests, and only without recurrent states

    def first_roles(self, config: WorkerConfig) -> tuple[str, ...]:
        return ("decode",)

    def max_held(self, config: WorkerConfig) -> int:
        """Return the number of requests that may hold memory: running and in handoff."""
        return decode_requests(config.max_running, num_landing=config.max_landing)

    def observe_layers(self, agent: TransferAgent, mark: LayerMark | None) -> LayerObserver | None:
        return None

    def lead(self, config: WorkerConfig, stage: Stage) -> "DecodeLeader":
        geometry = stage.plan.geometry
        limits = decode_limits(config, stage.plan)
        adaptive = adaptive_draft(config, stage.plan)
        keys = itertools.count(1)
        journal = PointJournal()
        return DecodeLeader(
            DataRanks(
                tuple(
                    DecodeScheduler(
                        pages=PageAllocator(geometry.num_pages),
                        slots=SlotAllocator(geometry.num_slots),
                        scratch=SlotAllocator(stage.plan.num_scratch, name="states of trees"),
                        limits=limits,
                        clock=SystemClock(),
                        cache_rule=ResumeRule(config.page_size) if config.decode_cache else None,
                        draft_length=length_of(adaptive),
                        data_rank=data_rank,
                        keys=keys,
                        journal=journal,
                    )
                    for data_rank in range(config.dp_attention)
                )
            ),
            journal,
            adaptive,
        )


def decode_limits(config: WorkerConfig, plan: StagePlan) -> DecodeLimits:
    """Return the limits of a scheduler of running requests."""
    grid = plan.description.facts.chunk_grid
    has_states = any(spec.kind.is_state for spec in plan.geometry.specs)
    return DecodeLimits(
        page_size=config.page_size,
        grid=grid,
        depth=config.placement.pipeline_size,
        max_running=config.max_running,
        max_held=decode_requests(config.max_running, num_landing=config.max_landing),
        max_context_tokens=plan.max_context_tokens,
        chunk_tokens=max(config.chunk_tokens, grid),
        growth_tokens=config.page_size,
        num_draft_tokens=plan.num_draft_tokens,
        proposers=() if plan.speculation is None else plan.speculation.proposers,
        adapts=config.spec_adaptive,
        has_states=has_states,
        # Layers that see a window keep a page of tokens beyond it.
        replay_tokens=min(MAX_REPLAYED, config.page_size) if config.device == HOST.type else 1,
        local_rest_tokens=0 if has_states else config.local_rest_tokens,
        steps_ahead=config.overlap_steps,
    )


def adaptive_draft(config: WorkerConfig, plan: StagePlan) -> AdaptiveDraft | None:
    """Return the choice of draft lengths by throughput, or None if they are fixed."""
    return AdaptiveDraft(plan.num_draft_tokens) if config.spec_adaptive else None


def length_of(adaptive: AdaptiveDraft | None) -> DraftLength:
    """Return the choice of draft lengths as a scheduler calls it."""
    return adaptive.length if adaptive is not None else lambda num_running: MAX_DRAFT_TOKENS


class DecodeLeader:
    """The leader of a decode pool. Implements `pool.role.RoleLeader`."""

    def __init__(
        self,
        ranks: DataRanks[DecodeScheduler],
        journal: PointJournal,
        adaptive: AdaptiveDraft | None,
    ) -> None:
        """Create the leader.

        `adaptive` chooses the draft lengths of the schedulers from measured throughput.
        """
        self.ranks = ranks
        self.journal = journal
        self._adaptive = adaptive

    @property
    def views(self) -> Mapping[str, ReportingScheduler]:
        """Return nothing: the load of the only role is that of the pool."""
        return {}

    def add_service(self, server: GrpcServer, parts: LeaderParts) -> None:
        metrics = CacheMetrics.create(parts.registry)
        for scheduler in self.ranks.schedulers:
            scheduler.cache.metrics = metrics
        self.serve_requests(server, parts)

    def serve_requests(
        self,
        server: GrpcServer,
        parts: LeaderParts,
        prompts_of: Callable[[int], PromptReader | None] | None = None,
    ) -> None:
        """Add the Decode service over these schedulers.

        On a pool that also prefills, `prompts_of` returns the reader that has the prompt of a key.
        """
        if (plan := parts.stage.plan.speculation) is not None:
            self._observe_speculation(parts, plan)
        service = DecodeService(
            DecodeParts(
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
                caches=parts.config.decode_cache
                if prompts_of is None
                else parts.config.prefix_cache,
                ranks=self.ranks,
                arrivals=ArrivalMetrics.create(parts.registry),
                prompts_of=prompts_of,
            ),
            server.calls,
        )
        decode_pb2_grpc.add_DecodeServicer_to_server(service, server.grpc)

    def _observe_speculation(self, parts: LeaderParts, plan: SpeculationPlan) -> None:
        metrics = SpeculationMetrics.create(parts.registry)
        # Creates the series: a draft without any accepted token must show zero, not a missing
        # series.
        for proposer in (*plan.proposers, "grammar"):
            metrics.drafted.labels(proposer)
            metrics.accepted.labels(proposer, "1")

        def on_verified(step: VerifiedStep, num_running: int) -> None:
            # The step itself counts one token per row.
            parts.meters.on_generated(sum(step.accepted))
            observe_verified(metrics, step)
            # Without drafts there is no throughput to record.
            if self._adaptive is not None and step.rows:
                self._adaptive.observe(step, num_running)

        for scheduler in self.ranks.schedulers:
            scheduler.on_verified = on_verified

    async def warm_up(self, parts: LeaderParts) -> None:
        """Generate two tokens on every data rank: a prefill and a decode step."""
        request = Request("warm-up", (0,), 2, SamplingParams(temperature=0))
        loop = parts.leader.loop
        for scheduler in self.ranks.schedulers:
            await run_inside(
                loop,
                partial(scheduler.submit_local, request),
                is_finished,
                end=lambda key: loop.post(lambda: self.ranks.of(key).release(key)),
            )


def observe_verified(metrics: SpeculationMetrics, step: VerifiedStep) -> None:
    """Record the metrics of one verification of drafts."""
    for row in step.rows:
        metrics.accept_length.observe(row.num_accepted + 1)
    for proposer in {row.proposer for row in step.rows}:
        rows = [row for row in step.rows if row.proposer == proposer]
        metrics.drafted.labels(proposer).inc(sum(row.num_drafted for row in rows))
        for depth in range(1, max(row.num_accepted for row in rows) + 1):
            metrics.accepted.labels(proposer, str(depth)).inc(
                sum(row.num_accepted >= depth for row in rows)
            )
    metrics.step_s.labels("yes" if step.num_drafted else "no").observe(step.seconds)


def is_finished(event: DecodeEntryEvent) -> bool | BatonError:
    """Return whether an event is a request's last one, or its error."""
    return event.error if isinstance(event, Failed) else isinstance(event, Finished)

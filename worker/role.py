"""The pool that prefills and decodes, as `pool.process` runs it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from types import MappingProxyType

from decode.adaptive import AdaptiveDraft
from decode.entry import DecodeEmitter
from decode.scheduler import DecodeScheduler
from decode.worker import (
    DECODE_SERVICE,
    DecodeLeader,
    adaptive_draft,
    decode_limits,
    is_finished,
    length_of,
)
from engine.core.request import Request, SamplingParams
from engine.memory.budget import decode_requests
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.stage_executor import LayerObserver
from pool.prefix.journal import PointJournal
from pool.request.entry import DataRanks
from pool.role import LeaderParts
from pool.stage.config import WorkerConfig
from pool.stage.handoff import LayerMark, layer_observer
from pool.stage.metrics import ReportingScheduler
from pool.stage.stage import Stage
from pool.stage.warmup import run_inside
from prefill.scheduler import PrefillScheduler
from prefill.worker import (
    PREFILL_SERVICE,
    PrefillLeader,
    prefill_limits,
    prompt_rule,
)
from runtime.clock import SystemClock
from runtime.errors import ConfigError
from runtime.observe.metrics.caches import CacheMetrics
from runtime.rpc.server import GrpcServer
from transfer.agent.agent import TransferAgent
from worker.chunk_budget import ChunkBudget
from worker.config import RolesConfig
from worker.scheduler import AggregatedScheduler, OwnPrompts


class AggregatedRole:
    """Both roles in one pool, which serves one of them or both. Implements `pool.role.PoolRole`."""

    name = "worker"
    services: Mapping[str, str] = MappingProxyType(
        {"prefill": PREFILL_SERVICE, "decode": DECODE_SERVICE}
    )
    speculates = True
    keeps_states = True
    reads_prompts = True

    def first_roles(self, config: WorkerConfig) -> tuple[str, ...]:
        assert isinstance(config, RolesConfig)
        return tuple(config.roles.split(","))

    def max_held(self, config: WorkerConfig) -> int:
        """Return the number of requests that may hold memory: prompts, and requests of decode."""
        return config.max_running + decode_requests(
            config.max_running, num_landing=config.max_landing
        )

    def observe_layers(self, agent: TransferAgent, mark: LayerMark | None) -> LayerObserver:
        return layer_observer(agent, mark)

    def lead(self, config: WorkerConfig, stage: Stage) -> "AggregatedLeader":
        """Create the schedulers of the leader.

        Raises:
            ConfigError: `chunk_tokens` is no multiple of the model's grid, or a setting is for
                decode pools only.
        """
        assert isinstance(config, RolesConfig)
        plan = stage.plan
        if config.local_rest_tokens:
            raise ConfigError(
                f"local_rest_tokens {config.local_rest_tokens} is for decode pools: a worker of both "
                f"roles computes every prompt that it is given",
                field="local_rest_tokens",
            )
        prompts = replace(
            prefill_limits(config, plan),
            num_draft_tokens=max(plan.num_draft_tokens, 1),
            caches_drafts=plan.speculation is None or plan.speculation.handed,
        )
        running = replace(decode_limits(config, plan), max_held=plan.max_held)
        adaptive = adaptive_draft(config, plan)
        keys, journal, clock = count(1), PointJournal(), SystemClock()
        schedulers = []
        for data_rank in range(config.dp_attention):
            pages = PageAllocator(plan.geometry.num_pages)
            slots = SlotAllocator(plan.geometry.num_slots)
            prefill = PrefillScheduler(
                pages=pages,
                slots=slots,
                limits=prompts,
                clock=clock,
                cache_rule=prompt_rule(config, plan),
                data_rank=data_rank,
                keys=keys,
                journal=journal,
            )
            decode = DecodeScheduler(
                pages=pages,
                slots=slots,
                scratch=SlotAllocator(plan.num_scratch, name="states of trees"),
                limits=running,
                clock=clock,
                draft_length=length_of(adaptive),
                data_rank=data_rank,
                keys=keys,
                journal=journal,
            )
            budget = ChunkBudget(prompts.chunk_tokens, prompts.grid, config.max_step_s)
            schedulers.append(AggregatedScheduler(prefill, decode, budget, clock))
        return AggregatedLeader(tuple(schedulers), journal, adaptive)


class AggregatedLeader:
    """The leader of a pool of both roles. Implements `pool.role.RoleLeader`."""

    def __init__(
        self,
        schedulers: tuple[AggregatedScheduler, ...],
        journal: PointJournal,
        adaptive: AdaptiveDraft | None,
    ) -> None:
        """Create the leader; `adaptive` chooses the draft lengths."""
        self.ranks = DataRanks(schedulers)
        self.journal = journal
        self._prefill = PrefillLeader(
            DataRanks(tuple(each.prefill for each in schedulers)), journal
        )
        self._decode = DecodeLeader(
            DataRanks(tuple(each.decode for each in schedulers)), journal, adaptive
        )

    @property
    def views(self) -> Mapping[str, ReportingScheduler]:
        return {"prefill": self._prefill.ranks, "decode": self._decode.ranks}

    def add_service(self, server: GrpcServer, parts: LeaderParts) -> None:
        metrics = CacheMetrics.create(parts.registry)
        for scheduler in self.ranks.schedulers:
            scheduler.cache.metrics = metrics
        self._prefill.serve_prompts(server, parts, may_decode=True)
        self._decode.serve_requests(server, parts, self._prompts_of)

    def _prompts_of(self, key: int) -> OwnPrompts | None:
        """Return the reader of the data rank that has the prompt of this key."""
        return next(
            (each.own_prompts for each in self.ranks.schedulers if each.prefill.holds(key)), None
        )

    async def warm_up(self, parts: LeaderParts) -> None:
        """Prefill a prompt of one token and generate two tokens on every data rank."""
        request = Request("warm-up", (0,), 2, SamplingParams(temperature=0))

        def end(key: int) -> None:
            parts.reclaimer.end(
                lambda: self._decode.ranks.of(key).release(key),
                close=lambda: parts.leader.group.close_request(key, None),
            )

        for scheduler in self._decode.ranks.schedulers:
            await run_inside(
                parts.leader.loop, partial(_submit, scheduler, request), is_finished, end
            )


def _submit(scheduler: DecodeScheduler, request: Request, emit: DecodeEmitter) -> int:
    return scheduler.read_rest(request, emit, blocks=(), compatibility="").key

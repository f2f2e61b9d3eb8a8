"""One stage as a process holds it: model, pools, backends and transfer agent, built for its layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.cpu import CpuAttention
from engine.memory.budget import PoolBudget, plan_pools
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry, bytes_per_slot
from engine.memory.pools import StagePools
from engine.model import ModelFacts
from engine.numerics import Numerics
from engine.pipeline.executor import LayerObserver, StageExecutor
from engine.recurrent.cpu import CpuRecurrent
from engine.stages import LayerRange, get_pp_indices
from models.loader import ModelDescription, read_model
from pool.config import WorkerConfig
from runtime.clock import SystemClock
from runtime.errors import ConfigError
from transfer.agent import TransferAgent
from transfer.compatibility import Compatibility, compatibility
from transfer.terms import StageSessionEvent
from transfer.ucx import UcxTransport
from transfer.ucx_settings import TransportProfile


@dataclass(frozen=True)
class StagePlan:
    """What follows from checkpoint and configuration alone; the same on every stage but for `geometry.layers`."""

    description: ModelDescription
    ranges: list[LayerRange]
    geometry: PoolGeometry
    compatibility: Compatibility
    max_context_tokens: int


def plan_stage(config: WorkerConfig) -> StagePlan:
    """Read the checkpoint's headers and derive pool sizes. Raises ConfigError with the arithmetic if it cannot fit."""
    description = read_model(config.model)
    facts = description.facts
    size = config.world_size
    ranges = [get_pp_indices(facts.num_layers, rank, size, config.partition or None) for rank in range(size)]
    specs = description.cache_specs(config.page_size)
    sizes = _pool_sizes(config, facts, ranges, specs)
    geometry = PoolGeometry(config.page_size, sizes.num_pages, sizes.num_slots, ranges[config.rank], specs)
    context = min(facts.max_context_tokens, (sizes.num_pages - 1) * config.page_size)
    return StagePlan(description, ranges, geometry,
                     compatibility(revision=facts.revision, specs=specs, page_size=config.page_size), context)


def _pool_sizes(config: WorkerConfig, facts: ModelFacts, ranges: list[LayerRange],
                specs: tuple[CacheSpec, ...]) -> PoolBudget:
    """As many pages as were asked for, or as the memory budget allows."""
    if config.num_pages:
        if config.num_pages < 2:
            raise ConfigError("num_pages must be at least 2: the null page and one to use", field="num_pages")
        return PoolBudget(config.num_pages, config.max_running + 1 if bytes_per_slot(specs) else 0)
    return plan_pools(specs, ranges, budget_bytes=config.memory_mb << 20, page_size=config.page_size,
                      max_context_tokens=facts.max_context_tokens, num_requests=config.max_running)


@dataclass(frozen=True)
class Stage:
    """The parts of a running stage."""

    plan: StagePlan
    pools: StagePools
    executor: StageExecutor
    agent: TransferAgent


def build_stage(config: WorkerConfig, plan: StagePlan, *, incarnation: str,
                on_event: Callable[[StageSessionEvent], None],
                observe_layers: Callable[[TransferAgent], LayerObserver | None]) -> Stage:
    """Load the stage's tensors and start its transfer agent. `observe_layers(agent)` is what hears of each layer that
    is done: the agent on the sending side, nobody on the receiving one."""
    torch.set_num_threads(config.threads)
    numerics = Numerics(config.numerics)
    pools = StagePools(plan.geometry)
    model = plan.description.load_stage(plan.geometry.layers, numerics=numerics)
    geometry = plan.description.attention_geometry(config.page_size)
    if geometry is None:
        raise ConfigError("a model without any attention layer is not supported", field="model")
    attention = CpuAttention(kv_pools=pools.of_kind(CacheKind.KV), geometry=geometry, numerics=numerics)
    recurrent = CpuRecurrent(conv_pools=pools.of_kind(CacheKind.CONV), state_pools=pools.of_kind(CacheKind.STATE),
                             numerics=numerics)
    clock = SystemClock()
    transport = UcxTransport(profile=TransportProfile(config.transport), clock=clock)
    agent = TransferAgent(memory=pools, transport=transport, clock=clock, incarnation=incarnation, on_event=on_event)
    agent.start()
    executor = StageExecutor(model=model, attention=attention, recurrent=recurrent,
                             on_layer_done=observe_layers(agent))
    return Stage(plan, pools, executor, agent)


def max_frame_bytes(config: WorkerConfig, plan: StagePlan) -> int:
    """An upper bound for a batch between stages: hidden states (and three captured ones) of a full chunk, tables of
    all rows, and per row everything sampling may carry (two token histories of the context, biases, bans)."""
    facts = plan.description.facts
    tokens = max(config.chunk_tokens, config.max_running)
    per_token = 4 * facts.hidden_size * 4 + 8
    per_row = 8 * (2 * plan.max_context_tokens + 2 * 1024 + 64 + 32) + 4 * (plan.geometry.num_pages + 1)
    return tokens * per_token + config.max_running * per_row + (1 << 16)

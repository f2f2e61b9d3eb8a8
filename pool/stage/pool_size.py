"""How large a pool's cache is and how long a context it admits: from flags, or from the memory that
is there.

Every stage repeats this arithmetic with what is the same for all of them (the checkpoint, the
flags, the memory of a machine or container like the others) and gets the same counts; which memory
is free at the moment plays no part in it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.core.layer_range import LayerRange
from engine.memory.budget import longest_context, plan_pools, smallest_budget, stage_costs
from engine.memory.layout import CacheSpec, bytes_per_slot
from models.loader import ModelDescription
from pool.prefix.tree import SNAPSHOT_SHARE
from pool.stage.backends import check_device
from pool.stage.config import WorkerConfig
from runtime.errors import ConfigError
from runtime.process.host_memory import MIB, HostMemory, host_memory

HOST_SHARE = 0.4  # a host has further processes: another worker, a router
CONTAINER_SHARE, DEVICE_SHARE = 0.8, 0.85  # these have none
PROCESS_BYTES = 384 * MIB  # of a worker beside weights and cache
MIN_CONTEXT_TOKENS = 512  # a shorter context is of no use, unless it is all that the model has

Memory = Callable[[str], HostMemory]


@dataclass(frozen=True)
class PoolNeeds:
    """What a pool keeps: all caches of the whole model, as one rank has them (`specs`), for
    `max_held` requests, `num_scratch` records of `scratch` for trees (see `plan_pools`), and the
    weights of a draft on its last stage. A prefix cache keeps up to `max_snapshots` recurrent
    states, as far as they take a fifth of the cache memory."""

    specs: tuple[CacheSpec, ...]
    max_held: int
    scratch: tuple[CacheSpec, ...] = ()
    num_scratch: int = 0
    draft_bytes: int = 0
    max_snapshots: int = 0


@dataclass(frozen=True)
class PoolSize:
    """Pages and slots include the null record. `notice` is what an operator has to know, if
    anything."""

    num_pages: int
    num_slots: int
    context_tokens: int  # prompt and answer of one request together
    notice: str = ""


def memory_of(device: str) -> HostMemory:
    """Of a device by its name, or of the host. Raises ConfigError where there is no such device."""
    if device == "cpu":
        return host_memory()
    check_device(torch.device(device))
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return HostMemory(total, free)


def plan_pool_size(
    config: WorkerConfig,
    description: ModelDescription,
    ranges: Sequence[LayerRange],
    needs: PoolNeeds,
    memory: Memory = memory_of,
) -> PoolSize:
    """Raises ConfigError: weights and cache do not fit, or the context asked for does not; the
    message has the sum and names the flags."""
    weights = [description.weight_bytes(layers, config.placement.tensor) for layers in ranges]
    weights[-1] += needs.draft_bytes
    own = config.placement.pipeline_rank
    if weights[own] and weights[own] > (free := memory(config.device).available_bytes):
        raise ConfigError(
            f"stage {own} (layers {ranges[own]}) has {_mib(weights[own])} of weights, and {_mib(free)} "
            f"are free on {_place(config)}: more stages or ranks (--world-size, --tp; with baton up, "
            f"--prefill-pp, --prefill-tp, --decode-pp and --decode-tp) divide them",
            field="model",
        )
    wanted = _wanted_context(config, description)
    room_bytes = memory(config.device).total_bytes - weights[own]
    if config.num_pages:
        size = _by_pages(config, needs, wanted)
        _check_room(config, ranges, needs, size, room_bytes)
        return size
    budget = _cache_bytes(config, ranges, weights, memory)
    needs = replace(needs, max_snapshots=_num_snapshots(needs, ranges, budget))
    context = longest_context(
        needs.specs,
        ranges,
        budget_bytes=budget,
        page_size=config.page_size,
        at_most=wanted,
        num_requests=needs.max_held,
        scratch=needs.scratch,
        num_scratch=needs.num_scratch,
        num_snapshots=needs.max_snapshots,
    )
    least = wanted if config.max_context else min(wanted, MIN_CONTEXT_TOKENS)
    try:
        sizes = plan_pools(
            needs.specs,
            ranges,
            budget_bytes=budget,
            page_size=config.page_size,
            max_context_tokens=max(context, least),
            num_requests=needs.max_held,
            scratch=needs.scratch,
            num_scratch=needs.num_scratch,
            num_snapshots=needs.max_snapshots,
        )
    except ConfigError as error:
        ways = _ways(config, needs, _needed_mib(config, ranges, needs, least))
        raise ConfigError(f"{error}; {ways}", field="memory_mb") from None
    notice = (
        ""
        if context == wanted
        else _shortened(wanted, context, budget, _needed_mib(config, ranges, needs, wanted))
    )
    size = PoolSize(sizes.num_pages, sizes.num_slots, context, notice)
    _check_room(config, ranges, needs, size, room_bytes)
    return size


def resume_notice(config: WorkerConfig, chunk_grid: int) -> str:
    """Return what an operator has to know of where prompts go on from a prefix cache, if anything:
    states are kept on the model's grid, and pages are shared whole."""
    step = math.lcm(config.page_size, chunk_grid)
    if not config.prefix_cache or step == max(config.page_size, chunk_grid):
        return ""
    return (
        f"prompts go on from the prefix cache only at multiples of {step} tokens, where pages of "
        f"{config.page_size} tokens (--page-size) and the model's grid of {chunk_grid} meet: a page size that "
        f"divides {chunk_grid}, or is a multiple of it, shares more"
    )


def _needed_mib(
    config: WorkerConfig, ranges: Sequence[LayerRange], needs: PoolNeeds, context_tokens: int
) -> int:
    """Per stage, with room for one request of so many tokens."""
    return -(
        -smallest_budget(
            needs.specs,
            ranges,
            page_size=config.page_size,
            max_context_tokens=context_tokens,
            num_requests=needs.max_held,
            scratch=needs.scratch,
            num_scratch=needs.num_scratch,
            num_snapshots=needs.max_snapshots,
        )
        // MIB
    )


def _num_snapshots(needs: PoolNeeds, ranges: Sequence[LayerRange], budget: int) -> int:
    """As many on every stage."""
    largest = max(cost.slot_bytes for cost in stage_costs(needs.specs, ranges))
    return min(needs.max_snapshots, budget // SNAPSHOT_SHARE // largest) if largest else 0


def _wanted_context(config: WorkerConfig, description: ModelDescription) -> int:
    limit, named = description.facts.max_context_tokens, description.facts.context_field
    if config.max_context > limit:
        raise ConfigError(
            f"--max-context must be at most {limit}, the model's own (its {named}), got "
            f"{config.max_context}",
            field="max_context",
        )
    return config.max_context or limit


def _by_pages(config: WorkerConfig, needs: PoolNeeds, wanted: int) -> PoolSize:
    """As many pages as were asked for."""
    if config.num_pages < 2:
        raise ConfigError(
            "--num-pages must be at least 2: the null page and one to use", field="num_pages"
        )
    room = (config.num_pages - 1) * config.page_size
    if config.max_context > room:
        raise ConfigError(
            f"--num-pages {config.num_pages} hold {room} tokens, and --max-context asks for "
            f"{config.max_context}",
            field="num_pages",
        )
    num_slots = needs.max_held + needs.max_snapshots + 1 if bytes_per_slot(needs.specs) else 0
    return PoolSize(config.num_pages, num_slots, min(wanted, room))


def _check_room(
    config: WorkerConfig,
    ranges: Sequence[LayerRange],
    needs: PoolNeeds,
    size: PoolSize,
    room_bytes: int,
) -> None:
    """Raise ConfigError for a cache that this process's machine or device could not hold if it were
    empty."""
    own = config.placement.pipeline_rank
    cost = stage_costs(needs.specs, ranges, needs.scratch)[own]
    cache = (
        size.num_pages * cost.page_bytes
        + size.num_slots * cost.slot_bytes
        + needs.num_scratch * cost.scratch_bytes
    )
    if cache > room_bytes:
        flag, less = (
            ("num_pages", "fewer pages, or --memory-mb")
            if config.num_pages
            else ("memory_mb", "less of it, or a smaller --max-running")
        )
        asked = f"--{flag.replace('_', '-')} {getattr(config, flag)}"
        raise ConfigError(
            f"{asked} make a cache of {_mib(cache)} on stage {own} (layers {ranges[own]}), and beside "
            f"its weights {_place(config)} has {_mib(room_bytes)}: {less}",
            field=flag,
        )


def _cache_bytes(
    config: WorkerConfig, ranges: Sequence[LayerRange], weights: Sequence[int], memory: Memory
) -> int:
    """Of each stage; what the share leaves beside the largest stage's weights, so that all have the
    same."""
    if config.memory_mb:
        return config.memory_mb * MIB
    found = memory(config.device)
    total = found.total_bytes
    host_share = CONTAINER_SHARE if found.is_limited else HOST_SHARE
    share = config.memory_share or (host_share if config.device == "cpu" else DEVICE_SHARE)
    left = int(share * total) - PROCESS_BYTES - max(weights)
    if left <= 0:
        largest = weights.index(max(weights))
        raise ConfigError(
            f"nothing is left for a cache: {share:g} (--memory-share) of the {_mib(total)} of "
            f"{_place(config)} are {_mib(int(share * total))}, stage {largest} (layers "
            f"{ranges[largest]}) has {_mib(max(weights))} of weights and a process takes "
            f"{_mib(PROCESS_BYTES)} besides; give a larger --memory-share, --memory-mb, or more stages",
            field="memory_share",
        )
    return left


def _ways(config: WorkerConfig, needs: PoolNeeds, needed_mib: int) -> str:
    return (
        f"--memory-mb {needed_mib} would do"
        + (", or a shorter --max-context" if config.max_context else "")
        + (", or a smaller --max-running" if bytes_per_slot(needs.specs) else "")
    )


def _shortened(wanted: int, context: int, budget: int, needed_mib: int) -> str:
    return (
        f"the context is {context} tokens, not the model's {wanted}: the cache of {_mib(budget)} per stage holds "
        f"no longer request; --memory-mb {needed_mib} would, and --max-context chooses a shorter one"
    )


def _place(config: WorkerConfig) -> str:
    return "this machine" if config.device == "cpu" else f"device {config.device}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"

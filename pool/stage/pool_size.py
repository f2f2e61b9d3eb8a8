"""The size of a pool's cache and its longest context, from flags or from the machine's memory.

Every stage computes this from inputs that are the same on all of them: the checkpoint, the flags,
and the total memory of equal machines or containers. So all stages get the same counts. The memory
that is free at the moment is not used.
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

HOST_SHARE = 0.4  # a host runs other processes as well: another worker, a router
# these run no other processes
CONTAINER_SHARE = 0.8
DEVICE_SHARE = 0.85
PROCESS_BYTES = 384 * MIB  # memory of a worker in addition to weights and cache
MIN_CONTEXT_TOKENS = 512  # a shorter context is useless, unless the model has no longer one

Memory = Callable[[str], HostMemory]


@dataclass(frozen=True)
class PoolNeeds:
    """The memory needs of a pool.

    specs          all caches of the whole model, as the first rank has them
    max_held       requests that hold memory at the same time
    scratch        records for trees, `num_scratch` of them (see `plan_pools`)
    draft_bytes    weights of the draft model on the last stage
    max_snapshots  cached recurrent states, limited to a fifth of the cache memory
    """

    specs: tuple[CacheSpec, ...]
    max_held: int
    scratch: tuple[CacheSpec, ...] = ()
    num_scratch: int = 0
    draft_bytes: int = 0
    max_snapshots: int = 0


@dataclass(frozen=True)
class PoolSize:
    """The size of a pool. Pages and slots include the null record.

    `notice` is a text for operators, or empty.
    """

    num_pages: int
    num_slots: int
    context_tokens: int  # prompt and output of one request together
    notice: str = ""


def memory_of(device: str) -> HostMemory:
    """Return the memory of a device by its name, or of the host.

    Raises:
        ConfigError: there is no such device.
    """
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
    """Return the pool size.

    Raises:
        ConfigError: weights and cache do not fit, or the requested context does not; the message
            shows the arithmetic and names the flags.
    """
    weights = [description.weight_bytes(layers, config.placement.tensor) for layers in ranges]
    weights[-1] += needs.draft_bytes
    own = config.placement.pipeline_rank
    _check_weights(config, ranges[own], weights[own], memory)
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


def _check_weights(
    config: WorkerConfig, layers: LayerRange, num_bytes: int, memory: Memory
) -> None:
    """Raise ConfigError if a stage's weights do not fit into the free memory."""
    if num_bytes and num_bytes > (free := memory(config.device).available_bytes):
        raise ConfigError(
            f"stage {config.placement.pipeline_rank} (layers {layers}) has {_mib(num_bytes)} of "
            f"weights, and {_mib(free)} are free on {_place(config)}: more stages or ranks "
            f"(--world-size, --tp; with baton up, --prefill-pp, --prefill-tp, --decode-pp and "
            f"--decode-tp) divide them",
            field="model",
        )


def resume_notice(config: WorkerConfig, chunk_grid: int) -> str:
    """Return a text for operators about the positions at which prompts resume, or an empty one.

    States are kept on the model's grid, and pages are shared whole.
    """
    step = math.lcm(config.page_size, chunk_grid)
    if not config.prefix_cache or step == max(config.page_size, chunk_grid):
        return ""
    return (
        f"prompts resume from the prefix cache only at multiples of {step} tokens, at which pages of "
        f"{config.page_size} tokens (--page-size) and the model's grid of {chunk_grid} meet: a page size that "
        f"divides {chunk_grid}, or is a multiple of it, shares more"
    )


def _needed_mib(
    config: WorkerConfig, ranges: Sequence[LayerRange], needs: PoolNeeds, context_tokens: int
) -> int:
    """Return the MiB that each stage needs, with one request of this number of tokens."""
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
    """Return the number of cached states, the same on every stage."""
    largest = max(cost.slot_bytes for cost in stage_costs(needs.specs, ranges))
    return min(needs.max_snapshots, budget // SNAPSHOT_SHARE // largest) if largest else 0


def _wanted_context(config: WorkerConfig, description: ModelDescription) -> int:
    limit = description.facts.max_context_tokens
    named = description.facts.context_field
    if config.max_context > limit:
        raise ConfigError(
            f"--max-context must be at most {limit}, the model's own (its {named}), got "
            f"{config.max_context}",
            field="max_context",
        )
    return config.max_context or limit


def _by_pages(config: WorkerConfig, needs: PoolNeeds, wanted: int) -> PoolSize:
    """Return the size for the requested number of pages."""
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
    """Check that the cache fits into the machine's or device's memory next to the weights.

    Raises:
        ConfigError: it would not fit even if all of that memory were free.
    """
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
            f"{asked} make a cache of {_mib(cache)} on stage {own} (layers {ranges[own]}), and next to "
            f"its weights {_place(config)} has {_mib(room_bytes)}: {less}",
            field=flag,
        )


def _cache_bytes(
    config: WorkerConfig, ranges: Sequence[LayerRange], weights: Sequence[int], memory: Memory
) -> int:
    """Return the cache bytes of each stage.

    They are the share of the memory less the largest stage's weights, so that all stages have the
    same.

    Raises:
        ConfigError: nothing is left.
    """
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
            f"no memory is left for a cache: {share:g} (--memory-share) of the {_mib(total)} of "
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

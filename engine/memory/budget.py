"""Number of pages and slots of a pool.

Page ids and slot ids are the same on every stage, so the counts must be equal too, although the
stages own different layers. Each stage knows the cache specs of the whole model and the whole
partition. It computes what every stage can hold and takes the minimum, so the stages need no
communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.layer_range import LayerRange
from engine.memory.layout import CacheSpec, PoolGeometry, bytes_per_page, bytes_per_slot
from engine.memory.leases import pages_for_tokens
from runtime.errors import ConfigError

_SMALL_POOL = 32  # requests


@dataclass(frozen=True)
class StageCost:
    """The bytes of one page, slot and scratch record of a stage; 0 without layers of that kind."""

    layers: LayerRange
    page_bytes: int
    slot_bytes: int
    scratch_bytes: int = 0


@dataclass(frozen=True)
class PoolBudget:
    """The size of a pool.

    Both counts include the null record; `num_slots` is 0 without recurrent layers.
    """

    num_pages: int
    num_slots: int


def stage_costs(
    specs: Sequence[CacheSpec], partition: Sequence[LayerRange], scratch: Sequence[CacheSpec] = ()
) -> tuple[StageCost, ...]:
    """Return the bytes per page, slot and scratch record of each stage."""
    costs = []
    for layers in partition:
        local = [spec for spec in specs if spec.layer_id in layers]
        kept = [spec for spec in scratch if spec.layer_id in layers]
        costs.append(
            StageCost(layers, bytes_per_page(local), bytes_per_slot(local), bytes_per_slot(kept))
        )
    return tuple(costs)


def plan_pools(
    specs: Sequence[CacheSpec],
    partition: Sequence[LayerRange],
    *,
    budget_bytes: int,
    page_size: int,
    max_context_tokens: int,
    num_requests: int,
    scratch: Sequence[CacheSpec] = (),
    num_scratch: int = 0,
    num_snapshots: int = 0,
) -> PoolBudget:
    """Divide `budget_bytes`, the cache memory of *each* stage, between scratch, slots and pages.

    `num_scratch` records, including the null record, hold the verification states of running
    requests; `scratch` are the tensors of one record. Each of `num_requests` (running and arriving)
    gets a slot, and so does each of `num_snapshots` states of a prefix cache. The rest becomes
    pages: as many as the stage with the least memory can hold, and at most what `num_requests` of
    `max_context_tokens` can use.

    Raises:
        ConfigError: a stage cannot hold the scratch, the slots and the pages of one request of
            `max_context_tokens`; the message shows the sum.
    """
    costs = stage_costs(specs, partition, scratch)
    num_slots = _slots(specs, num_requests + num_snapshots)
    pages_per_request = pages_for_tokens(max_context_tokens, page_size)
    num_pages = 1 + num_requests * pages_per_request
    for rank, cost in enumerate(costs):
        left = budget_bytes - num_scratch * cost.scratch_bytes - num_slots * cost.slot_bytes
        if left < (1 + pages_per_request) * cost.page_bytes:
            raise ConfigError(
                f"cache budget of {budget_bytes} bytes is too small for one request of {max_context_tokens} tokens: "
                + _needs(rank, cost, num_scratch, num_slots, pages_per_request),
                field="budget_bytes",
            )
        if cost.page_bytes:
            num_pages = min(num_pages, left // cost.page_bytes)
    return PoolBudget(num_pages=num_pages, num_slots=num_slots)


def longest_context(
    specs: Sequence[CacheSpec],
    partition: Sequence[LayerRange],
    *,
    budget_bytes: int,
    page_size: int,
    num_requests: int,
    at_most: int,
    scratch: Sequence[CacheSpec] = (),
    num_scratch: int = 0,
    num_snapshots: int = 0,
) -> int:
    """Return the tokens of the longest request that fits on every stage next to scratch and slots.

    The result is a multiple of the page size or `at_most`. It is below 1 if scratch and slots do
    not fit.
    """
    num_slots = _slots(specs, num_requests + num_snapshots)
    longest = at_most
    for cost in stage_costs(specs, partition, scratch):
        left = budget_bytes - num_scratch * cost.scratch_bytes - num_slots * cost.slot_bytes
        if left < 0:
            return 0
        if cost.page_bytes:
            longest = min(longest, (left // cost.page_bytes - 1) * page_size)
    return longest


def smallest_budget(
    specs: Sequence[CacheSpec],
    partition: Sequence[LayerRange],
    *,
    page_size: int,
    max_context_tokens: int,
    num_requests: int,
    scratch: Sequence[CacheSpec] = (),
    num_scratch: int = 0,
    num_snapshots: int = 0,
) -> int:
    """Return the bytes per stage with which one request of `max_context_tokens` fits."""
    num_slots = _slots(specs, num_requests + num_snapshots)
    num_pages = 1 + pages_for_tokens(max_context_tokens, page_size)
    return max(
        num_scratch * cost.scratch_bytes + num_slots * cost.slot_bytes + num_pages * cost.page_bytes
        for cost in stage_costs(specs, partition, scratch)
    )


def _slots(specs: Sequence[CacheSpec], num_requests: int) -> int:
    return num_requests + 1 if bytes_per_slot(specs) else 0


def describe_pools(geometry: PoolGeometry) -> str:
    """Describe a stage's pools for its log: counts without the null records, bytes with them."""
    (cost,) = stage_costs(geometry.local_specs(), [geometry.layers])
    num_bytes = geometry.num_pages * cost.page_bytes + geometry.num_slots * cost.slot_bytes
    pages = (
        f"{geometry.num_pages - 1} pages of {geometry.page_size} tokens and {cost.page_bytes} bytes"
    )
    slots = f"{max(0, geometry.num_slots - 1)} state slots of {cost.slot_bytes} bytes"
    return f"layers {geometry.layers}, {pages}, {slots}, {num_bytes / (1 << 20):.1f} MiB of cache"


def decode_requests(max_running: int, *, num_landing: int = 0) -> int:
    """Return the number of requests that a decode pool holds at once.

    These are the running requests and `num_landing` whose prompts are still being transferred, so
    that a full pool can receive. With `num_landing` 0 their number follows a common rule: twice
    `max_running` in a pool of up to 32, where their memory is small, and none in a larger one.
    """
    return max_running + (num_landing or (2 * max_running if max_running <= _SMALL_POOL else 0))


def _needs(
    rank: int, cost: StageCost, num_scratch: int, num_slots: int, pages_per_request: int
) -> str:
    total = (
        num_slots * cost.slot_bytes
        + (1 + pages_per_request) * cost.page_bytes
        + num_scratch * cost.scratch_bytes
    )
    kept = f"{num_scratch} states of trees * {cost.scratch_bytes} + " if cost.scratch_bytes else ""
    return (
        f"stage {rank} (layers {cost.layers}) needs {kept}{num_slots} slots * {cost.slot_bytes} "
        f"+ (1 null page + {pages_per_request} pages) * {cost.page_bytes} = {total} bytes"
    )

"""Metrics of a pool's leader."""

from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from runtime.observe.metrics.instruments import (
    STAGE_S,
    STEP_S,
    create_counter,
    create_gauge,
    create_histogram,
    create_info,
)

ACCEPT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 17)


@dataclass(frozen=True)
class LeaderMetrics:
    """Work of a pool, as its leader sees it."""

    queue_depth: Gauge
    queue_oldest_s: Gauge
    queue_s: Histogram
    running: Gauge
    prompt_tokens: Counter
    output_tokens: Counter
    step_s: Histogram
    idle_ratio: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            queue_depth=create_gauge(registry, "queue_depth", "Requests queued on this worker."),
            queue_oldest_s=create_gauge(
                registry,
                "queue_oldest_seconds",
                "Age of the oldest request queued on this worker.",
            ),
            queue_s=create_histogram(
                registry, "queue_seconds", "Time a request was queued on this worker.", STAGE_S
            ),
            running=create_gauge(registry, "running", "Requests that hold memory."),
            prompt_tokens=create_counter(registry, "prompt_tokens", "Prompt tokens prefilled."),
            output_tokens=create_counter(registry, "output_tokens", "Tokens sampled."),
            step_s=create_histogram(
                registry,
                "pp_step_seconds",
                "Time of one batch through all stages, from launch to result.",
                STEP_S,
            ),
            idle_ratio=create_gauge(
                registry,
                "pp_bubble_ratio",
                "Share of recent time in which stage 0 was idle while batches were in flight.",
            ),
        )


@dataclass(frozen=True)
class PoolMetrics:
    """Memory of a pool; page and slot ids are the same on every stage."""

    pages_total: Gauge
    pages_used: Gauge
    slots_total: Gauge
    slots_used: Gauge
    usage_ratio: Gauge
    pages_held: Gauge
    leases: Gauge
    imbalances: Counter
    roles: Gauge
    cache_config: Info
    compat: Info

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            pages_total=create_gauge(registry, "kv_pages", "KV-cache pages of the pool."),
            pages_used=create_gauge(registry, "kv_pages_used", "KV-cache pages under lease."),
            slots_total=create_gauge(registry, "state_slots", "Recurrent-state slots of the pool."),
            slots_used=create_gauge(
                registry, "state_slots_used", "Recurrent-state slots under lease."
            ),
            usage_ratio=create_gauge(
                registry, "kv_usage_ratio", "Share of KV-cache pages under lease."
            ),
            pages_held=create_gauge(
                registry,
                "kv_pages_held_for_transfer",
                "Pages leased for transfers in progress rather than for computing.",
            ),
            leases=create_gauge(
                registry,
                "kv_leases",
                "Requests that hold memory, by state; draining ones are counted twice.",
                "state",
            ),
            imbalances=create_counter(
                registry, "kv_imbalances", "Broken invariants, such as pages without an owner."
            ),
            roles=create_gauge(
                registry,
                "pool_roles",
                "Whether the pool takes requests of a role that it can serve (1) or not (0).",
                "role",
            ),
            cache_config=create_info(
                registry,
                "cache_config",
                "Geometry of the pool's memory.",
                "page_size",
                "num_pages",
                "num_slots",
            ),
            compat=create_info(
                registry,
                "compat",
                "Compatibility digest, which must match on both sides of a handoff.",
                "hash",
            ),
        )


@dataclass(frozen=True)
class SpeculationMetrics:
    """Drafts of a decode pool that speculates."""

    drafted: Counter
    accepted: Counter
    accept_length: Histogram
    step_s: Histogram

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            drafted=create_counter(
                registry,
                "spec_drafted_tokens",
                "Draft tokens that were verified, by proposer.",
                "proposer",
            ),
            accepted=create_counter(
                registry,
                "spec_accepted_tokens",
                "Draft tokens that were accepted, by proposer and depth.",
                "proposer",
                "depth",
            ),
            accept_length=create_histogram(
                registry,
                "spec_accept_length",
                "Tokens that a request gained per verification step.",
                ACCEPT_LENGTHS,
            ),
            step_s=create_histogram(
                registry,
                "spec_step_seconds",
                "Time between results of verification steps.",
                STEP_S,
                "drafts",
            ),
        )


@dataclass(frozen=True)
class AdapterMetrics:
    """LoRA adapters of a pool."""

    adapters: Gauge
    num_bytes: Gauge
    max_bytes: Gauge
    requests: Gauge
    loads: Counter
    load_s: Histogram
    evictions: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            adapters=create_gauge(
                registry,
                "adapters",
                "Adapters that requests may have, by state: loaded (in memory), or cold (loaded when a "
                "request needs it).",
                "state",
            ),
            num_bytes=create_gauge(
                registry, "adapter_memory_used_bytes", "Memory of the loaded adapters."
            ),
            max_bytes=create_gauge(
                registry, "adapter_memory_limit_bytes", "Memory for adapters (--adapters-mb)."
            ),
            requests=create_gauge(
                registry,
                "adapter_requests",
                "Requests that have an adapter, by its name; those that wait until it is loaded, too.",
                "adapter",
            ),
            loads=create_counter(
                registry,
                "adapter_loads",
                "Loads of adapters while the pool serves, by result: loaded or failed.",
                "result",
                zeros=(("loaded",), ("failed",)),
            ),
            load_s=create_histogram(
                registry,
                "adapter_load_seconds",
                "Time to load an adapter on all stages, with the wait for memory.",
                STAGE_S,
            ),
            evictions=create_counter(
                registry,
                "adapter_evictions",
                "Adapters that left memory because another one needed it.",
            ),
        )

"""Metrics of the router and of its clients."""

from dataclasses import dataclass
from itertools import product
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from runtime.observe.metrics.instruments import (
    E2E_S,
    FAILURES,
    STAGE_S,
    TIERS,
    create_counter,
    create_gauge,
    create_histogram,
)

TPOT_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)

TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)

PICK_S = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1)


@dataclass(frozen=True)
class RouterMetrics:
    """Client-visible latencies, and the router's decisions."""

    ttft_s: Histogram
    tpot_s: Histogram
    itl_s: Histogram
    e2e_s: Histogram
    stage_s: Histogram
    prompt_tokens: Counter
    completion_tokens: Counter
    queue_depth: Gauge
    queue_oldest_s: Gauge
    running: Gauge
    paused: Gauge
    refused: Counter
    dropped: Counter
    decisions: Counter
    placements: Counter
    pick_s: Histogram
    retries: Counter
    migrations: Counter
    resumptions: Counter
    discovery_errors: Counter
    workers: Gauge
    cache_predictions: Counter
    tier_tokens: Counter
    kv_hints: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            ttft_s=create_histogram(
                registry, "ttft_seconds", "Time from request received to first token sent.", TTFT_S
            ),
            tpot_s=create_histogram(
                registry, "tpot_seconds", "Mean time per output token after the first.", TPOT_S
            ),
            itl_s=create_histogram(
                registry, "itl_seconds", "Time between two messages of a stream.", TPOT_S
            ),
            e2e_s=create_histogram(
                registry,
                "e2e_seconds",
                "Time from request received to finish, by finish reason.",
                E2E_S,
                "outcome",
                zeros=("failed",),
            ),
            stage_s=create_histogram(
                registry, "stage_seconds", "Duration of each stage of a request.", STAGE_S, "stage"
            ),
            prompt_tokens=create_counter(
                registry, "prompt_tokens", "Prompt tokens of accepted requests."
            ),
            completion_tokens=create_counter(
                registry, "completion_tokens", "Tokens sent to clients."
            ),
            queue_depth=create_gauge(registry, "queue_depth", "Requests queued in the router."),
            queue_oldest_s=create_gauge(
                registry, "queue_oldest_seconds", "Age of the oldest request queued in the router."
            ),
            running=create_gauge(
                registry, "router_running", "Requests running on a pair of workers."
            ),
            paused=create_gauge(
                registry, "router_paused", "Preempted requests that wait for their turn to resume."
            ),
            refused=create_counter(
                registry,
                "router_refused",
                "Requests rejected on arrival, by cause: queue_full, wait (longer than the limit), "
                "deadline (it would end after its deadline), workers (none available).",
                "cause",
            ),
            dropped=create_counter(
                registry,
                "router_dropped",
                "Queued requests rejected before they reached a worker, by cause: deadline (can no "
                "longer be met), wait (the limit), workers (none available).",
                "cause",
            ),
            decisions=create_counter(
                registry,
                "router_decisions",
                "Worker selections, by policy and result.",
                "policy",
                "result",
            ),
            placements=create_counter(
                registry,
                "placements",
                "Requests placed on one worker of both roles (aggregated) or on two workers, by reason.",
                "kind",
                "why",
                zeros=(
                    ("aggregated", "no_handoff"),
                    ("aggregated", "handoff"),
                    ("aggregated", "load"),
                    ("disaggregated", "load"),
                    ("disaggregated", "streams"),
                    ("disaggregated", "roles"),
                ),
            ),
            pick_s=create_histogram(
                registry, "router_pick_seconds", "Duration of one worker selection.", PICK_S
            ),
            retries=create_counter(
                registry,
                "router_retries",
                "Retries of a request on another worker.",
                "role",
                "reason",
                zeros=product(("prefill", "decode"), FAILURES),
            ),
            migrations=create_counter(
                registry,
                "migrations",
                "Requests that left their decode pool: it was lost, drained or late, or they gave way.",
                "type",
                "outcome",
                zeros=product(("lost", "drained", "held_up", "preempted"), ("resumed", "failed")),
            ),
            resumptions=create_counter(
                registry,
                "resumptions",
                "Responses that another router began and this one continued.",
            ),
            discovery_errors=create_counter(
                registry,
                "discovery_errors",
                "Failed worker lookups; the last known workers remain in use.",
                "kind",
                zeros=(("dns",), ("kubernetes",)),
            ),
            workers=create_gauge(
                registry, "router_workers", "Known workers, by state.", "role", "state"
            ),
            cache_predictions=create_counter(
                registry,
                "router_cache_predictions",
                "Prompts by the number of tokens that prefill reused, compared with its report: "
                "equal, more or fewer.",
                "outcome",
                zeros=(("equal",), ("more",), ("fewer",)),
            ),
            tier_tokens=_tier_tokens(registry),
            kv_hints=_kv_hints(registry),
        )


def _tier_tokens(registry: CollectorRegistry) -> Counter:
    return create_counter(
        registry,
        "router_tier_tokens",
        "Tokens of prompts by where the worker that read them had them from: computed, memory "
        "(its own cache), worker (the cache of another one), host (host memory beside its device), disk "
        "or server (a cache server).",
        "tier",
        zeros=tuple((tier,) for tier in ("computed", "memory", "worker", *TIERS)),
    )


def _kv_hints(registry: CollectorRegistry) -> Counter:
    return create_counter(
        registry,
        "router_kv_hints",
        "Hints about caches in requests, by action (kv.retain, kv.evict, other) and outcome: "
        "applied, unknown (another action or version) or invalid (its payload).",
        "action",
        "outcome",
        zeros=(
            *product(("kv.retain", "kv.evict"), ("applied", "unknown", "invalid")),
            ("other", "unknown"),
        ),
    )


@dataclass(frozen=True)
class ClientMetrics:
    """Shares of the clients that have limits of their own, and of all others together."""

    requests: Counter
    tokens: Counter
    wait_s: Counter
    refused: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            requests=create_counter(
                registry, "client_requests", "Requests accepted, by client.", "client"
            ),
            tokens=create_counter(
                registry,
                "client_tokens",
                "Tokens charged to clients: prompt (computed, not cached) and generated.",
                "client",
                "kind",
            ),
            wait_s=create_counter(
                registry,
                "client_wait_seconds",
                "Time that requests were queued, by client.",
                "client",
            ),
            refused=create_counter(
                registry,
                "client_refused",
                "Requests rejected because a quota of their client is used up.",
                "client",
                "quota",
                zeros=product(
                    ("other",),
                    (
                        "requests_per_minute",
                        "prompt_tokens_per_minute",
                        "generated_tokens_per_minute",
                        "concurrent_requests",
                    ),
                ),
            ),
        )

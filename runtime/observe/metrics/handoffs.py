"""Metrics of handoffs between pools."""

from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from runtime.observe.metrics.instruments import (
    FAILURES,
    create_counter,
    create_gauge,
    create_histogram,
)

TRANSFER_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    5,
)

SESSION_FAILURES = tuple(reason.lower() for reason in FAILURES)


@dataclass(frozen=True)
class HandoffMetrics:
    """Handoffs, as the leader of one side sees them."""

    sessions: Gauge
    transfer_s: Histogram
    bytes_moved: Counter
    failures: Counter
    handshake_s: Histogram
    handshake_failures: Counter
    leases_expired: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            sessions=create_gauge(registry, "kv_sessions", "Open handoff sessions of this pool."),
            transfer_s=create_histogram(
                registry,
                "kv_transfer_seconds",
                "Time from session opened to all data moved.",
                TRANSFER_S,
            ),
            bytes_moved=create_counter(
                registry, "kv_transfer_bytes", "Bytes transferred, by kind.", "kind"
            ),
            failures=create_counter(
                registry,
                "kv_transfer_failures",
                "Failed handoff sessions, by reason.",
                "reason",
                zeros=zip((*SESSION_FAILURES, "source_replaced")),
            ),
            handshake_s=create_histogram(
                registry,
                "handshake_seconds",
                "Time from session opened to every stage ready to send or receive.",
                TRANSFER_S,
            ),
            handshake_failures=create_counter(
                registry,
                "handshake_failures",
                "Handoff sessions that failed before every stage was ready, by reason.",
                "reason",
                zeros=zip(SESSION_FAILURES),
            ),
            leases_expired=create_counter(
                registry,
                "kv_lease_expired",
                "Requests ended because a handoff exceeded its time limit.",
            ),
        )


@dataclass(frozen=True)
class ArrivalMetrics:
    """Metrics of the receiving side of handoffs, and of its requests."""

    exposed_s: Histogram
    integrity_failures: Counter
    unsent_bytes: Counter
    preemptions: Counter
    local_prefills: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            exposed_s=create_histogram(
                registry,
                "kv_transfer_exposed_seconds",
                "Time from first token known to all data received and verified.",
                TRANSFER_S,
            ),
            integrity_failures=create_counter(
                registry, "kv_integrity_failures", "Received items whose digest did not match."
            ),
            unsent_bytes=create_counter(
                registry,
                "cache_unsent_bytes",
                "Bytes of prompts that were not transferred because the pool had cached them.",
            ),
            preemptions=create_counter(
                registry, "preemptions", "Requests preempted because pages ran out."
            ),
            local_prefills=create_counter(
                registry,
                "local_prefill",
                "Prompts prefilled on this decode pool instead of a prefill pool.",
                "reason",
                zeros=(("preempted",), ("short_rest",), ("own_prompt",), ("in_place",)),
            ),
        )

    def preempted(self) -> None:
        """Count a preempted request, whose prompt is computed again. Thread-safe."""
        self.preemptions.inc()
        self.local_prefills.labels("preempted").inc()

"""Metrics of what a pool keeps of earlier prompts, in memory and in tiers, and pulls from others."""

from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from runtime.observe.metrics.instruments import (
    STAGE_S,
    TIERS,
    create_counter,
    create_gauge,
    create_histogram,
)


@dataclass(frozen=True)
class CacheMetrics:
    """Prefix cache of a pool.

    Three counters replace a ratio: tokens that could have been cached, tokens that were, and tokens
    that were reused.
    """

    queried: Counter
    matched: Counter
    reused: Counter
    evicted: Counter
    pages: Gauge
    snapshots: Gauge
    sessions: Gauge
    retained: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            queried=create_counter(
                registry,
                "cache_queried_tokens",
                "Prompt tokens looked up in the prefix cache.",
            ),
            matched=create_counter(
                registry, "cache_matched_tokens", "Prompt tokens found in the prefix cache."
            ),
            reused=create_counter(
                registry,
                "cache_reused_tokens",
                "Cached prompt tokens that were reused: not computed, or on decode pools not sent, again.",
            ),
            evicted=create_counter(
                registry,
                "cache_evicted_pages",
                "Pages evicted from the prefix cache, by cause: pressure (a request needed them), "
                "flush (an operator or a lost stage).",
                "cause",
                zeros=(("pressure",), ("flush",)),
            ),
            pages=create_gauge(
                registry,
                "cache_pages",
                "Pages in the prefix cache, including those that requests share.",
            ),
            sessions=create_gauge(
                registry, "cache_sessions", "Sessions that have a point in the prefix cache."
            ),
            retained=create_gauge(
                registry,
                "cache_retained_pages",
                "Pages that the prefix cache keeps longer for sessions; those that sessions share "
                "count for each.",
            ),
            snapshots=create_gauge(
                registry,
                "cache_snapshots",
                "Recurrent states in the prefix cache; decode pools receive one with each prompt.",
            ),
        )


@dataclass(frozen=True)
class PullMetrics:
    """Blocks that a pool gets from the prefix caches of others, and gives to them."""

    blocks: Counter
    seconds: Histogram
    lent: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            blocks=create_counter(
                registry,
                "pull_blocks",
                "Blocks that another pool had in its prefix cache, one per page, by what happened: "
                "read, missing (the other pool did not send them), slower (not asked for, because it "
                "takes longer than to compute them).",
                "event",
                zeros=(("read",), ("missing",), ("slower",)),
            ),
            seconds=create_histogram(
                registry,
                "pull_seconds",
                "Time to receive a prompt's blocks from another pool on all stages.",
                STAGE_S,
            ),
            lent=create_counter(
                registry, "lent_blocks", "Blocks of the prefix cache that were sent to other pools."
            ),
        )


@dataclass(frozen=True)
class TierMetrics:
    """Copies of a pool's prefix cache on the host, on disk and on a server."""

    blocks: Counter
    read_s: Histogram
    num_bytes: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        events = ("written", "read", "missing", "slower", "skipped")
        return cls(
            blocks=create_counter(
                registry,
                "cache_tier_blocks",
                "Blocks of the tiers of the prefix cache, one per page, by what happened: written, read, "
                "missing (removed or damaged before they were read), slower (not read, because it takes "
                "longer than to compute them), skipped (not written, because they were evicted before "
                "their turn). Tiers: host, disk, server.",
                "tier",
                "event",
                zeros=tuple((tier, event) for tier in TIERS for event in events),
            ),
            read_s=create_histogram(
                registry,
                "cache_tier_read_seconds",
                "Time to read a prompt's blocks from a tier on all stages.",
                STAGE_S,
                "tier",
                zeros=TIERS,
            ),
            num_bytes=create_gauge(
                registry,
                "cache_tier_used_bytes",
                "Size of a tier as it was lately: of the first process's objects in host memory, of the "
                "folder on disk, of all that the server holds.",
                "tier",
            ),
        )

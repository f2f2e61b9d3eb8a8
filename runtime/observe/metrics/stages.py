"""Metrics of each process of a pool."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from runtime.observe.metrics.instruments import (
    STEP_S,
    create_counter,
    create_gauge,
    create_histogram,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

# Reasons of `transfer.transport.refusals` by channel.
REFUSALS = {
    "frames": ("foreign", "earlier", "crossed", "replayed", "skipped", "damaged", "oversized"),
    "handoff": ("foreign", "late", "repeated"),
    "parts": ("earlier", "replayed", "skipped", "damaged"),
}


@dataclass(frozen=True)
class StageMetrics:
    """Forwards of one stage of a pool; the label `stage` is its rank."""

    batch_rows: Histogram
    batch_tokens: Histogram
    step_s: Histogram
    link_bytes: Counter
    plans: Counter
    forwards: Counter
    expert_tokens: Counter
    expert_busiest: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            batch_rows=create_histogram(registry, "batch_rows", "Requests per forward.", ROWS),
            batch_tokens=create_histogram(
                registry, "batch_tokens", "New tokens per forward.", TOKENS
            ),
            step_s=create_histogram(
                registry,
                "pp_stage_step_seconds",
                "Duration of one forward of this stage.",
                STEP_S,
                "stage",
            ),
            link_bytes=create_counter(
                registry,
                "pp_link_bytes",
                "Bytes of frames sent to the next stage.",
                "stage",
            ),
            plans=create_counter(
                registry,
                "plans",
                "Attention plans, by path: target, draft_extend or draft_round.",
                "path",
            ),
            forwards=create_counter(
                registry,
                "forwards",
                "Batches that this stage ran: as a captured graph or a recording, eagerly, in two "
                "halves, or idle while other data ranks ran.",
                "kind",
            ),
            expert_tokens=create_counter(
                registry,
                "expert_tokens",
                "Tokens routed to each expert of this process, summed over its layers.",
                "expert",
            ),
            expert_busiest=create_gauge(
                registry,
                "expert_busiest_ratio",
                "Recent load of a layer's busiest expert over the layer's average, in the most "
                "uneven layer.",
            ),
        )


@dataclass(frozen=True)
class RefusalMetrics:
    """Messages between processes that a worker rejected."""

    refused: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            refused=create_counter(
                registry,
                "refused_messages",
                "Rejected messages of UCX and shared memory, by channel: frames (between stages), "
                "handoff, parts (between ranks); by reason: foreign (of a stranger or another "
                "pool), earlier (of an earlier pool formation), crossed (for another member), "
                "replayed, skipped (messages before it are missing), damaged, oversized, late "
                "(its session is over), repeated.",
                "channel",
                "reason",
                zeros=[
                    (channel, reason) for channel, reasons in REFUSALS.items() for reason in reasons
                ],
            )
        )

    def count(self, channel: str) -> Callable[[str], object]:
        """Return a function that counts a rejection on this channel, given its reason."""
        return lambda reason: self.refused.labels(channel, str(reason)).inc()

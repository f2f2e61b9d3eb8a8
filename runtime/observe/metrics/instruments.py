"""Prometheus instruments, and what several sets of them share.

Names are stable; units are base units.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

E2E_S = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)

STAGE_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    300,
)

STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

TIERS = ("host", "disk", "server")  # of the prefix cache, beyond the memory of the pools

# Reasons why a session or an attempt may fail: those of `runtime.errors` that workers meet. Their
# counters are exported as 0 from the start, because a series that appears with its first failure
# has no increase that an alert could detect.
FAILURES = (
    "ABORTED_BY_CLIENT",
    "DEADLINE_EXCEEDED",
    "DIGEST_MISMATCH",
    "DRAINING",
    "HANDOFF_FAILED",
    "HELD_UP",
    "INCOMPATIBLE_PEER",
    "INTERNAL",
    "OUT_OF_CAPACITY",
    "PEER_LOST",
    "UNAVAILABLE",
)


def create_counter(
    registry: CollectorRegistry,
    name: str,
    text: str,
    *labels: str,
    zeros: Iterable[tuple[str, ...]] = (),
) -> Counter:
    """Create a counter; `zeros` are label values that are exported before anything was counted."""
    counter = Counter(f"baton_{name}", text, labels, registry=registry)
    for values in zeros:
        counter.labels(*values)
    return counter


def create_gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"baton_{name}", text, labels, registry=registry)


def create_info(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Info:
    """Create facts rather than figures; `info` sets all `labels` at once."""
    info = Info(f"baton_{name}", text, registry=registry)
    info.info(dict.fromkeys(labels, ""))
    return info


def create_histogram(
    registry: CollectorRegistry,
    name: str,
    text: str,
    buckets: Iterable[float],
    *labels: str,
    zeros: Iterable[str] = (),
) -> Histogram:
    """Create a histogram; `zeros` are label values that are exported before any observation."""
    histogram = Histogram(f"baton_{name}", text, labels, buckets=tuple(buckets), registry=registry)
    for value in zeros:
        histogram.labels(value)
    return histogram

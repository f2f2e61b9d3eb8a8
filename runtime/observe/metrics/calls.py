"""Metrics of the gRPC calls of any process."""

from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from runtime.observe.metrics.instruments import (
    E2E_S,
    create_counter,
    create_gauge,
    create_histogram,
)


@dataclass(frozen=True)
class RpcMetrics:
    """Metrics of every gRPC call of this process, updated by the interceptor."""

    requests: Counter
    seconds: Histogram
    running: Gauge
    draining: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            requests=create_counter(
                registry,
                "requests",
                "Completed gRPC calls, by status code.",
                "method",
                "grpc_code",
            ),
            seconds=create_histogram(
                registry, "request_seconds", "Duration of gRPC calls.", E2E_S, "method"
            ),
            running=create_gauge(registry, "requests_in_flight", "Open gRPC calls.", "method"),
            draining=create_gauge(
                registry,
                "draining",
                "1 while this process rejects new calls because it stops, else 0.",
            ),
        )

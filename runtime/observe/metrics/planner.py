"""Metrics of the planner."""

from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge

from runtime.observe.metrics.instruments import create_counter, create_gauge


@dataclass(frozen=True)
class PlannerMetrics:
    """The planner's view of the fleet, and what it did."""

    saturation: Gauge
    wanted: Gauge
    switches: Counter
    readings: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            saturation=create_gauge(
                registry,
                "saturation_ratio",
                "Load of a role over the most that keeps the service level; above 1 it needs more "
                "workers, in proportion.",
                "role",
            ),
            wanted=create_gauge(
                registry,
                "wanted_workers",
                "Workers of a role at which its saturation would be 1; absent until measured.",
                "role",
            ),
            switches=create_counter(
                registry,
                "role_switches",
                "Switches of a worker's roles: switched, failed, or planned in a dry run.",
                "outcome",
                zeros=(("switched",), ("failed",), ("planned",)),
            ),
            readings=create_counter(
                registry,
                "planner_readings",
                "Readings of a router's status.",
                "outcome",
                zeros=(("read",), ("failed",)),
            ),
        )

"""Every metric family that Baton's code can export.

Docs, dashboards, rules and the metrics contract are checked against this catalogue.

for family in families(): family.name, family.kind, family.labels, family.unit, family.roles,
family.text
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from runtime.observe.metrics.caches import CacheMetrics, PullMetrics, TierMetrics
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.metrics.handoffs import ArrivalMetrics, HandoffMetrics
from runtime.observe.metrics.planner import PlannerMetrics
from runtime.observe.metrics.pools import (
    AdapterMetrics,
    LeaderMetrics,
    PoolMetrics,
    SpeculationMetrics,
)
from runtime.observe.metrics.router import ClientMetrics, RouterMetrics
from runtime.observe.metrics.stages import RefusalMetrics, StageMetrics

Instrument = Counter | Gauge | Histogram | Info


class InstrumentSet(Protocol):
    """A dataclass of instruments, as in `runtime.observe.metrics`."""

    @classmethod
    def create(cls, registry: CollectorRegistry) -> object: ...


_POOL: tuple[type[InstrumentSet], ...] = (
    RpcMetrics,
    StageMetrics,
    RefusalMetrics,
    LeaderMetrics,
    PoolMetrics,
    HandoffMetrics,
    AdapterMetrics,
    TierMetrics,
    PullMetrics,
)
# A stage that is not its pool's leader ("follower") has no request metrics.
ROLE_SETS: Mapping[str, tuple[type[InstrumentSet], ...]] = {
    "router": (RpcMetrics, RouterMetrics, ClientMetrics),
    "prefill": (*_POOL, CacheMetrics),
    "decode": (*_POOL, CacheMetrics, ArrivalMetrics, SpeculationMetrics),
    "worker": (*_POOL, CacheMetrics, ArrivalMetrics, SpeculationMetrics),
    "follower": (RpcMetrics, StageMetrics, RefusalMetrics),
    "planner": (PlannerMetrics,),
}
_UNITS = {
    "seconds": "seconds",
    "bytes": "bytes",
    "ratio": "ratio",
    "tokens": "tokens",
    "pages": "pages",
    "info": "none",
}
_SUFFIXES = {"counter": "_total", "info": "_info"}
_SERIES = {"histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True)
class Family:
    """One family under the name that queries use: counters end in _total, infos in _info."""

    name: str
    kind: str  # counter, gauge, histogram or info
    labels: tuple[str, ...]
    unit: str
    roles: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names of its samples."""
        return tuple(self.name + suffix for suffix in _SERIES.get(self.kind, ("",)))


def families() -> list[Family]:
    """Return the families sorted by name.

    A family that has another meaning in a later role has both texts.
    """
    build = Family(
        "baton_build_info",
        "info",
        ("role", "version"),
        "none",
        tuple(ROLE_SETS),
        "Role and version of this process.",
    )
    found = {build.name: build}
    for role, kinds in ROLE_SETS.items():
        for instrument in (
            item for kind in kinds for item in vars(kind.create(CollectorRegistry())).values()
        ):
            family = _family(instrument, role)
            known = found.get(family.name, family)
            roles = known.roles if role in known.roles else (*known.roles, role)
            text = (
                known.text
                if family.text in known.text
                else f"{known.text} {role.capitalize()}: {family.text}"
            )
            found[family.name] = Family(
                known.name, known.kind, known.labels, known.unit, roles, text
            )
    return [found[name] for name in sorted(found)]


def _family(instrument: Instrument, role: str) -> Family:
    (described,) = instrument.describe()
    name = described.name + _SUFFIXES.get(described.type, "")
    words = described.name.split("_")
    unit = (
        "none"
        if described.type == "info"
        else next((_UNITS[word] for word in reversed(words) if word in _UNITS), "count")
    )
    labels = tuple(instrument._value) if isinstance(instrument, Info) else instrument._labelnames  # noqa: SLF001
    return Family(name, described.type, tuple(labels), unit, (role,), described.documentation)

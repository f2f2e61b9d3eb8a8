"""The order in which the planner's process switches roles."""

from collections.abc import Mapping, Sequence

import pytest
from prometheus_client import CollectorRegistry

from baton.load import Slo
from baton.values import ClusterStatus
from planner import service
from planner.fleet_view import BOTH, ONLY_DECODE, ONLY_PREFILL, FleetView
from planner.planner import RolePlan, RolePlanner
from runtime.clock import SystemClock
from runtime.observe.metrics.planner import PlannerMetrics
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity
from tests.planner.test_reader import status, worker

ROLES = {"a:1": ONLY_PREFILL, "b:1": ONLY_DECODE}
SWAPPED = {"a:1": ONLY_DECODE, "b:1": ONLY_PREFILL}


class Swap(RolePlanner):
    """A planner that swaps the roles of two workers."""

    def plan(self, view: FleetView) -> RolePlan:
        return RolePlan(SWAPPED, super().plan(view).saturation, {})


class LateRouter:
    """A router that hears of a switch of roles at its third answer after it."""

    def __init__(self) -> None:
        self.known = dict(ROLES)
        self.unheard: dict[str, tuple[frozenset[str], int]] = {}

    async def refresh(self, now_s: float) -> Mapping[str, "LateRouter"]:
        return {"router": self}

    async def cluster_status(self) -> ClusterStatus:
        for address, (roles, answers) in list(self.unheard.items()):
            self.unheard[address] = roles, answers - 1
            if answers == 1:
                self.known[address] = self.unheard.pop(address)[0]
        return status(
            *(
                worker("prefill", address, roles=sorted(roles))
                for address, roles in self.known.items()
            )
        )


async def test_no_router_hears_that_a_role_ends_before_it_begins_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, switched = LateRouter(), list[tuple[str, frozenset[str], dict[str, frozenset[str]]]]()

    async def set_roles(address: str, roles: Sequence[str], security: ChannelSecurity) -> None:
        switched.append((address, frozenset(roles), dict(router.known)))
        router.unheard[address] = frozenset(roles), 3

    monkeypatch.setattr(service, "set_roles", set_roles)
    metrics = PlannerMetrics.create(CollectorRegistry())
    planner = service.PlannerService(
        router,  # type: ignore[arg-type]
        Swap(Slo(2.0, 0.05)),
        metrics,
        PLAIN_CHANNEL,
        SystemClock(),
        acts=True,
    )
    await planner.step()
    assert [(address, roles) for address, roles, _ in switched] == [
        ("a:1", BOTH),
        ("b:1", BOTH),
        ("a:1", ONLY_DECODE),
        ("b:1", ONLY_PREFILL),
    ]
    for _, _, known in switched[2:]:
        assert known == {"a:1": BOTH, "b:1": BOTH}

"""The choice of roles for the workers of a fleet. Pure; driven by views of it.

    view ─▶ estimates ─▶ headroom of each split ─▶ roles

Workers of both roles stay so while responses keep the time per token. Otherwise the planner takes
the split whose smaller headroom is largest, until the load is light.

Switches are rare by construction. After a plan that changes roles there is none for `MIN_REST_S`,
unless the load differs from that of the plan by more than chance explains, or workers came or went.
A plan goes from one split to another only if the headroom becomes larger by `LEAST_GAIN`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.load import Slo
from planner.capacity import CapacityModel, RoleSplit, splits
from planner.estimates import ArrivalRates, FleetEstimates
from planner.fleet_view import (
    BOTH,
    DECODE,
    ONLY_DECODE,
    ONLY_PREFILL,
    PREFILL,
    FleetView,
    WorkerView,
)

MIN_REST_S = 30.0
SHORT_REST_S = 3.0
LEAST_GAIN = 1.25
CALM = 2.5  # headroom of the best split from which workers get both roles again


_RANK = {ONLY_PREFILL: 0, BOTH: 1, ONLY_DECODE: 2}


@dataclass(frozen=True)
class RolePlan:
    """Roles to switch to, by address, and the saturation of each role before that.

    The saturation is the load over the most load that keeps the promise; above 1 the role needs
    more workers, in proportion. It is 0 while nothing is measured. Workers that start count as if
    they served. `wanted` is the number of workers of a role at which its saturation would be 1;
    it is empty while nothing is measured.
    """

    switches: Mapping[str, frozenset[str]]
    saturation: Mapping[str, float]
    wanted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _LatestPlan:
    """The latest plan that changed roles: its time, the load, and the number of workers."""

    at_s: float
    demand: ArrivalRates
    num_workers: int


@dataclass
class RolePlanner:
    """Planner of one fleet."""

    promise: Slo
    estimates: FleetEstimates = field(default_factory=FleetEstimates)
    _latest: _LatestPlan | None = None

    def plan(self, view: FleetView) -> RolePlan:
        """Apply a view; return the roles to switch and the saturation before that."""
        self.estimates.observe(view)
        model = CapacityModel(self.promise, self.estimates, view)
        room = model.headroom(RoleSplit.of(view.workers))
        saturation = {PREFILL: _inverse(room.prefill), DECODE: _inverse(room.decode)}
        wanted = _wanted(saturation, view.workers) if model.is_known else {}
        serving = [worker for worker in view.workers if worker.is_serving]
        switches: dict[str, frozenset[str]] = {}
        if model.is_known and not self._rests(view.at_s, len(serving)):
            switches = _better_roles(model, serving)
        if switches:
            self._latest = _LatestPlan(view.at_s, self.estimates.demand, len(serving))
        return RolePlan(switches, saturation, wanted)

    def _rests(self, now_s: float, num_workers: int) -> bool:
        """Return whether it is too early for another switch."""
        latest = self._latest
        if latest is None:
            return False
        is_other = latest.num_workers != num_workers or latest.demand.differs(self.estimates.demand)
        return now_s < latest.at_s + (SHORT_REST_S if is_other else MIN_REST_S)


def _better_roles(model: CapacityModel, workers: Sequence[WorkerView]) -> dict[str, frozenset[str]]:
    """Return the switches to the best split; none if it gains too little."""
    now = RoleSplit.of(workers)
    room = max((model.headroom(split).least for split in splits(workers)), default=0.0)
    together = RoleSplit(0, 0, len(workers))
    if all(worker.able == BOTH for worker in workers):
        if now == together and not model.is_slow:
            return {}
        if room >= CALM:
            return switched(workers, together)
    best = max(
        splits(workers),
        key=lambda split: (model.cautious(split), -split.num_changes(now)),
        default=now,
    )
    # A worker of both roles among others is new, and gets one of them without delay.
    gain = 1.0 if 0 < now.both < len(workers) else LEAST_GAIN
    return switched(workers, best) if model.cautious(best) > gain * model.cautious(now) else {}


def _wanted(saturation: Mapping[str, float], workers: Sequence[WorkerView]) -> Mapping[str, float]:
    """Return how many workers each role wants; one of a role that has none.

    Unlike the saturation it does not depend on how many there are, so that an autoscaler does not
    multiply it with a number of another moment.
    """
    counts = {role: sum(role in worker.active for worker in workers) for role in saturation}
    return {
        role: share * counts[role] if counts[role] else 1.0 for role, share in saturation.items()
    }


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf


def switched(workers: Sequence[WorkerView], split: RoleSplit) -> dict[str, frozenset[str]]:
    """Return the roles of the workers that change for a split: those with the least to lose.

    Workers with few requests in decode prefill; of the others those without prompts decode. Those
    that have the role already come first, then those of both roles.
    """
    free = [worker for worker in workers if worker.able == BOTH]
    num_prefill = split.prefill - sum(worker.able == ONLY_PREFILL for worker in workers)
    num_decode = split.decode - sum(worker.able == ONLY_DECODE for worker in workers)
    by_running = sorted(free, key=lambda each: (_RANK.get(each.active, 0), each.running))
    rest = sorted(
        by_running[num_prefill:],
        key=lambda each: (each.active != ONLY_DECODE, each.queued_tokens),
    )
    wanted = [
        *((each, ONLY_PREFILL) for each in by_running[:num_prefill]),
        *((each, ONLY_DECODE) for each in rest[:num_decode]),
        *((each, BOTH) for each in rest[num_decode:]),
    ]
    return {each.address: roles for each, roles in wanted if each.active != roles}

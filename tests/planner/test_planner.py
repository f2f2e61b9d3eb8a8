"""The planner against fleets reckoned by hand: capacities, choices, and how seldom it switches."""

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from baton.load import Slo
from planner.capacity import CapacityModel, RoleSplit, splits
from planner.estimates import ArrivalRates, FleetEstimates, StepLine
from planner.fleet_view import (
    BOTH,
    DECODE,
    ONLY_DECODE,
    ONLY_PREFILL,
    PREFILL,
    FleetView,
    WorkerView,
)
from planner.planner import MIN_REST_S, SHORT_REST_S, RolePlanner, switched

PROMISE = Slo(2.0, 0.05)
PROMPT_RATE, TOKEN_S, MOST_RUNNING = 10_000.0, 0.02, 50


@dataclass
class Fleet:
    """A fleet that serves what arrives at once: workers of equal speed, and counters."""

    active: list[frozenset[str]]
    able: frozenset[str] = BOTH
    away: frozenset[int] = frozenset()
    prompt_tokens: float = 1000.0
    response_tokens: float = 200.0
    beside_token_s: float = TOKEN_S  # of workers of both roles
    at_s: float = 0.0
    computed: float = 0.0
    generated: float = 0.0
    arrived: float = 0.0
    _seen: list[FleetView] = field(default_factory=list)

    def view(self, rate: float) -> FleetView:
        """Return the view one second later, with `rate` requests in this second."""
        self.at_s += 1
        self.arrived += rate
        self.computed += rate * self.prompt_tokens
        self.generated += rate * self.response_tokens
        decoding = max(sum(DECODE in roles for roles in self.active), 1)
        running = round(rate * self.response_tokens * TOKEN_S / decoding)
        workers = [
            WorkerView(
                f"w{index}",
                self.able,
                roles,
                is_serving=index not in self.away,
                queued_tokens=500 if PREFILL in roles else 0,
                running=running if DECODE in roles else 0,
                most_running=MOST_RUNNING,
                prompt_rate=PROMPT_RATE if PREFILL in roles else 0.0,
                token_s=(self.beside_token_s if roles == BOTH else TOKEN_S)
                if DECODE in roles
                else 0.0,
                num_prompt_tokens=round(self.computed / len(self.active)),
                num_output_tokens=round(self.generated / len(self.active)),
            )
            for index, roles in enumerate(self.active)
        ]
        return FleetView(self.at_s, tuple(workers), num_arrived=round(self.arrived))

    def switch(self, switches: dict[str, frozenset[str]]) -> None:
        for address, roles in switches.items():
            self.active[int(address[1:])] = roles


def fleet_of(prefill: int, decode: int) -> Fleet:
    return Fleet([ONLY_PREFILL] * prefill + [ONLY_DECODE] * decode)


def run(planner: RolePlanner, fleet: Fleet, rate: float, seconds: int) -> list[float]:
    """Let the planner act for some seconds; return when it switched."""
    times = []
    for _ in range(seconds):
        plan = planner.plan(fleet.view(rate))
        if plan.switches:
            times.append(fleet.at_s)
            fleet.switch(dict(plan.switches))
    return times


def test_nothing_is_switched_before_anything_is_measured() -> None:
    planner = RolePlanner(PROMISE)
    view = FleetView(1.0, tuple(WorkerView(f"w{i}", BOTH, BOTH) for i in range(4)))
    plan = planner.plan(view)
    assert plan.switches == {}
    assert plan.saturation == {PREFILL: 0.0, DECODE: 0.0}
    assert plan.wanted == {}


@pytest.mark.parametrize(
    ("rate", "prompt_tokens", "response_tokens", "best"),
    [
        # Per request a prefill worker takes 0.1 s of prefill, and a decode worker 0.02 s * tokens / 50.
        (25, 1000, 50, RoleSplit(5, 1)),  # 0.1 and 0.02 s
        (20, 1000, 250, RoleSplit(3, 3)),  # 0.1 and 0.1 s
        (12, 500, 500, RoleSplit(1, 5)),  # 0.05 and 0.2 s
    ],
)
def test_the_mix_of_the_load_decides(
    rate: int, prompt_tokens: int, response_tokens: int, best: RoleSplit
) -> None:
    fleet = fleet_of(3, 3)
    fleet.prompt_tokens, fleet.response_tokens = prompt_tokens, response_tokens
    run(RolePlanner(PROMISE), fleet, rate, 120)
    found = RoleSplit(fleet.active.count(ONLY_PREFILL), fleet.active.count(ONLY_DECODE))
    # One worker more or less gains too little to be switched.
    assert found.num_changes(best) <= 1
    assert found.num_changes(best) < RoleSplit(3, 3).num_changes(best) or best == RoleSplit(3, 3)


def test_a_light_load_leaves_workers_both_roles() -> None:
    """The best split could serve ten times as much. Roles of a fleet under load come back, too."""
    fleet, planner = Fleet([BOTH] * 4), RolePlanner(PROMISE)
    assert run(planner, fleet, 1, 60) == []
    assert fleet.active == [BOTH] * 4
    split = fleet_of(2, 2)
    assert len(run(RolePlanner(PROMISE), split, 1, 120)) == 1
    assert split.active == [BOTH] * 4


def test_slow_tokens_split_a_fleet() -> None:
    """Chunks beside steps break the promise for tokens."""
    fleet = Fleet([BOTH] * 4, beside_token_s=3 * TOKEN_S)
    fleet.prompt_tokens, fleet.response_tokens = 3000, 50
    assert run(RolePlanner(PROMISE), fleet, 8, 60)
    assert BOTH not in fleet.active


def test_a_constant_load_is_planned_for_once() -> None:
    fleet = fleet_of(1, 5)
    times = run(RolePlanner(PROMISE), fleet, 10, 600)
    assert len(times) == 1


@pytest.mark.parametrize("seed", range(5))
def test_chance_does_not_make_it_switch_more_often(seed: int) -> None:
    """Requests arrive by a Poisson process and have exponential lengths."""
    rng = random.Random(seed)
    fleet, planner, times = fleet_of(2, 2), RolePlanner(PROMISE), list[float]()
    for _ in range(1200):
        count, at_s = 0, rng.expovariate(5)
        while at_s < 1:
            count, at_s = count + 1, at_s + rng.expovariate(5)
        lengths = [rng.expovariate(1) for _ in range(count)]
        fleet.prompt_tokens = 1000 * sum(lengths) / max(count, 1)
        plan = planner.plan(fleet.view(count))
        if plan.switches:
            times.append(fleet.at_s)
            fleet.switch(dict(plan.switches))
    late = [at_s for at_s in times if at_s > 30]
    assert len(late) <= 1200 / MIN_REST_S
    assert all(b - a >= MIN_REST_S for a, b in pairwise(late))


def test_another_load_is_planned_for_at_once() -> None:
    fleet, planner = fleet_of(3, 3), RolePlanner(PROMISE)
    fleet.prompt_tokens, fleet.response_tokens = 4000, 50
    assert run(planner, fleet, 8, 60)[0] < 30
    fleet.prompt_tokens, fleet.response_tokens = 200, 500
    began_s = fleet.at_s
    times = run(planner, fleet, 20, 20)
    assert times
    assert times[0] - began_s <= MIN_REST_S / 2
    assert all(b - a >= SHORT_REST_S for a, b in pairwise(times))


def test_a_worker_that_is_away_counts_for_saturation_only() -> None:
    """Three workers prefill, and one of them starts: the number that scales workers counts it."""
    fleet, planner = fleet_of(3, 3), RolePlanner(PROMISE)
    run(planner, fleet, 16, 40)
    before = planner.plan(fleet.view(16)).saturation[PREFILL]
    fleet.away = frozenset([fleet.active.index(ONLY_PREFILL)])
    assert planner.plan(fleet.view(16)).saturation[PREFILL] == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("num_prefill", [1, 2, 4])
def test_the_wanted_number_does_not_depend_on_the_present_one(num_prefill: int) -> None:
    """An autoscaler that divides it by a target gets the same answer while workers start."""
    fleet = Fleet([ONLY_PREFILL] * num_prefill + [ONLY_DECODE] * 4)
    planner = RolePlanner(PROMISE)
    for _ in range(60):
        plan = planner.plan(fleet.view(8))
    assert plan.wanted[PREFILL] == pytest.approx(plan.saturation[PREFILL] * num_prefill)
    # 8 prompts/s of 0.1 s take 0.8 workers, and queues some more; fewer workers wait less well.
    assert 0.8 <= plan.wanted[PREFILL] <= 1.3
    fleet.active = [ONLY_DECODE] * 5
    assert planner.plan(fleet.view(8)).wanted[PREFILL] == 1.0


def test_fixed_workers_keep_their_role() -> None:
    workers = [
        WorkerView("a", ONLY_PREFILL, ONLY_PREFILL),
        WorkerView("b", ONLY_DECODE, ONLY_DECODE),
        WorkerView("c", BOTH, BOTH),
    ]
    assert set(splits(workers)) == {RoleSplit(1, 2), RoleSplit(2, 1)}
    assert switched(workers, RoleSplit(2, 1)) == {"c": ONLY_PREFILL}
    assert switched(workers, RoleSplit(1, 2)) == {"c": ONLY_DECODE}
    assert list(splits(workers[2:])) == []


def test_workers_with_the_least_to_lose_change() -> None:
    workers = [
        WorkerView("a", BOTH, ONLY_DECODE, running=9),
        WorkerView("b", BOTH, ONLY_DECODE, running=2),
        WorkerView("c", BOTH, ONLY_PREFILL, queued_tokens=10),
        WorkerView("d", BOTH, ONLY_PREFILL, queued_tokens=900),
    ]
    assert switched(workers, RoleSplit(3, 1)) == {"b": ONLY_PREFILL}
    assert switched(workers, RoleSplit(1, 3)).keys() <= {"c", "d"}
    assert switched(workers, RoleSplit(2, 2)) == {}


def test_headroom_is_proportional_to_workers() -> None:
    estimates = FleetEstimates()
    fleet = fleet_of(2, 2)
    for _ in range(30):
        estimates.observe(fleet.view(5))
    model = CapacityModel(PROMISE, estimates, fleet.view(5))
    two, four = model.headroom(RoleSplit(2, 2)), model.headroom(RoleSplit(4, 4))
    assert four.decode == pytest.approx(2 * two.decode)
    # 5,000 of 20,000 tokens a second, and what 1,000 queued tokens need, at most of the capacity
    assert two.prefill == pytest.approx(0.95 * 20_000 / (5000 + 100), rel=0.05)
    # 5 * 200 tokens a second take 20 of 100 places
    assert two.decode == pytest.approx(5, rel=0.1)
    assert model.headroom(RoleSplit(0, 1)).prefill == 0
    assert model.headroom(RoleSplit(1, 0)).decode == 0


def test_a_broken_promise_leaves_little_room() -> None:
    """Steps take longer than promised for any number of requests."""
    estimates = FleetEstimates()
    fleet = fleet_of(2, 2)
    for _ in range(30):
        estimates.observe(fleet.view(5))
    model = CapacityModel(replace(PROMISE, tpot_s=TOKEN_S / 2), estimates, fleet.view(5))
    assert model.headroom(RoleSplit(2, 2)).decode < 0.1


def test_steps_are_a_line_over_requests() -> None:
    line = StepLine()
    assert line.seconds(10) == 0.0
    for count in (8, 16, 32, 64):
        line.add(count, 0.01 + 0.0001 * count, 1.0)
    assert line.seconds(32) == pytest.approx(0.0132, rel=0.1)
    assert line.seconds(64) > line.seconds(8)
    noisy = StepLine()
    for count, seconds in ((10, 0.02), (11, 0.03), (10, 0.01), (11, 0.02)):
        noisy.add(count, seconds, 1.0)
    assert noisy.seconds(100) < 0.06


def test_a_demand_differs_beyond_chance_only() -> None:
    few, many = ArrivalRates(1000, 100, 4), ArrivalRates(2500, 250, 10)
    assert not few.differs(many)
    assert ArrivalRates(1000, 100, 400).differs(ArrivalRates(2500, 250, 1000))
    assert not ArrivalRates(0, 0, 0).differs(ArrivalRates(100, 10, 2))

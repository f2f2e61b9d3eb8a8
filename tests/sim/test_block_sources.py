"""Tiers and pulls of simulated workers: times reckoned by hand, and faults that cost no request."""

import random

import pytest

from baton.load import Slo
from baton.workload import Planned
from sim.costs import Costs, NetworkCosts, TierCosts
from sim.faults import Mishap
from sim.fleet import FleetConfig, FleetRun, simulate
from sim.report import figures_of, lines_of
from sim.router import RouterOptions
from tests.sim.test_fleet import COSTS, LATENCY_S, errors

LENGTH = 1001  # tokens of a prompt, 992 of them in whole pages of 16 in front of the last one
NUM_PAGES, NUM_KEPT = 63, 992  # pages of one prompt
PAGE_S = 0.002
COLD_S = 2 * LATENCY_S + 0.1 + 1.001 + 0.1  # two chunks
REST_S = 2 * LATENCY_S + 0.1 + 0.009  # what is left of a prompt of which all pages are there
TIER = TierCosts(num_pages=1000, page_s=PAGE_S)


def costs_with(*, num_pages: int = NUM_PAGES, **tiers: TierCosts) -> Costs:
    """Return costs of prefill pools with pages for one prompt, and these tiers."""
    update = {"num_pages": num_pages, **tiers}
    return COSTS.model_copy(update={"prefill": COSTS.prefill.model_copy(update=update)})


def prompt(at_s: float, number: int, output_tokens: int = 1) -> Planned:
    """Return a request with one of several prompts without a common beginning."""
    blocks = tuple(range(100 * number, 100 * number + 10))
    return Planned(at_s, LENGTH, output_tokens, blocks, block_tokens=100)


def first_token_s(run: FleetRun) -> list[float]:
    """Return the times to the first tokens, by arrival."""
    assert not errors(run)
    seen = sorted(run.outcomes, key=lambda outcome: outcome.arrived_s)
    return [outcome.ttft_s or 0.0 for outcome in seen]


def brought(run: FleetRun, source: str) -> list[int]:
    by_arrival = sorted(run.answered, key=lambda each: each.outcome.arrived_s)
    return [each.brought_tokens[source] for each in by_arrival]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("role", ["prefill", "worker"])
def test_what_memory_has_lost_is_read_from_a_tier(tier: str, role: str) -> None:
    load = [prompt(0, 1), prompt(2, 2), prompt(4, 1), prompt(6, 2)]
    costs = costs_with(num_pages=NUM_PAGES, **{tier: TIER})
    costs = costs.model_copy(
        update={"decode": COSTS.decode.model_copy(update={"num_pages": NUM_PAGES})}
    )
    config = (
        FleetConfig(costs=costs) if role == "prefill" else FleetConfig(0, 0, 1, costs, num_both=1)
    )
    run = simulate(config, load)
    assert brought(run, tier) == [0, 0, NUM_KEPT, NUM_KEPT]
    warm_s = REST_S + 62 * PAGE_S
    assert first_token_s(run) == pytest.approx([COLD_S, COLD_S, warm_s, warm_s])
    figures = figures_of(run, config, Slo(2, 1))
    assert figures[f"{tier}_share"] == pytest.approx(2 * NUM_KEPT / (4 * LENGTH))
    assert any("from host memory" in line for line in lines_of(figures))


@pytest.mark.parametrize(("num_pages", "found"), [(124, NUM_KEPT), (80, 0), (62, 0)])
def test_a_full_tier_forgets_the_oldest_prompts(num_pages: int, found: int) -> None:
    """The oldest ones lose their last pages first; here, enough of them that a tier with room for
    one and a bit has nothing of the first prompt."""
    load = [prompt(0, 1), prompt(2, 2), prompt(4, 3), prompt(6, 2)]
    host = TierCosts(num_pages=num_pages, page_s=PAGE_S)
    run = simulate(FleetConfig(costs=costs_with(host=host)), load)
    assert brought(run, "host")[:3] == [0, 0, 0]
    expected = found or max(0, num_pages - 62) * 16
    assert brought(run, "host")[3] == expected


def test_reading_that_is_slower_than_computing_is_left_out() -> None:
    """Only the first is tried, which shows how long it takes."""
    slow = TierCosts(num_pages=1000, page_s=0.1)
    load = [prompt(20 * at, at % 2) for at in range(8)]
    run = simulate(FleetConfig(costs=costs_with(disk=slow)), load)
    assert brought(run, "disk") == [0, 0, NUM_KEPT, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("tier", "found"), [("host", 0), ("disk", NUM_KEPT)])
def test_only_the_disk_outlives_the_process(tier: str, found: int) -> None:
    config = FleetConfig(
        costs=costs_with(num_pages=NUM_PAGES, **{tier: TIER}),
        faults=(Mishap.parse("kill:prefill-0@4+1"),),
    )
    run = simulate(config, [prompt(0, 1), prompt(12, 1)])
    assert brought(run, tier) == [0, found]


def test_prompts_go_where_their_tier_is() -> None:
    """By load alone each would meet its own tier half of the time."""
    load = [prompt(2.0 * at, at % 8) for at in range(24)]
    run = simulate(FleetConfig(2, costs=costs_with(host=TIER)), load)
    assert brought(run, "host") == [0] * 8 + [NUM_KEPT] * 16


@pytest.mark.parametrize("pull_tokens", [512, 0])
def test_a_busy_worker_lends_to_an_idle_one(pull_tokens: int) -> None:
    """The worker with the second prompt computes another one when it comes again: 992,000 bytes
    come at 10,000,000 a second."""
    network = NetworkCosts(latency_s=LATENCY_S, bytes_per_s=1e7)
    costs = costs_with(num_pages=1000).model_copy(update={"network": network})
    load = [prompt(0, 1), prompt(4, 1), prompt(4.3, 1), prompt(8, 1)]
    busy = [Planned(4.0, 4000, 1), Planned(4.0, 4000, 1)]
    config = FleetConfig(2, costs=costs, router=RouterOptions(pull_tokens=pull_tokens))
    run = simulate(config, [*load[:1], busy[0], *load[2:]])
    pulled = brought(run, "pulled")
    if not pull_tokens:
        assert not any(pulled)
        return
    assert pulled == [0, 0, NUM_KEPT, 0]
    assert first_token_s(run)[2] == pytest.approx(REST_S + 2 * LATENCY_S + 0.0992)


@pytest.mark.parametrize("seed", range(6))
def test_faults_cost_no_request(seed: int) -> None:
    """Every run checks that nothing stays leased and that bytes that were sent have arrived."""
    dice = random.Random(seed)
    tiers = {name: TIER for name in ("host", "disk") if dice.random() < 0.6}
    costs = costs_with(num_pages=150, **tiers)
    costs = costs.model_copy(update={"network": NetworkCosts(latency_s=LATENCY_S, bytes_per_s=4e6)})
    faults = tuple(
        Mishap.parse(f"{dice.choice(['kill', 'cut'])}:prefill-{dice.randrange(3)}@{at}+3")
        for at in range(2, 40, 5)
    )
    config = FleetConfig(3, 2, 2, costs, faults=faults, seed=seed)
    load = [
        prompt(dice.uniform(0, 40), dice.randrange(6), dice.randrange(1, 30)) for _ in range(80)
    ]
    run = simulate(config, sorted(load, key=lambda planned: planned.at_s))
    assert not errors(run)
    assert sum(brought(run, "pulled")) + sum(brought(run, "host")) + sum(brought(run, "disk")) > 0

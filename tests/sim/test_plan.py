"""The search against trying every fleet, workers that do both against times reckoned by hand, and
the command."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from baton.workload import Planned
from runtime.errors import ConfigError
from sim.aggregated import aggregated
from sim.costs import Costs, DecodeCosts, ModelCosts, PrefillCosts
from sim.plan import FleetSearch, Prices, app

COSTS = Costs(
    model=ModelCosts(page_size=16, max_context_tokens=4096),
    prefill=PrefillCosts(step_s=0.1, token_s=0.001, pair_s=0, chunk_tokens=1000),
    decode=DecodeCosts(step_s=0.02, row_s=0, context_s=0, num_pages=100),
)


@pytest.mark.parametrize("prices", [Prices(1, 1, 9), Prices(3, 1, 9), Prices(1, 5, 9)])
@pytest.mark.parametrize("needed", [(1, 1), (1, 4), (5, 2), (9, 9)])
def test_the_cheapest_of_all_fleets_is_found(prices: Prices, needed: tuple[int, int]) -> None:
    """Where `needed` is enough, and a worker of one role more makes up for one of the other less
    beyond 2."""

    def attainment(prefill: int, decode: int) -> float:
        return float(prefill >= needed[0] and decode >= needed[1]) or float(
            prefill + decode > sum(needed) and min(prefill - needed[0], decode - needed[1]) >= -1
        )

    search = FleetSearch(attainment, 0.9, prices)
    fleets = itertools.product(range(1, 10), repeat=2)
    cheapest = min((search.price(*fleet), fleet) for fleet in fleets if attainment(*fleet))
    assert search.cheapest() == cheapest[1]
    assert len(search.tried) < 30


def test_an_unreachable_goal_is_an_error() -> None:
    with pytest.raises(ConfigError, match="4 prefill and 4 decode workers meet the SLO for 50"):
        FleetSearch(lambda prefill, decode: 0.5, 0.9, Prices(most=4)).cheapest()


def test_a_worker_that_does_both_shares_its_steps() -> None:
    """The first prompt takes 0.1 + 0.5 s. It draws four more tokens, 0.02 s each; in the second of
    these steps, which begins at 0.62 s, the other prompt is read, for 0.1 s and 0.3 s beyond the
    0.02 s that are saved."""
    first, second = aggregated(1, COSTS, [Planned(0, 500, 5), Planned(0.61, 300, 1)])
    assert first.ttft_s == pytest.approx(0.6)
    assert first.e2e_s == pytest.approx(0.6 + 0.02 + 0.4 + 0.02 + 0.02)
    assert second.ttft_s == pytest.approx(0.62 + 0.4 - 0.61)


def test_prompts_wait_for_pages_or_go_to_others() -> None:
    """1,500 tokens and 16 more are 95 of 100 pages: the second begins when the first has ended, or
    elsewhere."""
    load = [Planned(0, 1000, 516), Planned(0, 1000, 516)]
    alone, both = aggregated(1, COSTS, load), aggregated(2, COSTS, load)
    assert alone[1].ttft_s == pytest.approx(1.1 + 515 * 0.02 + 1.1)
    assert [outcome.ttft_s for outcome in both] == pytest.approx([1.1, 1.1])
    assert aggregated(1, COSTS, [Planned(0, 2000, 1)])[0].error == "OUT_OF_CAPACITY"


def test_the_command_names_a_fleet() -> None:
    done = CliRunner().invoke(
        app,
        [
            "--requests",
            "30",
            "--rate",
            "2",
            "--prompt-tokens",
            "2000",
            "--output-tokens",
            "20",
            "--share",
            "0.9",
        ],
    )
    assert done.exit_code == 0, done.output
    assert "prefill and" in done.stdout
    assert "aggregated workers" in done.stdout
    done = CliRunner().invoke(
        app, ["--requests", "30", "--rate", "2", "--slo", "ttft=1ms,tpot=1ms", "--most", "2"]
    )
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("baton plan: 2 prefill and 2 decode workers")


def test_figures_are_json() -> None:
    done = CliRunner().invoke(app, ["--requests", "10", "--rate", "1", "--json"])
    assert json.loads(done.stdout)["prefill_workers"] == 1

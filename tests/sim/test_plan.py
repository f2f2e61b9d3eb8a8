"""The search against trying every fleet, the verdict, and the command."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from runtime.errors import ConfigError
from sim.plan import FleetPlan, FleetSearch, Prices, app


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


@pytest.mark.parametrize(
    ("pays_from", "says"),
    [
        (None, "disaggregation does not pay for this load, nor for up to 4 times as much"),
        (2.0, "disaggregation does not pay for this load; it does from 2 times this load on"),
        (1.0, "disaggregation pays for this load, from 1 times it on"),
        (0.25, "disaggregation pays for this load, and still for 0.25 times it"),
    ],
)
def test_the_verdict_is_one_line(pays_from: float | None, says: str) -> None:
    plan = FleetPlan(2, 1, 3.0, 1.0, 0.5, 0.0, 0.9, 4, 4.0, pays_from, 9, 1.0)
    assert plan.verdict == says


def test_cheap_workers_of_both_roles_make_disaggregation_not_pay() -> None:
    """At a hundredth of the price of a prefill or decode worker, any number of them is cheaper."""
    flags = ["--requests", "20", "--rate", "1", "--most", "4", "--worker-price", "0.01", "--json"]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["pays_from"] is None
    assert found["aggregated_price"] == pytest.approx(0.01 * found["aggregated_workers"])


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
    assert "disaggregated: " in done.stdout
    assert "aggregated: " in done.stdout
    assert "disaggregation" in done.stdout
    done = CliRunner().invoke(
        app, ["--requests", "30", "--rate", "2", "--slo", "ttft=1ms,tpot=1ms", "--most", "2"]
    )
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("baton plan: 2 prefill and 2 decode workers")


def test_figures_are_json() -> None:
    done = CliRunner().invoke(app, ["--requests", "10", "--rate", "1", "--json"])
    assert json.loads(done.stdout)["prefill_workers"] == 1

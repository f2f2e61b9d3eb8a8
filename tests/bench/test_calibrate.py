"""Costs from times that are known, and those of a real cluster against what it then does."""

import argparse
from pathlib import Path

import pytest

from baton.cluster_config import demo_model
from bench.calibrate import PROMPTS, SHAPE, RoleCores, capacity, fitted, measure
from sim.costs import BesideCosts, Costs, DecodeCosts, PrefillCosts


def test_costs_are_found_in_times_that_they_make() -> None:
    costs = PrefillCosts(step_s=0.004, token_s=5e-5, pair_s=2e-8)
    causes = [(1, length, length * (length + 1) / 2) for length in PROMPTS]
    seconds = [costs.chunk_s(length, pairs) for _, length, pairs in causes]
    assert fitted(causes, seconds) == pytest.approx((0.004, 5e-5, 2e-8))


def test_nothing_takes_less_than_nothing() -> None:
    """Times that fall with the second cause: the first takes it all, their mean by relative errors."""
    assert fitted([(1, 1), (1, 2)], [2.0, 1.0]) == pytest.approx((1.2, 0.0))


def test_the_slower_role_bounds_a_fleet() -> None:
    """Prompts of 1,024 tokens take 1.024 s; answers of 16 take 16 rounds of 0.01 s for 16 rows."""
    costs = Costs(prefill=PrefillCosts(step_s=0, token_s=0.001, pair_s=0),
                  decode=DecodeCosts(step_s=0.01, row_s=0, context_s=0, max_running=16))
    assert capacity(costs, SHAPE, 2, 2) == pytest.approx(2 / 1.024)
    assert capacity(costs, SHAPE, 1000, 1) == pytest.approx(16 / 0.16)
    shared = costs.model_copy(update={"beside": BesideCosts(prefill=4, decode=2)})
    assert capacity(shared, SHAPE, 2, 2) == pytest.approx(2 / 4.096)
    assert capacity(shared, SHAPE, 1000, 1) == pytest.approx(8 / 0.16)
    crowded = costs.model_copy(update={
        "beside": BesideCosts(prefill_cores=1, decode_cores=2),
        "decode": costs.decode.model_copy(update={"request_s": 0.005})})
    assert capacity(crowded, SHAPE, 4, 1000) == pytest.approx(1 / 1.024), "four have a core"
    enough = crowded.model_copy(update={"beside": BesideCosts(decode_cores=2)})
    assert capacity(enough, SHAPE, 1000, 4) == pytest.approx(2 * 1 / (0.16 / 16 + 0.005)), "four have two"


@pytest.mark.parametrize(("num_cores", "prefill", "decode", "others"), [
    (4, (0, 1), (2,), (3,)), (6, (0, 1), (2, 3), (4, 5)), (5, (0, 1), (2, 3), (4,))])
def test_roles_that_are_measured_do_not_meet(num_cores: int, prefill: tuple[int, ...], decode: tuple[int, ...],
                                             others: tuple[int, ...]) -> None:
    assert RoleCores.of(range(num_cores), 2) == RoleCores(prefill, decode, others)
    assert RoleCores.of(range(3), 2) is None


@pytest.mark.long
async def test_a_real_cluster_does_what_its_simulation_says(tmp_path: Path) -> None:
    """Below what it can serve, its rate is the load's. Times are the bench's: others may use this machine."""
    flags = argparse.Namespace(model=demo_model(), output=tmp_path / "costs.json", like=None, workers=2,
                               repeats=1, compare=[0.4], seconds=4.0, seed=0)
    figures = await measure(flags)
    assert Costs.read(flags.output).decode.step_s > 0
    for name in ("failed", "requests_per_s"):
        real, simulated = figures[f"x0.4_{name}"], figures[f"x0.4_{name}_simulated"]
        assert isinstance(real, float | int)
        assert isinstance(simulated, float | int)
        assert simulated == pytest.approx(real, rel=0.75), name

"""Costs from times that are known, and those of a real cluster against what it then does."""

import argparse
from pathlib import Path

import pytest

from baton.cluster_config import demo_model
from bench.calibrate import SHAPE, capacity, fitted, measure
from sim.costs import Costs, DecodeCosts, MachineCosts, PrefillCosts

LENGTHS = (16, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536)
LOADS = ("x0.5", "x2")


def test_costs_are_found_in_times_that_they_make() -> None:
    costs = PrefillCosts(step_s=0.004, token_s=5e-5, pair_s=2e-8)
    causes = [(1, length, length * (length + 1) / 2) for length in LENGTHS]
    seconds = [costs.chunk_s(length, pairs) for _, length, pairs in causes]
    assert fitted(causes, seconds) == pytest.approx((0.004, 5e-5, 2e-8))


def test_nothing_takes_less_than_nothing() -> None:
    """Times that fall with the second cause: the first takes it all, their mean by relative
    errors."""
    assert fitted([(1, 1), (1, 2)], [2.0, 1.0]) == pytest.approx((1.2, 0.0))


def test_the_slower_role_bounds_a_fleet_or_the_machine_does() -> None:
    """Prompts of 1,024 tokens take 0.1 s, 0.02 for each of two chunks and 1.024; outputs of 15 more
    tokens 0.2 s, 1.024 for the prompt's arrival and 15 rounds of 0.01 s. Router and client take 0.3
    s and 15 times 0.002."""
    costs = Costs(
        prefill=PrefillCosts(request_s=0.1, step_s=0.02, token_s=0.001, pair_s=0, chunk_tokens=512),
        decode=DecodeCosts(request_s=0.2, landed_s=0.001, step_s=0.01, row_s=0, context_s=0),
    )
    prompt_s, answer_s, others_s = 0.1 + 0.04 + 1.024, 0.2 + 1.024 + 0.15, 0.3 + 0.03
    assert capacity(costs, SHAPE, 2) == pytest.approx(2 / answer_s)
    fast = costs.model_copy(update={"decode": DecodeCosts(step_s=0.001, row_s=0, context_s=0)})
    assert capacity(fast, SHAPE, 2) == pytest.approx(2 / prompt_s)
    for cores, speed in ((2, 1.0), (2, 0.5)):
        machine = MachineCosts(cores=cores, speed=speed, request_s=0.3, round_s=0.002)
        assert capacity(costs.model_copy(update={"machine": machine}), SHAPE, 2) == pytest.approx(
            cores * speed / (prompt_s + answer_s + others_s)
        )


@pytest.mark.long
@pytest.mark.timeout(600)  # a turn of 100 s, more beside other tests
async def test_a_real_cluster_and_its_simulation_serve_the_same_loads(tmp_path: Path) -> None:
    """The measured costs reproduce the overload that they were fitted to. Both sides serve every
    request of a load below the capacity and of one above. Other loads take other times while the
    machine's speed changes, so their figures are compared by the bench alone.
    """
    flags = argparse.Namespace(
        model=demo_model(),
        output=tmp_path / "costs.json",
        like=None,
        workers=2,
        seconds_each=2.0,
        compare=[0.5, 2.0],
        seconds=6.0,
        seed=0,
    )
    figures = await measure(flags)
    costs = Costs.read(flags.output)
    assert costs.decode.step_s > 0
    assert costs.prefill.token_s > 0
    assert figures["overload_s_simulated"] == pytest.approx(figures["overload_s"], rel=0.1)
    for load in LOADS:
        assert figures[f"{load}_requests"]
        assert figures[f"{load}_requests"] == figures[f"{load}_requests_simulated"]
        assert figures[f"{load}_failed"] == figures[f"{load}_failed_simulated"] == 0

"""Simulated workers that prefill and decode: times reckoned by hand, memory, faults, switches."""

from dataclasses import replace
from itertools import pairwise

import pytest

from baton.load import Slo
from baton.workload import Arrivals, Lengths, Planned, Process, Shape, plan
from planner.planner import MIN_REST_S
from router.workers.worker import WorkerRole
from runtime.errors import ConfigError
from sim.costs import Costs, DecodeCosts, ModelCosts, NetworkCosts, PrefillCosts
from sim.faults import Mishap
from sim.fleet import FleetConfig, FleetRun, simulate

LATENCY_S = 0.001
COSTS = Costs(
    model=ModelCosts(page_size=16, max_context_tokens=4096, num_layers=10, token_bytes=1000),
    prefill=PrefillCosts(
        step_s=0.1, token_s=0.001, pair_s=0, chunk_tokens=1000, grid=16, num_pages=1000, start_s=3
    ),
    decode=DecodeCosts(step_s=0.02, row_s=0, context_s=0, num_pages=1000, start_s=3),
    network=NetworkCosts(latency_s=LATENCY_S, bytes_per_s=1e15),
)
ALONE = FleetConfig(0, 0, costs=COSTS, num_both=1)
SHAPE = Shape(Lengths.parse("uniform:16-900"), Lengths.parse("uniform:1-40"))


def load_of(count: int, rate: float, seed: int = 1) -> list[Planned]:
    return plan(count, Arrivals(Process.POISSON, rate), SHAPE, seed=seed)


def errors(run: FleetRun) -> list[str]:
    return [outcome.error for outcome in run.outcomes if outcome.error is not None]


def test_a_request_stays_where_it_was_prefilled() -> None:
    """Its ten further tokens follow the first at once: nothing is sent to another worker."""
    run = simulate(ALONE, [Planned(0.0, 500, 11)])
    (outcome,) = run.outcomes
    assert outcome.ttft_s == pytest.approx(2 * LATENCY_S + 0.6)
    assert outcome.tpot_s == pytest.approx(0.02)
    assert run.moved_bytes == 0


def test_a_chunk_and_decode_steps_share_the_time() -> None:
    """The first request draws a hundred tokens from 0.6 s on. The second prompt needs 0.4 s of work,
    of which it gets two thirds of the time: 0.6 s, in which the first draws 0.2 s of its steps."""
    first, second = sorted(
        simulate(ALONE, [Planned(0.0, 500, 101), Planned(1.0, 300, 1)]).outcomes,
        key=lambda each: each.arrived_s,
    )
    assert second.ttft_s == pytest.approx(2 * LATENCY_S + 0.6, abs=0.01)
    assert first.e2e_s == pytest.approx(2 * LATENCY_S + 0.6 + 2.0 + 0.4, abs=0.01)


def test_chunks_beside_decode_steps_get_short() -> None:
    """Chunks of 1,000 tokens would delay each of the other tokens by 1.1 s; twice a step is 0.04 s,
    less than any chunk takes, so that chunks of the grid alternate with steps."""
    load = [Planned(0.0, 16, 2000), *(Planned(1.0 + at, 1000, 1) for at in range(3))]
    costs = COSTS.model_copy(
        update={"prefill": COSTS.prefill.model_copy(update={"step_s": 0.001, "token_s": 0.0001})}
    )
    long = simulate(replace(ALONE, costs=costs), load)
    ttft = sorted(outcome.ttft_s or 0.0 for outcome in long.outcomes)
    # 1,000 tokens in chunks of 0.04 s, with a step of 0.02 s after each: about 0.16 s
    assert ttft[-1] < 0.25


def test_prompts_and_responses_share_the_pages() -> None:
    """1,000 of 1,024 tokens of memory are a prompt's; another has to wait until its response ends."""
    costs = COSTS.model_copy(
        update={"decode": COSTS.decode.model_copy(update={"num_pages": 64, "growth_tokens": 0})}
    )
    load = [Planned(0.0, 1000, 21), Planned(0.1, 1000, 1)]
    first, second = sorted(
        simulate(replace(ALONE, costs=costs), load).outcomes, key=lambda each: each.arrived_s
    )
    assert first.e2e_s == pytest.approx(1.1 + 0.4, abs=0.02)
    assert second.ttft_s is not None
    assert second.arrived_s + second.ttft_s >= 1.5 + 1.1


@pytest.mark.parametrize(
    "fault",
    ["kill:worker-0@3", "kill:worker-1@3+2", "cut:worker-0@2+4", "slow:worker-1@2+5x4",
     "restart:worker@2"],
)  # fmt: skip
def test_a_fault_costs_no_request(fault: str) -> None:
    config = FleetConfig(0, 0, costs=COSTS, num_both=3, faults=(Mishap.parse(fault),))
    run = simulate(config, load_of(60, 4))
    assert not errors(run)


def test_workers_of_all_kinds_serve_together() -> None:
    run = simulate(FleetConfig(1, 1, costs=COSTS, num_both=2), load_of(80, 8))
    assert not errors(run)
    assert run.moved_bytes > 0


def test_a_fleet_needs_both_roles() -> None:
    """Only the command checks it: a fleet without decode would wait forever."""
    from typer.testing import CliRunner

    from sim.command import app

    done = CliRunner().invoke(app, ["--prefill", "2", "--decode", "0", "--requests", "1"])
    assert done.exit_code == 2
    assert "no worker of the fleet serves decode" in done.stderr
    done = CliRunner().invoke(app, ["--planner", "--requests", "1"])
    assert done.exit_code == 2
    assert "--planner" in done.stderr
    with pytest.raises(ConfigError, match="like kill"):
        Mishap.parse("switch:worker-0@1")


@pytest.mark.parametrize("seed", range(2))
def test_at_a_constant_load_switches_are_rare(seed: int) -> None:
    """After the first look at the load there is at most one change of roles per rest."""
    promise = Slo(2.0, 0.05)
    config = FleetConfig(0, 0, costs=COSTS, num_both=5, promise=promise, seed=seed)
    run = simulate(config, load_of(1500, 6, seed=seed))
    assert not errors(run)
    times = sorted({change.at_s for change in run.switches})
    assert times
    late = [at_s for at_s in times if at_s > 60]
    rests = [later - sooner for sooner, later in pairwise(late)]
    assert all(rest >= MIN_REST_S for rest in rests), times


@pytest.mark.parametrize("fault", ["kill:worker-0@20+10", "restart:worker@30", "cut:worker-2@25+4"])
def test_no_request_is_lost_while_roles_switch(fault: str) -> None:
    config = FleetConfig(
        0,
        0,
        2,
        costs=COSTS,
        num_both=4,
        promise=Slo(1.0, 0.05),
        faults=(Mishap.parse(fault),),
    )
    run = simulate(config, load_of(300, 4))
    assert not errors(run)
    assert {role for change in run.switches for role in change.roles} <= set(WorkerRole)

"""Whole fleets: times reckoned by hand, faults that cost no request, the same run from the same
seed."""

import json
from dataclasses import replace

import pytest

from baton.load import Slo
from baton.workload import Arrivals, Lengths, Planned, Process, Shape, plan
from router.workers.policy import Policy
from runtime.errors import ConfigError
from sim.costs import Costs, DecodeCosts, MachineCosts, ModelCosts, NetworkCosts, PrefillCosts
from sim.faults import Mishap
from sim.fleet import NUM_SAMPLES, FleetConfig, FleetRun, simulate
from sim.prefill import PrefillWorker
from sim.report import figures_of, lines_of
from sim.router import RouterOptions

LATENCY_S = 0.001
COSTS = Costs(
    model=ModelCosts(page_size=16, max_context_tokens=4096, num_layers=10, token_bytes=1000),
    prefill=PrefillCosts(
        step_s=0.1, token_s=0.001, pair_s=0, chunk_tokens=1000, grid=16, num_pages=1000, start_s=3
    ),
    decode=DecodeCosts(step_s=0.02, row_s=0, context_s=0, num_pages=1000, start_s=3),
    network=NetworkCosts(latency_s=LATENCY_S, bytes_per_s=1e15),
)
FLEET = FleetConfig(costs=COSTS)
SHAPE = Shape(Lengths.parse("uniform:16-900"), Lengths.parse("uniform:1-40"))


def load_of(count: int, rate: float, process: Process = Process.POISSON) -> list[Planned]:
    return plan(count, Arrivals(process, rate), SHAPE, seed=1)


def errors(run: FleetRun) -> list[str]:
    return [outcome.error for outcome in run.outcomes if outcome.error is not None]


def test_one_request_takes_the_sum_of_its_parts() -> None:
    """To the prefill worker and back is twice the latency; 500 tokens are one chunk of 0.1 + 0.5 s.
    The first token goes on to decode, which draws ten more in 0.2 s and sends them: two latencies
    after the client had the first."""
    (outcome,) = simulate(FLEET, [Planned(0.0, 500, 11)]).outcomes
    assert outcome.ttft_s == pytest.approx(2 * LATENCY_S + 0.6)
    assert outcome.tpot_s == pytest.approx((2 * LATENCY_S + 0.2) / 10)


def one_machine(**costs: float) -> Costs:
    return COSTS.model_copy(update={"machine": MachineCosts(**costs)})  # type: ignore[arg-type]


def test_workers_that_share_a_core_slow_each_other_down() -> None:
    """A prompt arrives at 1 s during another request's decode: for its 0.6 s of work both have half
    a core, 1.2 s, in which the decode gets 0.6 s of its own."""
    load = [Planned(0.0, 500, 201), Planned(1.0, 500, 1)]
    alone, other = sorted(simulate(FLEET, load).outcomes, key=lambda each: each.arrived_s)
    slowed, late = sorted(
        simulate(replace(FLEET, costs=one_machine(cores=1)), load).outcomes,
        key=lambda each: each.arrived_s,
    )
    assert other.ttft_s == pytest.approx(2 * LATENCY_S + 0.6)
    assert late.ttft_s == pytest.approx(2 * LATENCY_S + 1.2)
    assert alone.e2e_s is not None
    assert slowed.e2e_s == pytest.approx(alone.e2e_s + 0.6)


def test_workers_keep_to_their_cores() -> None:
    """Two of each role on two cores: two prompts and their outputs at a time slow no other down. On
    one core, two prompts of 0.6 s take 1.2 s, then two outputs of 0.4 s take 0.8 s."""
    apart = replace(
        FLEET, num_prefill=2, num_decode=2, router=RouterOptions(policy=Policy.LEAST_LOAD)
    )
    load = [Planned(0.0, 500, 21), Planned(0.0, 500, 21)]
    for cores, ttft_s, draws_s in ((0, 0.6, 0.4), (2, 0.6, 0.4), (4, 0.6, 0.4), (1, 1.2, 0.8)):
        for outcome in simulate(replace(apart, costs=one_machine(cores=cores)), load).outcomes:
            assert outcome.ttft_s == pytest.approx(2 * LATENCY_S + ttft_s)
            assert outcome.e2e_s == pytest.approx(2 * LATENCY_S + ttft_s + 2 * LATENCY_S + draws_s)


def test_router_and_client_take_of_the_cores_as_well() -> None:
    """0.2 s for a request, half of it before it reaches a worker. The other half, with the first
    token, goes to the one of two cores that is idle: the output of 20 tokens takes 0.4 s. On one
    core they take turns, until the 0.1 s are over after 0.2: the output takes 0.5 s."""
    for cores, draws_s in ((2, 0.4), (1, 0.5)):
        (outcome,) = simulate(
            replace(FLEET, costs=one_machine(cores=cores, request_s=0.2)), [Planned(0.0, 500, 21)]
        ).outcomes
        assert outcome.ttft_s == pytest.approx(0.1 + 2 * LATENCY_S + 0.6)
        assert outcome.e2e_s == pytest.approx(
            0.1 + 4 * LATENCY_S + 0.6 + draws_s, abs=2 * LATENCY_S
        )


def test_messages_take_of_all_cores() -> None:
    """0.01 s for every round of 0.02 s: of one core a round leaves two thirds to drawing, of two
    cores each four fifths, and a machine of half the speed takes twice as long."""
    for cores, speed, round_s in ((1, 1.0, 0.03), (2, 1.0, 0.025), (1, 0.5, 0.06)):
        (outcome,) = simulate(
            replace(FLEET, costs=one_machine(cores=cores, speed=speed, round_s=0.01)),
            [Planned(0.0, 16, 101)],
        ).outcomes
        assert outcome.e2e_s is not None
        assert outcome.ttft_s is not None
        assert outcome.e2e_s - outcome.ttft_s == pytest.approx(
            100 * round_s, abs=0.05 * round_s + 4 * LATENCY_S
        )


def with_requests() -> Costs:
    return COSTS.model_copy(
        update={
            "prefill": COSTS.prefill.model_copy(update={"request_s": 0.05}),
            "decode": COSTS.decode.model_copy(update={"request_s": 0.03, "landed_s": 3e-4}),
        }
    )


def test_a_request_costs_its_workers_more_than_its_tokens() -> None:
    """0.05 s before its prompt, of a chunk of 0.6 s; a third of 0.03 s before its output of ten
    more tokens, which take 0.2 s. Another request's output waits for two such thirds, and a third
    of 0.15 s for the prompt's 500 tokens."""
    costs = with_requests()
    (outcome,) = simulate(replace(FLEET, costs=costs), [Planned(0.0, 500, 11)]).outcomes
    assert outcome.ttft_s == pytest.approx(2 * LATENCY_S + 0.65)
    assert outcome.tpot_s == pytest.approx((2 * LATENCY_S + 0.21) / 10)
    load = [Planned(0.0, 500, 201), Planned(1.0, 500, 1)]
    alone, slowed = (
        min(simulate(replace(FLEET, costs=each), load).outcomes, key=lambda each: each.arrived_s)
        for each in (COSTS, costs)
    )
    assert alone.e2e_s is not None
    assert slowed.e2e_s == pytest.approx(alone.e2e_s + 0.05 + 0.01 + 0.02 + 0.05)


def test_on_one_core_all_of_a_request_takes_its_time() -> None:
    """Two requests, of which the first ends last: before that the core has done all that they cost
    but for its end."""
    load = [Planned(0.0, 500, 201), Planned(1.0, 500, 1)]
    plain, costly = (
        min(
            simulate(
                replace(FLEET, costs=each.model_copy(update={"machine": MachineCosts(cores=1)})),
                load,
            ).outcomes,
            key=lambda each: each.arrived_s,
        )
        for each in (COSTS, with_requests())
    )
    assert plain.e2e_s is not None
    assert plain.e2e_s == pytest.approx(0.6 + 4 + 0.6 + 4 * LATENCY_S, abs=LATENCY_S)
    assert costly.e2e_s == pytest.approx(
        plain.e2e_s + 2 * (0.05 + 0.03 + 0.15) - 0.01, abs=LATENCY_S
    )


def test_a_slow_link_delays_tokens_after_the_first() -> None:
    """500,000 bytes at 1,000,000 a second begin to leave in the middle of the chunk, 0.3 s before
    its end: they arrive 0.2 s after it, when decode already has the first token."""
    slow = COSTS.model_copy(update={"network": NetworkCosts(latency_s=LATENCY_S, bytes_per_s=1e6)})
    (outcome,) = simulate(replace(FLEET, costs=slow), [Planned(0.0, 500, 11)]).outcomes
    assert outcome.ttft_s == pytest.approx(2 * LATENCY_S + 0.6)
    assert outcome.e2e_s == pytest.approx(LATENCY_S + 0.6 + 0.2 + 0.2 + LATENCY_S)


def test_cached_tokens_are_not_computed() -> None:
    """Both begin with one block of 512 tokens, and 480 of 500 tokens are whole pages in front of
    the last token: 0.1 s and 20 tokens' time are left. The worker has reported what it holds long
    before."""
    run = simulate(
        replace(FLEET, num_prefill=2), [Planned(0.0, 500, 2, (7,)), Planned(5.0, 500, 2, (7,))]
    )
    assert [each.cached_tokens for each in run.answered] == [0, 496]
    assert run.outcomes[1].ttft_s == pytest.approx(2 * LATENCY_S + 0.1 + 0.004)


def test_the_same_seed_gives_the_same_run() -> None:
    config = replace(
        FLEET,
        num_prefill=2,
        num_decode=3,
        num_routers=2,
        faults=(Mishap.parse("kill:decode-1@2+1"),),
        router=RouterOptions(Policy.POWER_OF_TWO),
    )
    first, second, other = (
        simulate(replace(config, seed=seed), load_of(30, 8.0)) for seed in (0, 0, 1)
    )
    assert first.outcomes == second.outcomes
    assert first.samples == second.samples
    assert other.outcomes != first.outcomes


@pytest.mark.parametrize(
    "fault",
    [
        "kill:decode-0@3",
        "kill:prefill-1@3",
        "restart:decode@2",
        "restart:prefill@2",
        "cut:decode-1@3+4",
        "cut:prefill-0@3+4",
        "slow:decode-0@1+5x4",
        "lose:router-0@3",
    ],
)
def test_a_fault_costs_no_request(fault: str) -> None:
    """With two of everything. That nothing is left of any request is checked by every run."""
    load = load_of(30, 6.0)
    config = replace(
        FLEET, num_prefill=2, num_decode=2, num_routers=2, faults=(Mishap.parse(fault),)
    )
    calm, stormy = (simulate(each, load) for each in (replace(config, faults=()), config))
    assert errors(stormy) == []
    assert stormy.outcomes != calm.outcomes


def test_a_process_that_is_killed_twice_starts_once() -> None:
    """The second kill meets it while it is down. A start that lost the requests of a process that
    was up again would leave their clients waiting."""
    faults = tuple(map(Mishap.parse, ("kill:prefill-0@2+3", "kill:prefill-0@4+3")))
    load = [Planned(at / 4, 500, 2) for at in range(80)]
    run = simulate(replace(FLEET, num_prefill=2, faults=faults), load)
    assert errors(run) == []
    assert run.duration_s < 30


def test_pages_that_run_out_cost_time_and_no_request() -> None:
    tight = COSTS.model_copy(
        update={
            "decode": DecodeCosts(
                step_s=0.02, row_s=0, context_s=0, num_pages=120, growth_tokens=0, start_s=3
            )
        }
    )
    load = [Planned(0.01 * index, 500, 400) for index in range(6)]
    run = simulate(replace(FLEET, num_prefill=6, costs=tight), load)
    assert errors(run) == []
    assert run.num_preemptions > 0


def test_more_workers_do_not_make_it_slower() -> None:
    """At a rate that keeps one prefill worker three times too busy."""
    load = load_of(40, 6.0)
    waits = [
        figures_of(run, config, Slo(2, 0.05))["ttft_s_p90"]
        for config in (replace(FLEET, num_prefill=count, num_decode=2) for count in (1, 2, 6))
        for run in [simulate(config, load)]
    ]
    first, second, third = (float(str(value)) for value in waits)
    assert first > 2 * second > 2 * third


def test_a_fault_must_name_an_existing_worker() -> None:
    with pytest.raises(ConfigError, match="decode-7"):
        simulate(replace(FLEET, faults=(Mishap.parse("kill:decode-7@1"),)), [Planned(0.0, 16, 1)])
    for text in ("kill decode-0", "burn:decode-0@1", "cut:decode-0@1", "slow:decode-0@1+2x0"):
        with pytest.raises(ConfigError):
            Mishap.parse(text)


def test_a_long_end_takes_no_more_samples() -> None:
    """All requests come at once, and are served for 8 s."""
    run = simulate(FLEET, [Planned(0.0, 500, 400)])
    assert NUM_SAMPLES <= len(run.samples) <= 2 * NUM_SAMPLES
    assert run.duration_s - run.samples[-1].at_s < 0.1


def test_samples_do_not_look_at_workers_without_any_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are hundreds of samples, and may be thousands of such workers."""
    asked: list[PrefillWorker] = []
    num_requests = vars(PrefillWorker)["num_requests"].fget

    def noted(worker: PrefillWorker) -> int:
        asked.append(worker)
        return int(num_requests(worker))

    monkeypatch.setattr(PrefillWorker, "num_requests", property(noted))
    run = simulate(replace(FLEET, num_prefill=50), [Planned(0.0, 500, 400)])
    assert len(run.samples) >= NUM_SAMPLES
    assert len(asked) < NUM_SAMPLES


def test_figures_are_plain_values() -> None:
    run = simulate(FLEET, load_of(5, 2.0))
    figures = figures_of(run, FLEET, Slo(2, 0.05))
    assert json.loads(json.dumps(figures)) == figures
    assert figures["requests"] == 5
    assert lines_of(figures)

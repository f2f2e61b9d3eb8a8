"""One client that sends a hundred times as much as each of the others, in a simulated fleet."""

import random
from dataclasses import replace

import pytest

from baton.workload import Planned
from sim.fleet import FleetConfig, FleetRun, simulate
from sim.router import RouterOptions

NUM_OTHERS = 40
SECONDS = 12.0
PROMPT_TOKENS, OUTPUT_TOKENS = 800, 60


def load(num_heavy: int) -> list[Planned]:
    numbers = random.Random(5)
    clients = [f"c{number}" for number in range(NUM_OTHERS) for _ in range(4)]
    clients += ["heavy"] * num_heavy
    planned = [
        Planned(numbers.uniform(0, SECONDS), PROMPT_TOKENS, OUTPUT_TOKENS, client=client)
        for client in clients
    ]
    return sorted(planned, key=lambda each: each.at_s)


def ttft_s(run: FleetRun, *, is_heavy: bool, share: float) -> float:
    """Return a quantile of the clients' times to the first token."""
    times = sorted(
        each.outcome.ttft_s
        for each in run.answered
        if (each.client == "heavy") is is_heavy and each.outcome.ttft_s is not None
    )
    return times[int(share * (len(times) - 1))]


@pytest.mark.parametrize("num_routers", [1, pytest.param(4, marks=pytest.mark.long)])
def test_others_do_not_wait_behind_a_heavy_client(num_routers: int) -> None:
    """All are served. As one client, all of them would wait for as long as the heavy one."""
    config = FleetConfig(
        2, 2, num_routers, router=RouterOptions(max_wait_s=600.0, max_waiting=10_000)
    )
    planned = load(400)
    named = simulate(config, planned)
    unnamed = simulate(config, [replace(each, client="") for each in planned])
    assert len(named.answered) == len(unnamed.answered) == len(planned)
    assert not [each for each in named.answered if each.outcome.error is not None]
    together_s = sorted(each.outcome.ttft_s or 0.0 for each in unnamed.answered)
    others_s = ttft_s(named, is_heavy=False, share=0.99)
    assert others_s < 0.5 * together_s[len(together_s) // 2]
    assert others_s < 0.5 * ttft_s(named, is_heavy=True, share=0.5)

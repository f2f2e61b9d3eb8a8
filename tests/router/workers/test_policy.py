"""Choices are pure: the same snapshot and random number give the same worker, in any order of the
candidates."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.workers.candidate import Candidate
from router.workers.pace import MEMORY_S, AnswerPace
from router.workers.policies import AFFINITY_FACTOR, AFFINITY_SLACK, PolicyContext
from router.workers.policy import LinkedWorkers, Policy, choose, choose_pair
from runtime.clock import ManualClock
from runtime.pace import MIN_TOKENS

addresses = st.integers(0, 9).map(lambda i: f"10.0.0.{i}:7000")
candidates = st.lists(
    st.builds(Candidate, addresses, st.floats(0, 1e6), st.floats(0, 1e3), st.floats(0, 1e6)),
    unique_by=lambda c: c.address,
    max_size=10,
)
prompts = st.lists(st.integers(0, 2**31), max_size=300)


def draw(turn: int = 0, seed: int = 0, prompt: list[int] | None = None) -> PolicyContext:
    return PolicyContext(turn, random.Random(seed), prompt or [])


def idle(count: int) -> list[Candidate]:
    return [Candidate(f"10.0.0.{i}:7000", 0.0) for i in range(count)]


@given(st.sampled_from(Policy), candidates, st.frozensets(addresses), st.integers(0, 1000), prompts)
def test_only_untried_workers_are_chosen(
    policy: Policy, workers: list[Candidate], tried: frozenset[str], turn: int, prompt: list[int]
) -> None:
    allowed = [worker for worker in workers if worker.address not in tried]
    chosen = choose(policy, workers, draw(turn, prompt=prompt), tried=tried)
    assert chosen in allowed if allowed else chosen is None


@given(st.sampled_from(Policy), candidates, st.integers(0, 1000), prompts, st.randoms())
def test_the_order_of_candidates_does_not_matter(
    policy: Policy, workers: list[Candidate], turn: int, prompt: list[int], shuffler: random.Random
) -> None:
    shuffled = list(workers)
    shuffler.shuffle(shuffled)
    assert choose(policy, workers, draw(turn, prompt=prompt)) == choose(
        policy, shuffled, draw(turn, prompt=prompt)
    )


@given(candidates, st.integers(0, 1000))
def test_round_robin_gives_everyone_the_same_number(
    workers: list[Candidate], first_turn: int
) -> None:
    rounds = 3
    counts = Counter(
        choose(Policy.ROUND_ROBIN, workers, draw(first_turn + i))
        for i in range(rounds * len(workers))
    )
    assert all(count == rounds for count in counts.values())
    assert len(counts) == len(workers)


@given(candidates)
def test_least_load_is_the_minimum(workers: list[Candidate]) -> None:
    chosen = choose(Policy.LEAST_LOAD, workers, draw())
    loads = [worker.load for worker in workers]
    assert chosen is None if not loads else chosen is not None and chosen.load == min(loads)


@pytest.mark.parametrize("policy", [Policy.POWER_OF_TWO, Policy.LEAST_LOAD, Policy.PREFIX_CACHE])
def test_routers_that_know_the_same_spread_over_equal_workers(policy: Policy) -> None:
    """Each draws for itself; a busy worker is none of the equals."""
    busy = Candidate("10.0.0.0:6000", 1e6)
    chosen = Counter(choose(policy, [busy, *idle(5)], draw(seed=router)) for router in range(500))
    assert set(chosen) == set(idle(5))
    assert min(chosen.values()) >= 60


@pytest.mark.parametrize(
    ("loads", "held", "chosen"),
    [((0, 0), (0, 64), 1), ((100, 0), (96, 0), 1), ((96, 0), (100, 0), 0), ((7, 0), (0, 0), 1)],
)
def test_a_prefix_cache_counts_as_much_as_it_saves(
    loads: tuple[int, int], held: tuple[int, int], chosen: int
) -> None:
    """A prompt of 100 tokens: what is ahead of it there, and what must be computed of it."""
    workers = [worker._replace(load=load) for worker, load in zip(idle(2), loads, strict=True)]
    there = PolicyContext(
        0,
        random.Random(0),
        num_cached=dict(zip([worker.address for worker in workers], held, strict=True)),
    )
    assert choose(Policy.PREFIX_CACHE, workers, there) == workers[chosen]
    shares = [worker._replace(load=worker.load / 1000, token_load=1 / 1000) for worker in workers]
    assert choose(Policy.PREFIX_CACHE, shares, there) == shares[chosen], "of a pool of 1,000 tokens"


@pytest.mark.parametrize(
    ("ahead", "full", "chosen"),
    [(40_000, 0.9, "second"), (50_000, 0.9, "first"), (0, 0.9, "second"), (10, 0.0, "first")],
)
def test_a_pair_is_weighed_by_the_load_of_both_workers(
    ahead: int, full: float, chosen: str
) -> None:
    """The first source feeds a pool that is so full, the second, with so many tokens ahead, an
    empty one. A token takes 0.1 ms, an output 5 s: 4 s ahead are less than 90 % of that, 5 s are
    more."""
    groups = [
        LinkedWorkers(
            [Candidate(source, load, load_s=1e-4)], [Candidate(pool, share, load_s=5.0)], draw()
        )
        for source, load, pool, share in (("first", 0, "p:1", full), ("second", ahead, "p:2", 0.0))
    ]
    group, source, pool = choose_pair(Policy.PREFIX_CACHE, groups, draw())
    assert (source.address, pool.address) == (chosen, {"first": "p:1", "second": "p:2"}[chosen])
    assert groups[group].sources == [source]


@given(st.sampled_from(Policy), candidates, candidates, st.integers(0, 1000), prompts)
def test_of_workers_that_all_fit_a_pair_is_the_best_of_either_role(
    policy: Policy, sources: list[Candidate], pools: list[Candidate], turn: int, prompt: list[int]
) -> None:
    if sources and pools:
        groups = [LinkedWorkers(sources, pools, draw(turn, prompt=prompt))]
        assert choose_pair(policy, groups, draw(turn, prompt=prompt)) == (
            0,
            choose(policy, sources, draw(turn, prompt=prompt)),
            choose(policy.of_pools, pools, draw(turn, prompt=prompt)),
        )


@pytest.mark.parametrize(("waited_s", "chosen"), [(0.0, 1), (0.1, 1), (0.4, 0)])
def test_bytes_to_transfer_weigh_like_the_load_of_the_pool(waited_s: float, chosen: int) -> None:
    """1,000 tokens came so long after their first token, outputs take 2 s. The first pool has all
    of the prompt and is fuller by a tenth of its time, 0.2 s, which is more than 0.1 s and less
    than 0.4 s."""
    pace = AnswerPace(ManualClock(0.0))
    assert pace.token_share == 0.0
    pace.answered(2.0)
    pace.record_handoff(1000, waited_s)
    pools = [
        worker._replace(load=load, token_load=pace.token_share)
        for worker, load in zip(idle(2), (0.1, 0.0), strict=True)
    ]
    there = PolicyContext(0, random.Random(0), [0] * 1000, {pools[0].address: 1000})
    assert choose(Policy.PREFIX_CACHE, pools, there) == pools[chosen]


def test_waits_for_bytes_are_forgotten() -> None:
    """A pool that is avoided gets no handoffs that could show that its link is repaired."""
    clock = ManualClock(0.0)
    pace = AnswerPace(clock)
    pace.answered(2.0)
    pace.record_handoff(10, 0.5)
    assert pace.token_share == pytest.approx(0.5 / MIN_TOKENS / 2.0), "few tokens count as more"
    clock.advance(MEMORY_S + 1)
    assert pace.token_share == 0.0


@given(candidates, st.integers(0, 1000))
def test_power_of_two_never_takes_the_most_loaded_of_several(
    workers: list[Candidate], seed: int
) -> None:
    able = sorted(workers, key=lambda w: (w.load, w.address))
    chosen = choose(Policy.POWER_OF_TWO, workers, draw(seed=seed))
    assert chosen is None if not able else len(able) == 1 or chosen != able[-1]


@given(prompts, prompts)
def test_prompts_with_the_same_head_meet(head: list[int], tail: list[int]) -> None:
    shared = (head + [7] * 256)[:256]
    assert choose(Policy.PREFIX_AFFINITY, idle(5), draw(prompt=shared)) == choose(
        Policy.PREFIX_AFFINITY, idle(5), draw(prompt=shared + tail)
    )


def test_affinity_spreads_different_prompts() -> None:
    counts = Counter(
        choose(Policy.PREFIX_AFFINITY, idle(4), draw(prompt=[i] * 20)) for i in range(400)
    )
    assert all(60 <= count <= 140 for count in counts.values())
    assert len(counts) == 4


def test_a_worker_that_leaves_moves_only_its_own_prompts() -> None:
    for i in range(100):
        before = choose(Policy.PREFIX_AFFINITY, idle(5), draw(prompt=[i]))
        assert before is not None
        after = choose(
            Policy.PREFIX_AFFINITY, idle(5), draw(prompt=[i]), tried=frozenset({"10.0.0.2:7000"})
        )
        assert after == before or before.address == "10.0.0.2:7000"


def test_affinity_gives_way_to_overload() -> None:
    home = choose(Policy.PREFIX_AFFINITY, idle(2), draw(prompt=[1]))
    assert home is not None
    other = next(worker for worker in idle(2) if worker != home)
    limit = AFFINITY_FACTOR * other.load + AFFINITY_SLACK
    busy, too_busy = Candidate(home.address, limit), Candidate(home.address, limit + 1)
    assert choose(Policy.PREFIX_AFFINITY, [busy, other], draw(prompt=[1])) == busy
    assert choose(Policy.PREFIX_AFFINITY, [too_busy, other], draw(prompt=[1])) == other

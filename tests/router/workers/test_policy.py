"""Choices are pure: the same snapshot and draw give the same worker, whatever the order of the candidates."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.workers.policy import AFFINITY_FACTOR, AFFINITY_SLACK, Candidate, Draw, Policy, choose

addresses = st.integers(0, 9).map(lambda i: f"10.0.0.{i}:7000")
candidates = st.lists(st.builds(Candidate, addresses, st.floats(0, 1e6), st.booleans()),
                      unique_by=lambda c: c.address, max_size=10)
prompts = st.lists(st.integers(0, 2**31), max_size=300)


def draw(turn: int = 0, seed: int = 0, prompt: list[int] | None = None) -> Draw:
    return Draw(turn, random.Random(seed), prompt or [])


def idle(count: int) -> list[Candidate]:
    return [Candidate(f"10.0.0.{i}:7000", 0.0) for i in range(count)]


@given(st.sampled_from(Policy), candidates, st.frozensets(addresses), st.integers(0, 1000), prompts)
def test_only_untried_workers_with_room_are_chosen(policy: Policy, workers: list[Candidate], tried: frozenset[str],
                                                   turn: int, prompt: list[int]) -> None:
    allowed = [worker for worker in workers if worker.has_room and worker.address not in tried]
    chosen = choose(policy, workers, draw(turn, prompt=prompt), tried=tried)
    assert chosen in allowed if allowed else chosen is None


@given(st.sampled_from(Policy), candidates, st.integers(0, 1000), prompts, st.randoms())
def test_the_order_of_candidates_does_not_matter(policy: Policy, workers: list[Candidate], turn: int,
                                                 prompt: list[int], shuffler: random.Random) -> None:
    shuffled = list(workers)
    shuffler.shuffle(shuffled)
    assert choose(policy, workers, draw(turn, prompt=prompt)) == choose(policy, shuffled, draw(turn, prompt=prompt))


@given(candidates, st.integers(0, 1000))
def test_round_robin_gives_everyone_the_same_number(workers: list[Candidate], first_turn: int) -> None:
    able = [worker for worker in workers if worker.has_room]
    rounds = 3
    counts = Counter(choose(Policy.ROUND_ROBIN, workers, draw(first_turn + i)) for i in range(rounds * len(able)))
    assert all(count == rounds for count in counts.values())
    assert len(counts) == len(able)


@given(candidates)
def test_least_load_is_the_minimum_and_ties_go_to_the_lowest_address(workers: list[Candidate]) -> None:
    able = [worker for worker in workers if worker.has_room]
    chosen = choose(Policy.LEAST_LOAD, workers, draw())
    assert chosen == min(able, key=lambda w: (w.load, w.address), default=None)


@pytest.mark.parametrize(("loads", "held", "chosen"), [
    ((0, 0), (0, 64), 1), ((100, 0), (96, 0), 1), ((96, 0), (100, 0), 0), ((50, 50), (32, 32), 0), ((7, 0), (0, 0), 1)])
def test_a_prefix_cache_counts_as_much_as_it_saves(loads: tuple[int, int], held: tuple[int, int], chosen: int) -> None:
    """A prompt of 100 tokens: what is ahead of it there, and what must be computed of it; of equals the first address.
    """
    workers = [worker._replace(load=load, num_held=num) for worker, load, num in zip(idle(2), loads, held, strict=True)]
    assert choose(Policy.PREFIX_CACHE, workers, draw(prompt=[0] * 100)) == workers[chosen]
    shares = [worker._replace(load=worker.load / 1000, token_load=1 / 1000) for worker in workers]
    assert choose(Policy.PREFIX_CACHE, shares, draw(prompt=[0] * 100)) == shares[chosen], "of a pool of 1,000 tokens"


@given(candidates, st.integers(0, 1000))
def test_power_of_two_never_takes_the_most_loaded_of_several(workers: list[Candidate], seed: int) -> None:
    able = sorted((w for w in workers if w.has_room), key=lambda w: (w.load, w.address))
    chosen = choose(Policy.POWER_OF_TWO, workers, draw(seed=seed))
    assert chosen is None if not able else len(able) == 1 or chosen != able[-1]


def test_power_of_two_follows_the_random_source() -> None:
    chosen = {choose(Policy.POWER_OF_TWO, idle(5), draw(seed=seed)) for seed in range(50)}
    assert len(chosen) == 4, "all but the last, which loses every tie"


@given(prompts, prompts)
def test_prompts_with_the_same_head_meet(head: list[int], tail: list[int]) -> None:
    shared = (head + [7] * 256)[:256]
    assert choose(Policy.PREFIX_AFFINITY, idle(5), draw(prompt=shared)) \
        == choose(Policy.PREFIX_AFFINITY, idle(5), draw(prompt=shared + tail))


def test_affinity_spreads_different_prompts() -> None:
    counts = Counter(choose(Policy.PREFIX_AFFINITY, idle(4), draw(prompt=[i] * 20)) for i in range(400))
    assert all(60 <= count <= 140 for count in counts.values())
    assert len(counts) == 4


def test_a_worker_that_leaves_moves_only_its_own_prompts() -> None:
    for i in range(100):
        before = choose(Policy.PREFIX_AFFINITY, idle(5), draw(prompt=[i]))
        assert before is not None
        after = choose(Policy.PREFIX_AFFINITY, idle(5), draw(prompt=[i]), tried=frozenset({"10.0.0.2:7000"}))
        assert after == before or before.address == "10.0.0.2:7000"


def test_affinity_gives_way_to_overload() -> None:
    home = choose(Policy.PREFIX_AFFINITY, idle(2), draw(prompt=[1]))
    assert home is not None
    other = next(worker for worker in idle(2) if worker != home)
    limit = AFFINITY_FACTOR * other.load + AFFINITY_SLACK
    busy, too_busy = Candidate(home.address, limit), Candidate(home.address, limit + 1)
    assert choose(Policy.PREFIX_AFFINITY, [busy, other], draw(prompt=[1])) == busy
    assert choose(Policy.PREFIX_AFFINITY, [too_busy, other], draw(prompt=[1])) == other

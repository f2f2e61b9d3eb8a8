"""The index against sets of names; and what it predicts against what caches do, over a line that
loses, repeats and reorders."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cache_policy import CachedPool, TracedPrompt
from pool.prefix.resume_rule import ResumeRule
from protos import worker_pb2
from router.workers.candidate import Candidate
from router.workers.policies import PolicyContext
from router.workers.policy import Policy, choose
from router.workers.prefix_index import PrefixIndex, RoutedPrompt
from runtime.digests import NAME_BYTES, block_names

NAMES = [bytes([number]) * NAME_BYTES for number in range(6)]
sets_of_names = st.sets(st.sampled_from(NAMES)).map(sorted)


def report(
    number: int, stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), *, whole: bool = False
) -> worker_pb2.CacheReport:
    return worker_pb2.CacheReport(
        number=number, whole=whole, stored=b"".join(stored), removed=b"".join(removed)
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), sets_of_names, sets_of_names, st.sampled_from([0, 0, 0, 1, 2])
        )
    ),
    st.permutations(NAMES),
)
def test_a_prompt_resumes_from_the_deepest_name_of_a_worker(
    steps: list[tuple[str, list[bytes], list[bytes], int]], names: list[bytes]
) -> None:
    index, held, numbers = (
        PrefixIndex(),
        {worker: set[bytes]() for worker in "abc"},
        dict.fromkeys("abc", 0),
    )
    for worker, stored, removed, kind in steps:
        if kind == 1:
            index.forget(worker)
            held[worker], numbers[worker] = set(), 0
        assert index.report(
            worker,
            report(
                numbers[worker],
                stored,
                [name for name in removed if name not in stored],
                whole=kind == 2,
            ),
        )
        held[worker] = (set() if kind == 2 else held[worker]) - set(removed) | set(stored)
        numbers[worker] += 1
    deepest = {
        worker: max((depth for depth, name in enumerate(names, 1) if name in known), default=0)
        for worker, known in held.items()
    }
    assert index.depths(names) == {worker: depth for worker, depth in deepest.items() if depth}


def test_lookups_are_cached_until_the_index_changes() -> None:
    index, names = PrefixIndex(), tuple(NAMES)
    index.report("a", report(0, NAMES[:1]))
    found = index.depths(names)
    assert index.depths(names) is found
    assert index.depths(names[:2]) == {"a": 1}
    assert index.depths(names) is not found
    index.report("b", report(0, NAMES[1:2]))
    assert index.depths(names) == {"a": 1, "b": 2}
    index.forget("b")
    assert index.depths(names) == {"a": 1}


def test_blocks_stored_by_several_data_ranks_do_not_accumulate() -> None:
    index, names = PrefixIndex(), [number.to_bytes(16, "big") for number in range(100)]
    for cycle in range(50):
        index.report("w", report(3 * cycle, names))
        index.report("w", report(3 * cycle + 1, [*names, *names]))
        index.report("w", report(3 * cycle + 2, removed=names))
    assert len(index._held["w"]) <= 3 * 16 * len(names)


def test_a_report_that_does_not_follow_is_refused_until_a_whole_account() -> None:
    index = PrefixIndex()
    assert index.report("a", report(0, NAMES[:1], whole=True))
    assert index.has_all("a", 1)
    assert not index.report("a", report(2, NAMES[1:2])), "number 1 is missing"
    assert not index.has_all("a", 3)
    assert index.depths(NAMES) == {"a": 1}
    assert index.report("a", report(0, NAMES[2:3], whole=True)), "an old one, once more"
    assert index.depths(NAMES) == {"a": 1}
    assert index.report("a", report(7, NAMES[3:4], whole=True))
    assert index.has_all("a", 8)
    assert index.depths(NAMES) == {"a": 4}


PAGE = 4


class ReplayedWorker:
    """A prefill worker that runs the real tree; its reports reach an index over a bad line, its
    loads at once."""

    def __init__(self, address: str, rule: ResumeRule, rng: random.Random) -> None:
        self.address = address
        self._rule, self._rng = rule, rng
        self._stack = ExitStack()
        self.restart()

    def restart(self) -> None:
        self._pool = CachedPool(self._rule, num_pages=150, num_slots=12)
        self.watch_anew()

    def watch_anew(self) -> None:
        self._stack.close()
        self._watcher = self._stack.enter_context(self._pool.journal.watch())
        self._late: list[worker_pb2.CacheReport] = []

    def compute(self, at_s: float, token_ids: Sequence[int]) -> int:
        return self._pool.compute(
            TracedPrompt(at_s, len(token_ids), block_names(token_ids, PAGE, compatibility="m"))
        )

    def update(self, index: PrefixIndex) -> bool:
        """Return whether the index needs no full report."""
        return all(index.report(self.address, each) for each in self._arriving()) and index.has_all(
            self.address, self._watcher.num_reports
        )

    def _arriving(self) -> Iterator[worker_pb2.CacheReport]:
        late, self._late = self._late, []
        for each in self._watcher.take():
            match self._rng.choices(["in time", "lost", "twice", "late"], [6, 1, 1, 1])[0]:
                case "in time":
                    yield each
                case "twice":
                    yield from (each, each)
                case "late":
                    self._late.append(each)
        yield from late


def prompts(rng: random.Random) -> Iterator[list[int]]:
    """Return conversations that grow, fork and share prefixes."""
    known: list[list[int]] = [[0] * 9]
    fresh = count(1)
    while True:
        base = rng.choice(known[-60:])
        cut = len(base) if rng.random() < 0.7 else rng.randrange(len(base) + 1)
        prompt = [*base[:cut], *(next(fresh) for _ in range(rng.randrange(1, 14)))]
        yield prompt
        known.append(prompt if len(prompt) < 90 else [0] * 9)


@pytest.mark.parametrize(
    "rule", [ResumeRule(PAGE), ResumeRule(PAGE, 2 * PAGE, has_states=True)], ids=["pages", "states"]
)
def test_predicted_is_reused_for_10000_of_10000(rule: ResumeRule) -> None:
    """Over lost, repeated and reordered reports, and restarts of workers and of the router."""
    rng = random.Random(rule.grid_tokens)
    workers = {address: ReplayedWorker(address, rule, rng) for address in ("h:1", "h:2")}
    index, num_hits, num_anew = PrefixIndex(), 0, 0
    for number, token_ids in zip(range(10_000), prompts(rng), strict=False):
        if rng.random() < 0.002:
            rng.choice(list(workers.values())).restart()
        if rng.random() < 0.002:
            index = PrefixIndex()
            for worker in workers.values():
                worker.watch_anew()
        for worker in workers.values():
            while not worker.update(index):
                num_anew += 1
                index.forget(worker.address)
                worker.watch_anew()
        depths = index.depths(RoutedPrompt(token_ids).block_names(PAGE, "m"))
        held = {address: depth * PAGE for address, depth in depths.items()}
        candidates = [Candidate(address, load=rng.randrange(40)) for address in workers]
        chosen = choose(
            Policy.PREFIX_CACHE, candidates, PolicyContext(number, rng, token_ids, held)
        )
        assert chosen is not None
        assert workers[chosen.address].compute(number * 0.3, token_ids) == held.get(
            chosen.address, 0
        )
        num_hits += chosen.address in held
    assert num_hits > 4_000
    assert num_anew > 500

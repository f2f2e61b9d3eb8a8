"""What a prefill worker need not compute: in memory, in its tiers, or pulled from the best holder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.worker_pb2 import WorkerLoad
from router.workers.holders import (
    UNSEEN_COST,
    BlockHolders,
    Cached,
    HeldBlocks,
    read_from_tiers,
)
from router.workers.worker import Worker, WorkerRole
from router.workers.worker_set import WorkerSet

MODEL, DRAFTED = "m", "m+d"


@dataclass(eq=False)
class Info:
    lends_blocks: bool


@dataclass(eq=False)
class FakeWorker:
    """The used part of `Worker`."""

    address: str
    compatibility: str = MODEL
    is_usable: bool = True
    info: Info | None = field(default_factory=lambda: Info(lends_blocks=True))
    load: WorkerLoad = field(default_factory=WorkerLoad)


worker = cast(Callable[..., Worker], FakeWorker)
SOURCE = worker("source")


Others = dict[WorkerRole, dict[Worker, int]]


def held_among(
    others: Others,
    least_tokens: int,
    sources: Sequence[Worker] = (),
    copied: Cached | None = None,
) -> tuple[BlockHolders, HeldBlocks]:
    """Return the holders among workers with so many cached tokens, and what `sources` have."""
    known = {(role, each.address): each for role, cached in others.items() for each in cached}
    workers = cast(WorkerSet, SimpleNamespace(find=lambda *key: known.get(key)))
    by_role = [
        (role, {each.address: count for each, count in others.get(role, {}).items()})
        for role in WorkerRole
    ]
    holders = BlockHolders(workers, least_tokens)
    held = read_from_tiers(by_role[0][1], copied or {}, sources)
    return holders, holders.with_pulls(held, by_role, sources)


def best(
    others: Others,
    *,
    num_cached: int = 0,
    least_tokens: int = 100,
    source: Worker = SOURCE,
    num_copied: int = 0,
) -> str | None:
    """Return the address of the best holder among workers with so many cached tokens."""
    own = {source: num_cached} if num_cached else {}
    others = {**others, WorkerRole.PREFILL: {**others.get(WorkerRole.PREFILL, {}), **own}}
    copied = {source.address: num_copied}
    holders, held = held_among(others, least_tokens, [source], copied)
    holder = holders.best(held, source)
    return None if holder is None else holder.address


def test_the_one_with_most_of_either_role_is_named() -> None:
    prefill = {worker("p1"): 300, worker("p2"): 400}
    assert best({WorkerRole.PREFILL: prefill, WorkerRole.DECODE: {worker("d"): 350}}) == "p2"
    assert best({WorkerRole.PREFILL: prefill, WorkerRole.DECODE: {worker("d"): 401}}) == "d"


@pytest.mark.parametrize(
    ("count", "num_cached", "least_tokens", "named"),
    [(100, 0, 100, "d"), (99, 0, 100, None), (500, 400, 100, "d"), (499, 400, 100, None)],
)  # fmt: skip
def test_a_pull_must_save_enough(
    count: int, num_cached: int, least_tokens: int, named: str | None
) -> None:
    others = {WorkerRole.DECODE: {worker("d"): count}}
    assert best(others, num_cached=num_cached, least_tokens=least_tokens) == named


def test_a_worker_does_not_pull_from_itself() -> None:
    assert best({WorkerRole.DECODE: {worker("source"): 500}}) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"is_usable": False},
        {"info": None},
        {"info": Info(lends_blocks=False)},
        {"compatibility": "other"},
    ],
    ids=str,
)
def test_workers_that_cannot_lend_are_passed_over(changed: dict[str, Any]) -> None:
    others = {WorkerRole.DECODE: {worker("d", **changed): 500, worker("e"): 200}}
    assert best(others) == "e"


@pytest.mark.parametrize(
    ("source", "holder", "named"),
    [(DRAFTED, MODEL, None), (DRAFTED, DRAFTED, "d"), (MODEL, DRAFTED, "d"), (DRAFTED, "m+e", None)],
)  # fmt: skip
def test_a_holder_has_the_draft_of_the_source(source: str, holder: str, named: str | None) -> None:
    others = {WorkerRole.DECODE: {worker("d", compatibility=holder): 500}}
    assert best(others, source=worker("source", compatibility=source)) == named


@pytest.mark.parametrize(("cost", "counted"), [(0.25, 750), (0.0, 1000 * UNSEEN_COST), (3.0, 0)])
def test_what_could_be_pulled_counts_as_cached_less_its_cost(cost: float, counted: int) -> None:
    idle = worker("idle", load=WorkerLoad(pull_cost=cost))
    busy = worker("busy")
    others = {WorkerRole.PREFILL: {busy: 1000}, WorkerRole.DECODE: {worker("d"): 400}}
    _, held = held_among(others, 100, [idle, busy])
    assert held.worth == {"busy": 1000, "idle": counted}
    assert held.owned == {"busy": 1000}


@pytest.mark.parametrize(
    ("cost", "counted", "owned"), [(0.25, 775, 1000), (0.0, 550, 1000), (3.0, 100, 100)]
)
def test_what_a_tier_has_counts_as_cached_less_its_cost(
    cost: float, counted: int, owned: int
) -> None:
    source = worker("source", load=WorkerLoad(copy_cost=cost))
    cached, copied = {"source": 100, "other": 300}, {"source": 1000, "other": 200, "gone": 500}
    held = read_from_tiers(cached, copied, [source, worker("other")])
    assert held.worth == {"source": counted, "other": 300}
    assert held.owned == {"source": owned, "other": 300}, "unless pulling is faster"
    assert cached == {"source": 100, "other": 300}


def test_what_a_tier_has_is_not_pulled() -> None:
    others = {WorkerRole.DECODE: {worker("d"): 1000}}
    assert best(others, num_copied=950) is None
    assert best(others, num_copied=900) == "d"
    source = worker("source", load=WorkerLoad(copy_cost=0.25, pull_cost=0.5))
    _, held = held_among(others, 100, [source], {"source": 600})
    assert held.worth == {"source": 450 + 200}
    assert held.owned == {"source": 600}


@pytest.mark.parametrize(
    ("in_pool", "worth", "named"),
    [(1000, 750, "d"), (600, 450, "d"), (400, 300, "d"), (90, 300, None)],
)
def test_what_a_slow_tier_has_is_pulled(in_pool: int, worth: int, named: str | None) -> None:
    """The worker asks the holder first, and the tier for the rest."""
    others = {WorkerRole.DECODE: {worker("d"): in_pool}}
    source = worker("source", load=WorkerLoad(copy_cost=0.5, pull_cost=0.25))
    holders, held = held_among(others, 100, [source], {"source": 600})
    assert held.worth == {"source": worth}
    holder = holders.best(held, source)
    assert (None if holder is None else holder.address) == named


def test_nothing_is_weighed_without_a_holder() -> None:
    others = {WorkerRole.PREFILL: {worker("p"): 99}, WorkerRole.DECODE: {worker("d"): 5000}}
    _, held = held_among(others, 5001, [SOURCE])
    assert held.worth == held.owned == {"p": 99}
    assert not held.ranked

"""The worker from which a prompt's beginning is pulled: the one with most, if that saves enough."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.worker_pb2 import WorkerLoad
from router.workers.holders import UNSEEN_PULL_COST, BlockHolders, Cached, RankedHolders
from router.workers.policies import PolicyContext
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


def holders_among(others: Others, least_tokens: int) -> tuple[BlockHolders, Cached, RankedHolders]:
    """Return the holders among workers with so many cached tokens, those of prefill workers by
    address, and all ranked."""
    known = {(role, each.address): each for role, cached in others.items() for each in cached}
    workers = cast(WorkerSet, SimpleNamespace(find=lambda *key: known.get(key)))
    in_prefill, in_pools = (
        {each.address: count for each, count in others.get(role, {}).items()} for role in WorkerRole
    )
    holders = BlockHolders(workers, least_tokens)
    return holders, in_prefill, holders.ranked(in_prefill, [in_pools])


def best(
    others: Others,
    *,
    num_cached: int = 0,
    least_tokens: int = 100,
    source: Worker = SOURCE,
) -> str | None:
    """Return the address of the best holder among workers with so many cached tokens."""
    holders, _, ranked = holders_among(others, least_tokens)
    holder = holders.best(ranked, source, num_cached)
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


@pytest.mark.parametrize(
    ("cost", "counted"), [(0.25, 750), (0.0, 1000 * UNSEEN_PULL_COST), (3.0, 0)]
)
def test_what_could_be_pulled_counts_as_cached_less_its_cost(cost: float, counted: int) -> None:
    idle = worker("idle", load=WorkerLoad(pull_cost=cost))
    busy = worker("busy")
    others = {WorkerRole.PREFILL: {busy: 1000}, WorkerRole.DECODE: {worker("d"): 400}}
    holders, cached, ranked = holders_among(others, 100)
    context = PolicyContext(0, Random(0), num_cached=cached)
    weighed = holders.weighed(context, ranked, [idle, busy])
    assert weighed.num_cached == {"busy": 1000, "idle": counted}
    assert context.num_cached == {"busy": 1000}


def test_nothing_is_weighed_without_a_holder() -> None:
    others = {WorkerRole.PREFILL: {worker("p"): 99}, WorkerRole.DECODE: {worker("d"): 5000}}
    holders, cached, ranked = holders_among(others, 5001)
    context = PolicyContext(0, Random(0), num_cached=cached)
    assert holders.weighed(context, ranked, [SOURCE]) is context

"""The worker from which a prompt's beginning is pulled: the one with most, if that saves enough."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.workers.holders import BlockHolders
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


worker = cast(Callable[..., Worker], FakeWorker)
SOURCE = worker("source")


def best(
    others: dict[WorkerRole, dict[Worker, int]],
    *,
    num_cached: int = 0,
    least_tokens: int = 100,
    source: Worker = SOURCE,
) -> str | None:
    """Return the address of the best holder among workers with so many cached tokens."""
    known = {(role, each.address): each for role, cached in others.items() for each in cached}
    workers = cast(WorkerSet, SimpleNamespace(find=lambda *key: known.get(key)))
    cached = {
        role: {each.address: count for each, count in by_worker.items()}
        for role, by_worker in others.items()
    }
    holder = BlockHolders(workers, least_tokens).best(cached, source, num_cached)
    return None if holder is None else holder.address


def test_the_one_with_most_of_either_role_is_named() -> None:
    prefill = {worker("p1"): 300, worker("p2"): 400}
    assert best({WorkerRole.PREFILL: prefill, WorkerRole.DECODE: {worker("d"): 350}}) == "p2"
    assert best({WorkerRole.PREFILL: prefill, WorkerRole.DECODE: {worker("d"): 401}}) == "d"


@pytest.mark.parametrize(
    ("count", "num_cached", "least_tokens", "named"),
    [(100, 0, 100, "d"), (99, 0, 100, None), (500, 400, 100, "d"), (499, 400, 100, None), (500, 0, 0, None)],
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

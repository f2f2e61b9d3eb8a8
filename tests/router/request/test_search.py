"""The search for a pair on which a preempted request goes on."""

import asyncio
import time

import pytest

from router.request.events import SearchPair
from router.request.preemption import Preemption
from router.request.retries import FlowLimits
from router.request.search import WorkerSearch
from router.workers.placement_request import PlacementRequest, WorkerPair
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import WorkerRole
from runtime.clock import LoopClock
from tests.router.workers.test_both_roles import BOTH, Fleet

PEER_WAIT_S = 0.05


async def test_a_router_that_was_stopped_has_not_lost_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks again before it ends the request for lack of workers."""
    fleet = Fleet()
    directory, placement = fleet.directory, fleet.directory.placement
    free = placement.place
    found: list[WorkerPair | None] = [None]
    monkeypatch.setattr(placement, "place", lambda request: found.pop() if found else free(request))

    async def changed() -> None:
        time.sleep(2 * PEER_WAIT_S)  # noqa: ASYNC251 - as a stopped process

    monkeypatch.setattr(directory, "changed", changed)
    request = PlacementRequest(RoutedPrompt([1, 2, 3]))
    preemption = Preemption(placement, LoopClock(), least=1, first_waiting=lambda: None)
    search = WorkerSearch(directory, FlowLimits(peer_wait_s=PEER_WAIT_S), request, preemption, 10)
    (pool,) = (
        worker
        for worker in directory.workers
        if (worker.address, worker.role) == (BOTH[0], WorkerRole.DECODE)
    )
    async with asyncio.timeout(10):
        assert await search.pair(SearchPair(1, pool.book(1), gives_way=True)) is not None

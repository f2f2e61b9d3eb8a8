"""Output of `baton demo` after its response."""

from typing import cast

import pytest

from baton import demo
from baton.client import AsyncBatonClient
from baton.values import ClusterStatus, WorkerStatus


def seen(open_sessions: int) -> ClusterStatus:
    free = 4 - open_sessions
    worker = WorkerStatus(
        role="decode",
        address="a:1",
        serving=True,
        reason="",
        incarnation="life",
        stages=("0-8",),
        queued_requests=0,
        running_requests=open_sessions,
        pages_total=4,
        pages_free=free,
        slots_total=4,
        slots_free=free,
        open_sessions=open_sessions,
    )
    return ClusterStatus("model", 0, 0, (worker,))


class Client:
    """A client with scripted statuses, the last one repeated forever."""

    def __init__(self, *reports: ClusterStatus) -> None:
        self._reports = list(reports)

    async def cluster_status(self) -> ClusterStatus:
        return self._reports.pop(0) if len(self._reports) > 1 else self._reports[0]


@pytest.mark.parametrize(("reports", "shown"), [((1, 1, 0), 0), ((0,), 0), ((1,), 1)])
async def test_the_status_is_that_of_a_cluster_at_rest_if_it_comes_to_rest(
    monkeypatch: pytest.MonkeyPatch, reports: tuple[int, ...], shown: int
) -> None:
    monkeypatch.setattr(demo, "REPORT_S", 0.001)
    if shown:
        monkeypatch.setattr(demo, "REST_TIMEOUT_S", 0.02)
    client = cast(AsyncBatonClient, Client(*map(seen, reports)))
    assert (await demo.status_at_rest(client)).workers[0].open_sessions == shown

"""Interval of a worker's reports."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from pool.prefix.journal import PointJournal
from pool.request.role_switch import RoleSwitch
from pool.watch import WorkerService
from protos import worker_pb2 as pb
from runtime.errors import InvalidRequestError

IDLE, BUSY = (
    pb.WorkerLoad(serving=True, pages_free=9),
    pb.WorkerLoad(serving=True, pages_free=8, running_requests=1),
)

DECODES = RoleSwitch(("decode",), ("decode",))


class Loads:
    """The load of a worker, which counts its reads."""

    def __init__(self, load: pb.WorkerLoad) -> None:
        self.load = load
        self.num_looks = 0

    def __call__(self, role: str) -> pb.WorkerLoad:
        self.num_looks += 1
        return self.load


async def no_cache() -> int:
    """Return the pages of a flush without a cache."""
    return 0


def watch(service: WorkerService, interval_s: float) -> AsyncIterator[pb.WatchResponse]:
    return service.Watch(pb.WatchRequest(interval_s=interval_s), cast(Any, None))


@pytest.mark.parametrize(("load", "looks_per_report"), [(BUSY, 1), (IDLE, 2)], ids=["busy", "idle"])
async def test_a_pool_that_has_nothing_to_do_reports_half_as_often(
    load: pb.WorkerLoad, looks_per_report: int
) -> None:
    loads = Loads(load)
    reports = watch(
        WorkerService(
            lambda: pb.WorkerInfo(role="decode"), loads, PointJournal(), no_cache, DECODES
        ),
        0.05,
    )
    assert (await anext(reports)).info.role == "decode"
    assert (await anext(reports)).load == load
    for count in range(1, 4):
        assert (await anext(reports)).load == load
        assert loads.num_looks == 1 + count * looks_per_report


async def test_a_change_is_reported_at_the_next_look() -> None:
    loads = Loads(IDLE)
    reports = watch(WorkerService(pb.WorkerInfo, loads, PointJournal(), no_cache, DECODES), 0.05)
    await anext(reports)
    await anext(reports)
    loads.load = pb.WorkerLoad(serving=True, pages_free=5)
    assert (await anext(reports)).load.pages_free == 5
    assert loads.num_looks == 2


async def test_readiness_does_not_wait_for_the_interval() -> None:
    loads = Loads(IDLE)
    service = WorkerService(pb.WorkerInfo, loads, PointJournal(), no_cache, DECODES)
    reports = watch(service, 60.0)
    await anext(reports)
    await anext(reports)
    waiting = asyncio.ensure_future(anext(reports))
    await asyncio.sleep(0)
    loads.load = pb.WorkerLoad(serving=False, reason="draining")
    service.changed()
    assert (await asyncio.wait_for(waiting, 30)).load.reason == "draining"


async def test_an_interval_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"interval_s.*0\.05 to 60"):
        await anext(
            watch(
                WorkerService(pb.WorkerInfo, Loads(IDLE), PointJournal(), no_cache, DECODES), 0.01
            )
        )


async def test_prefix_cache_changes_are_sent_before_the_load() -> None:
    journal = PointJournal()
    points = {b"a" * 16}
    journal.follow(points)
    reports = watch(WorkerService(pb.WorkerInfo, Loads(IDLE), journal, no_cache, DECODES), 0.05)
    assert (await anext(reports)).HasField("info")
    assert (await anext(reports)).cache == pb.CacheReport(number=0, whole=True, stored=b"a" * 16)
    assert (await anext(reports)).load.cache_reports == 1
    points ^= {b"a" * 16, b"b" * 16}
    journal.stored([b"b" * 16])
    journal.removed([b"a" * 16])
    assert (await anext(reports)).cache == pb.CacheReport(
        number=1, stored=b"b" * 16, removed=b"a" * 16
    )
    assert (await anext(reports)).load.cache_reports == 2

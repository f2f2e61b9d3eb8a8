"""Two routers in front of the same workers: they share nothing, see each other's load in reports,
and stay correct."""

import asyncio
from functools import partial

from router.workers.worker import WorkerRole
from runtime.errors import BatonError
from tests.router.harness import RouterHarness, eventually, running_router, token_request
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)


async def asked(router: RouterHarness, index: int) -> None:
    answer = await router.ask(
        token_request([index, 1], max_tokens=2 + index % 9, request_id=f"r{index}")
    )
    assert answer.token_ids == expected_tokens([index, 1], 2 + index % 9)


async def test_both_fill_the_same_pools_and_lose_no_request() -> None:
    """More than the pools hold: what one router thinks is free, the other may have taken; pools
    refuse, routers ask on. Request ids need to be unique with one router only."""
    fabric, journal = Fabric(), Journal()
    workers = [FakePrefill(f"p{i}", fabric, journal) for i in range(2)]
    pools = [FakeDecode(f"d{i}", fabric, journal, max_running=6) for i in range(2)]
    for pool in pools:
        pool.token_pause_s = 0.002
    async with (
        running_router(*workers, *pools) as first,
        running_router(*workers, *pools, start_workers=False) as second,
    ):
        await eventually(lambda: not second.directory.pair_problem(), "a stranger")
        await asyncio.gather(
            *(asked(router, index) for router in (first, second) for index in range(60))
        )
        for router in (first, second):
            await router.assert_nothing_left()


def all_know_of(routers: tuple[RouterHarness, ...], count: int) -> bool:
    """Return whether the decode pools' last reports to each router show this many requests in
    all."""
    return all(
        count
        == sum(
            worker.load.running_requests
            for worker in router.directory.workers
            if worker.role is WorkerRole.DECODE
        )
        for router in routers
    )


async def test_one_routers_load_shows_in_the_others_choices() -> None:
    fabric, journal = Fabric(), Journal()
    prefill, pools = (
        FakePrefill("p", fabric, journal),
        [FakeDecode(f"d{i}", fabric, journal) for i in range(2)],
    )
    may_go = asyncio.Event()
    for pool in pools:
        pool.at(Point.TOKEN, lambda _: may_go.wait())
    async with (
        running_router(prefill, *pools) as first,
        running_router(prefill, *pools, start_workers=False) as second,
    ):
        await eventually(lambda: not second.directory.pair_problem(), "a stranger")
        calls = []
        for index in range(1, 17):
            calls.append(asyncio.create_task(asked((first, second)[index % 2], 9 * index)))
            await eventually(
                partial(all_know_of, (first, second), index), f"a report without request {index}"
            )
        assert [len(pool.open_requests) for pool in pools] == [8, 8]
        may_go.set()
        await asyncio.gather(*calls)


async def test_the_death_of_a_router_frees_its_resources_and_disturbs_no_other() -> None:
    fabric, journal = Fabric(), Journal()
    prefill, pool = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    may_go = asyncio.Event()
    pool.at(Point.TOKEN, lambda _: may_go.wait())
    async with running_router(prefill, pool) as first:
        async with running_router(prefill, pool, start_workers=False) as second:
            await eventually(lambda: not second.directory.pair_problem(), "a stranger")
            lost = asyncio.create_task(second.failure(token_request([5], max_tokens=200)))
            kept = asyncio.create_task(asked(first, 8))
            await eventually(lambda: len(pool.open_requests) == 2, "too few requests")
            await second.server.grpc.stop(grace=None)
            assert isinstance(await lost, BatonError)
            may_go.set()
            await kept
        await eventually(lambda: not pool.open_requests, "what the dead router held")
        await asked(first, 3)
        await first.assert_nothing_left()

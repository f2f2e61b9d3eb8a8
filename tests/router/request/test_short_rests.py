"""A decode pool that has most of a prompt computes the rest; a pool that cannot is replaced by a
handoff."""

import pytest

from runtime.digests import block_names
from runtime.errors import CapacityError
from tests.router.harness import RouterHarness, running_router, token_request
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

PROMPT = list(range(40))


def cluster(
    num_decode: int = 1, *, local_rest_tokens: int = 8
) -> tuple[FakePrefill, list[FakeDecode]]:
    """Start a cluster whose first pool has 32 tokens of the prompt."""
    fabric, journal = Fabric(), Journal()
    pools = [FakeDecode(f"d{i}", fabric, journal) for i in range(num_decode)]
    for pool in pools:
        pool.local_rest_tokens = local_rest_tokens
    pools[0].kept = block_names(PROMPT[:32], 16, compatibility=pools[0].compatibility)
    return FakePrefill("p", fabric, journal), pools


async def answered(router: RouterHarness) -> int:
    """Check the response; return the number of cached prompt tokens that it reports."""
    answer = await router.ask(token_request(PROMPT, max_tokens=6))
    assert answer.token_ids == expected_tokens(PROMPT, 6)
    assert answer.finish is not None
    await router.assert_nothing_left()
    return answer.finish.usage.cached_tokens


async def test_no_prefill_worker_is_used() -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        assert await answered(router) == 32
    assert {worker for worker, _ in prefill.journal.entries} == {"d0"}


async def test_a_longer_rest_is_handed_over() -> None:
    prefill, pools = cluster(local_rest_tokens=7)
    async with running_router(prefill, *pools) as router:
        assert await answered(router) == 0
    assert Point.COMMIT in prefill.journal.events()


@pytest.mark.parametrize("error", [CapacityError("given up since", resource="prefix cache"), None])
async def test_a_pool_that_cannot_is_sent_the_prompt(error: CapacityError | None) -> None:
    """It refuses, or it has died and is back later."""
    prefill, pools = cluster(2)
    if error is not None:
        pools[0].fail_at(Point.RESERVE, error)
    else:
        pools[0].die_at(Point.RESERVE)
    async with running_router(prefill, *pools) as router:
        assert await answered(router) == 0
    assert Point.COMMIT in prefill.journal.events()


@pytest.mark.parametrize("point", [Point.COMPUTED, Point.TOKEN])
async def test_a_pool_that_dies_meanwhile_is_replaced(point: Point) -> None:
    """Before its first token, and with some: the stream goes on elsewhere."""
    prefill, pools = cluster(2)
    pools[0].die_at(point)
    async with running_router(prefill, *pools) as router:
        await answered(router)
    assert ("d1", Point.COMMIT) in prefill.journal.entries

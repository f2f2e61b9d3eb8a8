"""Pools of different sizes with one router: a request goes to a pool it fits, and waits for no
other pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from protos import types_pb2
from router.request.rejections import AdmissionLimits
from runtime.errors import InvalidRequestError, UnavailableError
from tests.router.harness import RouterHarness, eventually, running_router, token_request
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

PROMPT = list(range(1, 41))
FITS_SMALL, NEEDS_LARGE = 20, 60  # tokens to generate; the small pool holds 64


class Cluster:
    """A prefill worker, a small pool that is preferred, and a large one."""

    def __init__(self) -> None:
        fabric, journal = Fabric(), Journal()
        self.prefill = FakePrefill("p", fabric, journal)
        self.small, self.large = (FakeDecode(name, fabric, journal) for name in ("small", "large"))
        self.small.max_context_tokens = 64
        self.workers = (self.prefill, self.small, self.large)


async def test_a_request_too_long_for_one_pool_goes_to_another() -> None:
    cluster = Cluster()
    async with running_router(*cluster.workers) as router:
        for _ in range(4):
            answer = await router.ask(token_request(PROMPT, max_tokens=NEEDS_LARGE))
            assert answer.token_ids == expected_tokens(PROMPT, NEEDS_LARGE)
        info = await router.failure(token_request([1] * 256))
        assert isinstance(info, InvalidRequestError)
        assert "maximum context length of 256" in str(info), "the largest pool's"
        await router.assert_nothing_left()


async def test_it_moves_to_a_pool_that_can_hold_it() -> None:
    cluster = Cluster()
    other = FakeDecode("other", cluster.prefill.fabric, cluster.prefill.journal)
    async with running_router(*cluster.workers, other) as router:
        min((cluster.large, other), key=lambda pool: pool.address).die_at(Point.TOKEN)
        answer = await router.ask(token_request(PROMPT, max_tokens=NEEDS_LARGE))
        assert answer.token_ids == expected_tokens(PROMPT, NEEDS_LARGE)
        assert router.metric("baton_migrations_total", type="lost", outcome="resumed") == 1


def _usable(router: RouterHarness, cluster: Cluster) -> set[str]:
    names = {worker.address: worker.name for worker in cluster.workers}
    return {
        names[worker.address]
        for worker in router.directory.workers
        if worker.is_usable and worker.address in names
    }


@asynccontextmanager
async def large_pool_away(max_wait_s: float) -> AsyncIterator[RouterHarness]:
    cluster = Cluster()
    async with running_router(
        *cluster.workers, admission=AdmissionLimits(max_wait_s=max_wait_s)
    ) as router:
        await cluster.large.die()
        await eventually(lambda: "large" not in _usable(router, cluster), "the death")
        yield router


async def test_a_request_with_a_missing_pool_blocks_no_other() -> None:
    async with large_pool_away(max_wait_s=250.0) as router:
        long = asyncio.create_task(
            router.failure(token_request(PROMPT, max_tokens=NEEDS_LARGE), timeout_s=250.0)
        )
        await eventually(lambda: router.services.admission.num_waiting == 1, "a request that waits")
        for _ in range(3):
            answer = await router.ask(token_request(PROMPT, max_tokens=FITS_SMALL))
            assert answer.finish is not None
            assert answer.finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await router.assert_nothing_left()


@pytest.mark.parametrize("line_wait_s", [0.5, 0.2])
async def test_a_request_with_a_missing_pool_gets_the_reason(line_wait_s: float) -> None:
    """Whether its own wait ends first or the look through the line."""
    async with large_pool_away(max_wait_s=0.5) as router:
        line = router.services.admission._line
        line.limits = replace(line.limits, max_wait_s=line_wait_s)
        error = await router.failure(token_request(PROMPT, max_tokens=NEEDS_LARGE))
        assert isinstance(error, UnavailableError)
        assert "no workers that hold 100 tokens" in str(error)

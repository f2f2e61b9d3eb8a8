"""The link between a prefill worker and a decode pool fails while both live: which requests fail,
and how often."""

from protos import types_pb2
from runtime.errors import HandoffError
from tests.router.harness import running_router, token_request
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

PROMPT = [1, 2, 3]
NUM_REQUESTS = 5


def cut(source: FakePrefill, pool: FakeDecode) -> None:
    """Drop all bytes that this source sends to this pool."""

    async def fail(request: types_pb2.EngineRequest) -> None:
        if request.request_id in pool.open_requests:
            raise HandoffError("stage 0: the connection to the peer is gone")

    source.at(Point.SENDING, fail)


async def test_after_one_failure_prompts_go_to_the_source_that_reaches_the_pool() -> None:
    fabric, journal = Fabric(), Journal()
    sources = [FakePrefill(name, fabric, journal) for name in "ab"]
    pool = FakeDecode("d", fabric, journal)
    async with running_router(*sources, pool) as router:
        first = min(sources, key=lambda worker: worker.address)  # the choice among idle ones
        cut(first, pool)
        for _ in range(NUM_REQUESTS):
            assert (await router.ask(token_request(PROMPT))).token_ids == expected_tokens(PROMPT, 4)
        assert (
            router.metric("baton_router_retries_total", role="prefill", reason="HANDOFF_FAILED")
            == 1
        )
        assert [name for name, what in journal.entries if what is Point.QUEUED].count(
            first.name
        ) == 1
        assert all(worker.is_usable for worker in router.directory.workers), "none of them is lost"
        await router.assert_nothing_left()


async def test_a_pool_that_its_only_source_cannot_reach_gives_way_to_another() -> None:
    """The same source would be tried again and again, for the same pool."""
    fabric, journal = Fabric(), Journal()
    source = FakePrefill("p", fabric, journal)
    pools = [FakeDecode(name, fabric, journal) for name in "ab"]
    async with running_router(source, *pools) as router:
        first = min(pools, key=lambda worker: worker.address)
        cut(source, first)
        for _ in range(NUM_REQUESTS):
            assert (await router.ask(token_request(PROMPT))).token_ids == expected_tokens(PROMPT, 4)
        assert (
            router.metric("baton_router_retries_total", role="decode", reason="HANDOFF_FAILED") == 1
        )
        assert [name for name, what in journal.entries if what is Point.RESERVED].count(
            first.name
        ) == 1
        await router.assert_nothing_left()

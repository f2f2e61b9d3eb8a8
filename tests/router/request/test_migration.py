"""A decode pool dies or drains in mid-stream: the client's stream continues without a gap or a
repeat."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import accumulate

import pytest

from protos import generation_pb2, types_pb2
from router.workers.worker import Worker
from runtime.errors import (
    BatonError,
    CapacityError,
    DeadlineError,
    DrainingError,
    InternalError,
    PeerLostError,
    StalledError,
    UnavailableError,
)
from tests.router.harness import (
    FLOW_LIMITS,
    RouterHarness,
    eventually,
    running_router,
    token_request,
)
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

PROMPT = [1, 2, 3]
NUM_TOKENS = 9


def cluster(num_decode: int = 2) -> tuple[FakePrefill, list[FakeDecode]]:
    fabric, journal = Fabric(), Journal()
    return FakePrefill("p", fabric, journal), [
        FakeDecode(f"d{i}", fabric, journal) for i in range(num_decode)
    ]


def gives_up_at_token(number: int, error: BatonError) -> Callable[[object], Awaitable[None]]:
    """Return a hook for any number of pools that ends a stream before the `number`th token in all
    is sent."""
    seen = 0

    async def hook(_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            raise error

    return hook


def a_question() -> generation_pb2.GenerateRequest:
    return token_request(PROMPT, max_tokens=NUM_TOKENS, num_top_logprobs=0)


async def answered_as_if_nothing_happened(router: RouterHarness) -> None:
    answer = await router.ask(a_question())
    assert answer.token_ids == expected_tokens(PROMPT, NUM_TOKENS)
    logprobs = [entry.logprob for chunk in answer.chunks for entry in chunk.logprobs]
    assert logprobs == [-float(token) for token in answer.token_ids[1:]], (
        "one per token that the pools drew"
    )
    assert [chunk.usage.completion_tokens for chunk in answer.chunks] == list(
        accumulate(len(chunk.token_ids) for chunk in answer.chunks)
    )
    assert answer.finish is not None
    assert (answer.finish.usage.prompt_tokens, answer.finish.usage.completion_tokens) == (
        len(PROMPT),
        NUM_TOKENS,
    )
    assert answer.finish.reason == types_pb2.FINISH_REASON_LENGTH
    await router.assert_nothing_left()


def first_choice(pools: list[FakeDecode]) -> FakeDecode:
    return min(pools, key=lambda pool: pool.address)


@pytest.mark.parametrize("point", [Point.RESERVED, Point.COMMIT, Point.TOKEN, Point.FINISH])
async def test_the_stream_continues_when_a_pool_dies_at_any_point(point: Point) -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        first_choice(pools).die_at(point)
        await answered_as_if_nothing_happened(router)
        assert not first_choice(pools)._hooks, "it was not chosen, so nothing was tested"
        assert router.metric("baton_migrations_total", type="lost", outcome="resumed") == 1
        assert router.metric("baton_router_retries_total", role="decode", reason="PEER_LOST") == 1


@pytest.mark.parametrize("number", [1, 5, NUM_TOKENS - 1])
async def test_a_pool_that_drains_hands_its_requests_back(number: int) -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        leaves = gives_up_at_token(number, DrainingError("the server is stopping"))
        for pool in pools:
            pool.at(Point.TOKEN, leaves)
        await answered_as_if_nothing_happened(router)
        assert router.metric("baton_migrations_total", type="drained", outcome="resumed") == 1


@pytest.mark.parametrize("num_pools", [1, 2])
async def test_a_pool_that_is_late_for_a_request_serves_the_others(
    num_pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, pools = cluster(num_pools)
    async with running_router(prefill, *pools) as router:
        late = gives_up_at_token(3, StalledError("the machine was too busy"))
        for pool in pools:
            pool.at(Point.TOKEN, late)
        lost: list[str] = []
        monkeypatch.setattr(Worker, "lost", lambda _, reason: lost.append(reason))
        await answered_as_if_nothing_happened(router)
        assert not lost
        assert router.metric("baton_migrations_total", type="held_up", outcome="resumed") == 1


async def test_text_and_a_stop_string_cross_the_border() -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        request = a_question()
        whole = await router.ask(request)
        request.stop.stop_strings.append(
            whole.text[4:7]
        )  # begins before the move and ends after it
        undisturbed = await router.ask(request)
        assert undisturbed.text == whole.text[:4]
        leaves = gives_up_at_token(5, DrainingError("leaving"))
        for pool in pools:
            pool.at(Point.TOKEN, leaves)
        moved = await router.ask(request)
        assert (moved.text, moved.token_ids) == (undisturbed.text, undisturbed.token_ids)
        assert moved.finish is not None
        assert moved.finish.stop_string == whole.text[4:7]
        await router.assert_nothing_left()


async def test_a_stage_that_is_back_takes_its_requests_again() -> None:
    """The only pool loses a stage and forms again within the patience with a lost peer."""
    prefill, (pool,) = cluster(1)
    async with running_router(prefill, pool) as router:
        pool.fail_at(Point.TOKEN, UnavailableError("stage 1 is gone"))
        await answered_as_if_nothing_happened(router)


async def test_the_only_pool_back_under_its_address_takes_its_requests_again() -> None:
    prefill, (pool,) = cluster(1)
    async with running_router(prefill, pool) as router:
        pool.die_at(Point.TOKEN)
        answer = asyncio.create_task(answered_as_if_nothing_happened(router))
        await eventually(lambda: not pool._hooks, "the death")
        await asyncio.sleep(0.1)
        await pool.start()
        await answer


async def test_losses_are_bounded_since_the_request_may_cause_them() -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        for pool in pools:
            pool.token_pause_s = 0.05  # the commit goes by another stream than the error
            pool.fail_at(Point.TOKEN, PeerLostError("the pool crashed"), times=100)
        error = await router.failure(a_question())
        assert isinstance(error, PeerLostError)
        assert "the pool crashed" in str(error)
        assert prefill.journal.events().count(Point.COMMIT) == FLOW_LIMITS.migrations + 1
        assert (
            router.metric("baton_migrations_total", type="lost", outcome="resumed")
            == FLOW_LIMITS.migrations
        )
        assert router.metric("baton_migrations_total", type="lost", outcome="failed") == 1
        await router.assert_nothing_left()


async def test_pools_that_drain_do_not_count_as_losses() -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools, flow=replace(FLOW_LIMITS, migrations=0)) as router:
        for pool in pools:
            pool.fail_at(Point.TOKEN, DrainingError("leaving"), times=3)
        await answered_as_if_nothing_happened(router)


async def test_a_request_keeps_its_weights() -> None:
    """A pool of another revision is no substitute, even if idle."""
    fabric, journal = Fabric(), Journal()
    old = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    new = (
        FakePrefill("p2", fabric, journal, compatibility="new"),
        FakeDecode("d2", fabric, journal, compatibility="new"),
    )
    async with running_router(*old, *new, flow=replace(FLOW_LIMITS, peer_wait_s=0.3)) as router:
        for pool in (old[1], new[1]):
            pool.die_at(Point.TOKEN)
        assert isinstance(await router.failure(a_question()), PeerLostError)
        assert sorted(event for _, event in journal.entries if event == Point.COMMIT) == [
            Point.COMMIT
        ]
        await router.assert_nothing_left()


async def test_the_deadline_holds_while_a_pair_is_sought() -> None:
    prefill, (pool,) = cluster(1)
    async with running_router(prefill, pool) as router:
        pool.die_at(Point.TOKEN)
        assert isinstance(await router.failure(a_question(), timeout_s=3), DeadlineError)
        await router.assert_nothing_left()
        assert router.metric("baton_migrations_total", type="lost", outcome="failed") == 1


async def test_full_pools_are_waited_for() -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        for pool in pools:
            pool.at(Point.TOKEN, gives_up_at_token(2, PeerLostError("the pool crashed")))
        full = [CapacityError("full", resource="pages")] * 3

        async def refuses(_: object) -> None:
            if prefill.journal.events().count(Point.TOKEN) and full:
                raise full.pop()

        for pool in pools:
            pool.at(Point.RESERVE, refuses)
        await answered_as_if_nothing_happened(router)
        assert not full


async def test_prefill_dies_while_it_runs_the_prompt_again() -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        first_choice(pools).die_at(Point.TOKEN)

        async def second_time(_: object) -> None:
            if prefill.journal.events().count(Point.QUEUED) == 1:
                raise PeerLostError("crashed")

        prefill.at(Point.STARTED, second_time)
        await answered_as_if_nothing_happened(router)


async def test_a_different_first_token_on_replay_is_a_bug_and_is_not_sent() -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        first_choice(pools).die_at(Point.TOKEN)

        async def differs(_: object) -> None:
            prefill.first_token_offset = prefill.journal.events().count(Point.QUEUED)

        prefill.at(Point.QUEUED, differs)
        assert isinstance(await router.failure(a_question()), InternalError)
        await router.assert_nothing_left()


async def test_a_client_that_leaves_while_its_request_moves_leaves_nothing() -> None:
    prefill, pools = cluster()
    async with running_router(prefill, *pools) as router:
        first_choice(pools).die_at(Point.TOKEN)
        call = asyncio.create_task(router.ask(a_question()))
        await eventually(lambda: not first_choice(pools)._hooks, "the death")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await router.assert_nothing_left()

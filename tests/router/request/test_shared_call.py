"""All requests to a worker share one call: each gets its own, in order and whole, or goes on
elsewhere with the same tokens; none holds up or ends another."""

import asyncio
import logging

import pytest

from protos import generation_pb2
from router.request import flow
from router.request.answer import ResponseQueue
from runtime.errors import UnavailableError
from tests.router.harness import NO_GRACE, RouterHarness, eventually, running_router, token_request
from tests.support.router.fake_workers import (
    MAX_UNREAD_SCORES,
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

NUM_TOKENS = 40


def cluster(num_decode: int = 1) -> tuple[FakePrefill, list[FakeDecode]]:
    fabric, journal = Fabric(), Journal()
    return FakePrefill("p", fabric, journal), [
        FakeDecode(f"d{i}", fabric, journal) for i in range(num_decode)
    ]


async def answered(router: RouterHarness, prompt: int) -> None:
    answer = await router.ask(token_request([prompt], max_tokens=NUM_TOKENS, num_top_logprobs=0))
    assert answer.token_ids == expected_tokens([prompt], NUM_TOKENS)
    logprobs = [entry.logprob for chunk in answer.chunks for entry in chunk.logprobs]
    assert logprobs == [-float(token_id) for token_id in answer.token_ids[1:]]


async def test_requests_share_a_call_and_each_gets_its_own_tokens_in_order() -> None:
    prefill, (pool,) = cluster()
    async with running_router(prefill, pool) as router:
        pool.token_pause_s = 0.01
        await asyncio.gather(*(answered(router, prompt) for prompt in range(0, 320, 10)))
        assert (prefill.num_calls, pool.num_calls) == (1, 1)
        await router.assert_nothing_left()


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("position", [1, 7, NUM_TOKENS - 1])
async def test_lost_or_repeated_tokens_cost_a_retry_and_change_no_output(
    position: int, times: int
) -> None:
    prefill, (pool,) = cluster()
    tries = 0

    def times_sent(where: int) -> int:
        nonlocal tries
        tries += where == position
        return times if where == position and tries == 1 else 1

    pool.times_sent = times_sent
    async with running_router(prefill, pool) as router:
        await answered(router, 3)
        assert router.metric("baton_router_retries_total", role="decode", reason="PEER_LOST") == 1
        await router.assert_nothing_left()


async def test_a_call_that_ends_moves_its_requests_and_is_made_again() -> None:
    """As when the pool gave the router up, or a proxy between them did."""
    prefill, pools = cluster(2)
    async with running_router(prefill, *pools) as router:
        for pool in pools:
            pool.token_pause_s = 0.01
        answers = [asyncio.create_task(answered(router, prompt)) for prompt in (1, 2, 3, 4)]
        await eventually(lambda: prefill.journal.events().count(Point.TOKEN) > 20, "tokens")
        for pool in pools:
            pool.call_errors.append(UnavailableError("the router has read nothing"))
        await asyncio.gather(*answers)
        assert router.metric("baton_migrations_total", type="lost", outcome="resumed") == 4
        await answered(router, 5)
        await router.assert_nothing_left()


async def test_a_client_that_does_not_read_holds_up_no_other_one() -> None:
    prefill, (pool,) = cluster()
    pool.token_pause_s = 0.01
    async with running_router(prefill, pool) as router:
        request = token_request([0], max_tokens=200)
        stream = router.stub.Generate(request).__aiter__()
        first = await anext(stream)
        await asyncio.gather(*(answered(router, prompt) for prompt in (1, 2, 3)))
        token_ids = list(first.chunk.token_ids)
        token_ids += [
            token_id async for response in stream for token_id in response.chunk.token_ids
        ]
        assert token_ids == expected_tokens([0], 200)
        await router.assert_nothing_left()


@pytest.mark.parametrize("how", ["left", "aborted", "stopped"])
async def test_late_events_of_a_finished_request_are_dropped(how: str) -> None:
    prefill, (pool,) = cluster()
    pool.token_pause_s = 0.01
    async with running_router(prefill, pool) as router:
        others = [asyncio.create_task(answered(router, prompt)) for prompt in (1, 2, 3)]
        request = token_request([65], max_tokens=150, request_id="r")
        if how == "stopped":
            request.stop.stop_strings.append("a")
        call = router.stub.Generate(request)
        async for response in call:
            if how == "left":
                call.cancel()
                break
            if how == "aborted" and len(response.chunk.token_ids):
                await router.stub.Abort(generation_pb2.AbortRequest(request_ids=["r"]))
        await asyncio.gather(*others)
        (worker,) = (worker for worker in router.directory.workers if worker.role == "decode")
        assert not worker.decode_calls.current()._receivers
        await router.assert_nothing_left()


async def test_unread_scores_stay_on_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, (pool,) = cluster()
    prefill.scored_chunks = (1,) * 100
    may_go, passed = asyncio.Event(), list[int]()
    monkeypatch.setattr(ResponseQueue, "has_room", False)

    async def room(_: ResponseQueue) -> None:
        await may_go.wait()
        passed.append(1)

    monkeypatch.setattr(ResponseQueue, "room", room)
    async with running_router(prefill, pool) as router:
        prompt = list(range(101))
        asked = asyncio.create_task(
            router.ask(
                token_request(prompt, max_tokens=2, num_prompt_logprobs=0, request_id="scored")
            )
        )
        await eventually(lambda: prefill.num_scored["scored"] == MAX_UNREAD_SCORES, "scores")
        await asyncio.gather(*(answered(router, other) for other in (1, 2, 3)))
        assert prefill.num_scored["scored"] == MAX_UNREAD_SCORES
        may_go.set()
        answer = await asked
        assert answer.token_ids == expected_tokens(prompt, 2)
        scored = [
            token_id for chunk in answer.chunks for token_id in chunk.prompt_logprobs.token_ids
        ]
        assert (scored, len(passed)) == (prompt[1:], 100)
        await router.assert_nothing_left()


@pytest.mark.parametrize("num_passed", [0, 1, 3])
async def test_scores_that_wait_for_a_client_end_with_its_request(
    num_passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the next scores begins before the wait for the last ones is over."""
    prefill, (pool,) = cluster()
    prefill.scored_chunks = (1,) * 100
    waits: list[int] = []
    never = asyncio.Event()  # kept here: a forgotten task that waits alone would be collected
    monkeypatch.setattr(ResponseQueue, "has_room", False)

    async def room(_: ResponseQueue) -> None:
        waits.append(1)
        if len(waits) > num_passed:
            await never.wait()

    monkeypatch.setattr(ResponseQueue, "room", room)
    async with running_router(prefill, pool) as router:
        request = token_request(
            list(range(101)), max_tokens=2, num_prompt_logprobs=0, request_id="scored"
        )
        asked = asyncio.create_task(router.ask(request))
        await eventually(lambda: len(waits) > num_passed, "the wait for the client")
        await router.stub.Abort(generation_pb2.AbortRequest(request_ids=["scored"]))
        await asked
        await router.assert_nothing_left()


async def test_a_worker_that_floods_a_waiting_request_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefill, (pool,) = cluster()
    prefill.scored_chunks = (1,) * 100
    may_go = asyncio.Event()
    monkeypatch.setattr(flow, "MAX_QUEUED", 4)
    monkeypatch.setattr(ResponseQueue, "has_room", False)

    async def room(_: ResponseQueue) -> None:
        await may_go.wait()

    def reasons() -> list[str]:
        return [vars(record).get("reason", "") for record in caplog.records]

    monkeypatch.setattr(ResponseQueue, "room", room)
    async with running_router(prefill, pool) as router:
        prompt = list(range(101))
        asked = asyncio.create_task(
            router.ask(token_request(prompt, max_tokens=2, num_prompt_logprobs=0))
        )
        await eventually(lambda: "it sent more than could be handled" in reasons(), "the flood")
        monkeypatch.setattr(flow, "MAX_QUEUED", 64)
        may_go.set()
        assert (await asked).token_ids == expected_tokens(prompt, 2)
        assert router.metric("baton_router_retries_total", role="prefill", reason="PEER_LOST") == 1
        await router.assert_nothing_left()


async def test_a_worker_with_another_wire_version_is_refused_with_a_reason() -> None:
    prefill, (pool,) = cluster()
    pool.wire_version = 0
    async with running_router(prefill, pool, admission=NO_GRACE) as router:
        error = await router.failure(token_request([1]))
        assert isinstance(error, UnavailableError)
        assert "it speaks another version of the worker protocol" in str(error)

"""Two routers in front of the same workers, one of which goes away: clients get every token once,
and no response is lost. Killed processes: tests/cluster/test_routers.py."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from baton.client import AsyncBatonClient, BatonClient
from baton.retry import NO_RETRY, Targets
from baton.values import Chunk, Event, Finish, Query, Sampling, Stop
from runtime.errors import DeadlineError, DrainingError, PeerLostError, UnavailableError
from tests.router.harness import RouterHarness, eventually, running_router
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

PROMPT = (1, 2, 3)
NUM_TOKENS = 9
QUERY = Query(
    PROMPT, Sampling(seed=5), Stop(max_tokens=NUM_TOKENS), num_top_logprobs=0, num_prompt_logprobs=0
)


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[RouterHarness, RouterHarness, FakeDecode]]:
    fabric, journal = Fabric(), Journal()
    prefill, decode = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    async with (
        running_router(prefill, decode) as first,
        running_router(prefill, decode, start_workers=False) as second,
    ):
        await eventually(lambda: not second.directory.pair_problem(), "a stranger")
        yield first, second, decode


@asynccontextmanager
async def client_of(*routers: RouterHarness, first: int = 0) -> AsyncIterator[AsyncBatonClient]:
    """Return a client that begins with router `first`."""
    async with AsyncBatonClient(*(router.address for router in routers)) as client:
        while next_of(client._turns) != first:
            client._turns.next()
        yield client


def next_of(turns: Targets) -> int:
    return turns._turn


@pytest.fixture(autouse=True)
def _held_ports() -> Iterator[None]:
    yield
    while _HELD:
        _HELD.pop().close()


_HELD: list[
    socket.socket
] = []  # on ports of routers that ended: no other test's router gets them meanwhile


async def ended(router: RouterHarness) -> None:
    """End a router without a message, as a killed process does."""
    await router.server.grpc.stop(grace=None)
    host, _, port = router.address.rpartition(":")
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with suppress(OSError):  # it is in use already
        held.bind((host, int(port)))
    _HELD.append(held)


async def told(
    client: AsyncBatonClient, query: Query, router: RouterHarness, after: int
) -> list[Event]:
    """Return all events; the router goes away once the client has this many."""
    events: list[Event] = []
    if after == 0:
        await ended(router)
    async for event in client.generate(query, timeout_s=60):
        events.append(event)
        if len(events) == after:
            await ended(router)
    return events


def content(events: list[Event]) -> list[object]:
    """Return the contents of prompt and tokens, independent of chunk sizes."""
    chunks = [event for event in events if isinstance(event, Chunk)]
    return [
        [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None],
        [token_id for chunk in chunks for token_id in chunk.token_ids],
        [scored for chunk in chunks for scored in chunk.logprobs],
        "".join(chunk.text for chunk in chunks),
    ]


@pytest.mark.parametrize("after", range(NUM_TOKENS + 1))
async def test_a_response_resumes_at_the_other_router(after: int) -> None:
    """Event 0 has the prompt's scores, event k token k."""
    async with two_routers() as (first, second, decode):
        decode.token_pause_s = 0.01
        async with client_of(second) as undisturbed:
            right = [event async for event in undisturbed.generate(QUERY)]
        async with client_of(first, second) as client:
            events = await told(client, QUERY, first, after)
        assert content(events) == content(right)
        assert isinstance(events[-1], Finish)
        assert isinstance(right[-1], Finish)
        assert (events[-1].reason, events[-1].usage) == (right[-1].reason, right[-1].usage)
        assert len({event.request_id for event in events}) == 1
        await second.assert_nothing_left()
        await eventually(lambda: not decode.open_requests, "what the dead router held")


async def test_every_choice_resumes_with_its_text_and_stop_strings() -> None:
    async with two_routers() as (first, second, decode):
        decode.token_pause_s = 0.01
        async with client_of(second) as undisturbed:
            text = (await undisturbed.complete(QUERY)).text
            query = replace(QUERY, n=3, stop=replace(QUERY.stop, strings=(text[5:8],)))
            right = await undisturbed.choices(query)
        assert {choice.finish.stop_string for choice in right} == {text[5:8]}
        async with client_of(first, second) as client:
            events = await told(client, query, first, 10)
        for index, whole in enumerate(right):
            mine = [event for event in events if event.index == index]
            assert "".join(event.text for event in mine if isinstance(event, Chunk)) == whole.text
            assert (
                sum((event.token_ids for event in mine if isinstance(event, Chunk)), ())
                == whole.token_ids
            )
            assert [event.stop_string for event in mine if isinstance(event, Finish)] == [text[5:8]]
        await second.assert_nothing_left()


async def test_the_client_of_threads_does_the_same() -> None:
    async with two_routers() as (first, second, decode):
        decode.token_pause_s = 0.02
        loop = asyncio.get_running_loop()

        def ask() -> list[Event]:
            events: list[Event] = []
            with BatonClient(first.address, second.address) as client:
                while next_of(client._turns) != 0:
                    client._turns.next()
                for event in client.generate(QUERY, timeout_s=60):
                    events.append(event)
                    if len(events) == 4:
                        asyncio.run_coroutine_threadsafe(ended(first), loop).result(60)
            return events

        events = await asyncio.to_thread(ask)
        token_ids = [
            token for event in events if isinstance(event, Chunk) for token in event.token_ids
        ]
        assert token_ids == expected_tokens(list(PROMPT), NUM_TOKENS)
        await second.assert_nothing_left()


async def test_a_draining_router_hands_its_streams_over() -> None:
    """What it cannot finish in time goes on elsewhere, and nothing new begins there."""
    async with two_routers() as (first, second, decode):
        decode.token_pause_s = 0.05
        async with (
            client_of(first, second) as client,
            client_of(first) as only,
            asyncio.TaskGroup() as group,
        ):
            answers = [group.create_task(client.complete(QUERY, timeout_s=60)) for _ in range(4)]
            await eventually(lambda: len(decode.open_requests) == 4, "four answers")
            only._retry = NO_RETRY
            refused = group.create_task(_refusal(only))
            await first.server.drain(grace_s=0.1)
        assert isinstance(refused.result(), DrainingError)
        for answer in answers:
            assert list(answer.result().token_ids) == expected_tokens(list(PROMPT), NUM_TOKENS)
        await second.assert_nothing_left()


async def _refusal(client: AsyncBatonClient) -> Exception:
    """Return the error of a started response whose client then gives up."""
    try:
        await client.complete(QUERY, timeout_s=60)
    except UnavailableError as error:
        return error
    raise AssertionError("it was served")


async def test_requests_go_to_a_live_router() -> None:
    async with two_routers() as (first, second, _):
        await ended(first)
        async with client_of(first, second) as client:
            for _ in range(3):
                assert (await client.model_info()).model == "tiny"
                assert (await client.load()).decode_workers == 1
            assert await client.abort(["nobody's"]) == ()
        await ended(second)
        async with client_of(first, second) as client:
            with pytest.raises(UnavailableError, match="cannot reach") as gone:
                await client.cluster_status()
            assert gone.value.retry_after_s is None, "no retry delay is known"


async def test_an_abort_finds_the_router_that_runs_the_request() -> None:
    async with two_routers() as (first, second, decode):
        decode.token_pause_s = 0.05
        async with client_of(first, second, first=1) as client:
            running = asyncio.create_task(
                client.complete(replace(QUERY, request_id="mine", stop=Stop(max_tokens=200)))
            )
            await eventually(lambda: decode.open_requests, "the answer")
            assert await client.abort(["mine", "other"]) == ("mine",)
            assert (await running).finish.reason == "aborted"


async def test_the_deadline_is_one_for_all_attempts() -> None:
    async with two_routers() as (first, second, decode):

        async def never(_: object) -> None:
            await asyncio.sleep(60)

        decode.at(Point.TOKEN, never)
        async with client_of(first, second) as client:
            answer = asyncio.create_task(client.complete(QUERY, timeout_s=3))
            await eventually(lambda: decode.open_requests or answer.done(), "the answer")
            await ended(first)
            with pytest.raises((DeadlineError, UnavailableError)):
                await answer
        await second.assert_nothing_left()


async def test_a_request_that_may_kill_workers_is_not_retried_forever() -> None:
    async with two_routers() as (first, second, decode):
        fatal = PeerLostError("a stage died", retry_after_s=0.01)
        asked = 0

        async def fails(_: object) -> None:
            nonlocal asked
            asked += 1
            raise fatal

        decode.at(Point.COMMIT, fails)
        async with client_of(first, second) as client:
            with pytest.raises(PeerLostError):
                await client.complete(QUERY, timeout_s=60)
        tries_of_one_router = first.services.limits.migrations + 1
        assert asked == 2 * tries_of_one_router

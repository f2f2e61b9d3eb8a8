"""Requests that cannot meet their deadline are refused before any worker gets them; the others are
tried."""

import asyncio

import pytest

from protos import types_pb2
from router.workers.policy import Policy
from router.workers.prefix_index import RoutedPrompt
from runtime.clock import ManualClock
from runtime.digests import block_names
from runtime.errors import DeadlineError
from runtime.pace import MEMORY_S, MIN_PROMPTS, MIN_TOKENS, PrefillRateEstimate
from tests.router.harness import RouterHarness, eventually, running_router, token_request
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

PROMPT = [1] * 100


def test_the_best_pace_counts_and_short_prompts_do_not() -> None:
    prefill_rate = PrefillRateEstimate(ManualClock())
    for _ in range(MIN_PROMPTS):
        prefill_rate.observe(MIN_TOKENS - 1, 1e-9)
    assert prefill_rate.least_s(1000) == 0
    prefill_rate.observe(100, 2.0)
    prefill_rate.observe(200, 1.0)
    assert prefill_rate.least_s(1000) == 0, "two prompts prove nothing"
    prefill_rate.observe(100, 5.0)
    assert prefill_rate.least_s(1000) == prefill_rate.likely_s(1000) == pytest.approx(5.0)
    assert prefill_rate.least_s(MIN_TOKENS - 1) == 0


def test_a_slow_spell_is_forgotten_though_nothing_faster_was_seen() -> None:
    """What is refused computes nothing, so nothing faster could ever be seen."""
    clock = ManualClock()
    prefill_rate = PrefillRateEstimate(clock)
    for _ in range(MIN_PROMPTS):
        prefill_rate.observe(100, 30.0)
        clock.advance(1)
    assert prefill_rate.least_s(100) == pytest.approx(30.0)
    clock.advance(MEMORY_S - 0.5)
    assert prefill_rate.least_s(100) == 0


def test_few_and_old_measurements_still_say_what_is_likely() -> None:
    """Else nothing would be known of a worker with a prompt an hour."""
    clock = ManualClock()
    prefill_rate = PrefillRateEstimate(clock)
    assert prefill_rate.likely_s(1000) == 0
    prefill_rate.observe(100, 2.0)
    prefill_rate.observe(200, 1.0)
    clock.advance(60 * MEMORY_S)
    assert prefill_rate.least_s(1000) == 0
    assert prefill_rate.likely_s(1000) == pytest.approx(5.0)
    assert prefill_rate.likely_s(MIN_TOKENS - 1) == 0
    for _ in range(MIN_PROMPTS):
        prefill_rate.observe(100, 3.0)
        clock.advance(MEMORY_S)
    assert prefill_rate.likely_s(1000) == pytest.approx(30.0), "the earlier ones are forgotten"


def test_a_prompt_that_was_quick_long_ago_promises_nothing_today() -> None:
    clock = ManualClock()
    prefill_rate = PrefillRateEstimate(clock)
    prefill_rate.observe(100, 0.1)
    clock.advance(MEMORY_S + 1)
    for _ in range(MIN_PROMPTS):
        prefill_rate.observe(100, 1.0)
    assert prefill_rate.least_s(100) == pytest.approx(1.0)


def workers() -> tuple[FakePrefill, FakeDecode]:
    fabric, journal = Fabric(), Journal()
    return FakePrefill("prefill", fabric, journal), FakeDecode("decode", fabric, journal)


async def answered(router: RouterHarness, prompt: list[int], timeout_s: float = 20.0) -> None:
    assert (await router.ask(token_request(prompt), timeout_s)).token_ids == expected_tokens(
        prompt, 4
    )


async def test_a_deadline_that_cannot_be_met_is_refused_before_prefill() -> None:
    """The fakes report the given prompt time."""
    prefill, decode = workers()
    prefill.prefill_s = 60.0
    async with running_router(prefill, decode) as router:
        for _ in range(MIN_PROMPTS):
            await answered(router, PROMPT)
        assert isinstance(await router.failure(token_request(PROMPT)), DeadlineError)
        await router.assert_nothing_left()
        assert prefill.journal.entries.count(("prefill", Point.QUEUED)) == MIN_PROMPTS
        await answered(router, [1])


async def test_one_slow_prompt_and_a_long_queue_refuse_no_request() -> None:
    """The first prompt met a cold start; what queues at the worker may have to wait for this
    one."""
    prefill, decode = workers()
    prefill.prefill_s, prefill.queued_tokens = 60.0, 10_000_000
    async with running_router(prefill, decode) as router:
        await answered(router, PROMPT)
        prefill.prefill_s = 0.125
        for _ in range(MIN_PROMPTS + 1):
            await answered(router, PROMPT)


async def keeps(router: RouterHarness, prefill: FakePrefill, num_tokens: int) -> None:
    """Report that the worker caches this many tokens of every prompt of ones."""
    prefill.kept = block_names([1] * num_tokens, 16, compatibility=prefill.compatibility)
    prompt = RoutedPrompt([1] * 200)
    await eventually(
        lambda: router.directory.placement.num_missing(prompt) == 200 - num_tokens, "the report"
    )


async def test_cached_prompt_tokens_take_no_estimated_time() -> None:
    """A token takes 0.45 s: 200 of them are more than a minute allows, the 72 that are missing are
    not."""
    prefill, decode = workers()
    prefill.prefill_s = 45.0
    prompt = [1] * 200
    async with running_router(prefill, decode) as router:
        for _ in range(MIN_PROMPTS):
            await answered(router, PROMPT, 60.0)
        assert isinstance(await router.failure(token_request(prompt)), DeadlineError)
        await keeps(router, prefill, 128)
        await answered(router, prompt, 60.0)


async def test_waiting_requests_count_with_their_uncached_tokens() -> None:
    """68 of each prompt, and the two output tokens that its client already has."""
    prefill, decode = workers()
    decode.max_running = 1
    request, tokens = token_request(PROMPT), expected_tokens(PROMPT, 4)
    request.resumed.add().ids.extend(tokens[:2])
    async with running_router(prefill, decode) as router:
        await keeps(router, prefill, 32)
        goes_on = asyncio.Event()
        decode.at(Point.TOKEN, lambda _: goes_on.wait())
        calls = [asyncio.create_task(router.ask(request)) for _ in range(4)]
        await eventually(lambda: router.services.admission.num_waiting, "the queue")
        assert (
            router.services.admission._line.work.prompt_tokens
            == 70 * router.services.admission.num_waiting
        )
        goes_on.set()
        assert [answer.token_ids for answer in await asyncio.gather(*calls)] == [tokens[2:]] * 4


@pytest.mark.parametrize(
    ("policy", "order"), [(Policy.PREFIX_CACHE, [1, 2]), (Policy.LEAST_LOAD, [2, 1])]
)
async def test_a_free_place_goes_to_a_request_with_a_cached_prompt(
    policy: Policy, order: list[int]
) -> None:
    """Prompts of ones are there, in part; one of twos came first. Those of nines fill the pool."""
    prefill, decode = workers()
    decode.max_running = 1
    began: list[int] = []

    async def note(request: types_pb2.EngineRequest) -> None:
        began.append(request.prompt_token_ids[0])

    prefill.at(Point.QUEUED, note)
    async with running_router(prefill, decode, policy=policy) as router:
        await keeps(router, prefill, 128)
        goes_on, calls = asyncio.Event(), list[asyncio.Task[object]]()
        decode.at(Point.TOKEN, lambda _: goes_on.wait())
        while not router.services.admission.num_waiting:
            calls.append(asyncio.create_task(router.ask(token_request([9] * 16))))
            await eventually(
                lambda: router.services.admission.num_let_in == len(calls),
                "a request that was let in",
            )
        for num_waiting, first in enumerate((2, 1), 2):
            calls.append(asyncio.create_task(router.ask(token_request([first] * 200))))
            await eventually(
                lambda: router.services.admission.num_waiting == num_waiting,  # noqa: B023
                "the queue",
            )
        goes_on.set()
        await asyncio.gather(*calls)
    assert [first for first in began if first != 9] == order

"""Overload: which requests are refused, when and with what error, and which are served in time."""

import asyncio
from dataclasses import replace

import pytest

from router.config import RouterConfig
from router.request.rejections import AdmissionLimits
from runtime.errors import BatonError, CapacityError
from tests.router.harness import (
    ADMISSION_LIMITS,
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

PROMPT, MAX_TOKENS, PLACES = [1] * 100, 10, 2
PATIENCE_S = 250.0  # more than anything here takes


def workers() -> tuple[FakePrefill, FakeDecode]:
    """Return workers whose pool reports, and takes, 50 ms per token."""
    fabric, journal = Fabric(), Journal()
    prefill, decode = (
        FakePrefill("p", fabric, journal),
        FakeDecode("d", fabric, journal, max_running=PLACES),
    )
    decode.token_pause_s = 0.05
    return prefill, decode


async def outcome(router: RouterHarness, limit_s: float, priority: int = 0) -> BatonError | None:
    """Return the outcome of a request with a deadline of `limit_s` at the router.

    The client waits longer: on a stalled machine its own timeout would come first and hide the
    reason.
    """
    router.service._limits = replace(router.service._limits, max_request_s=limit_s)
    request = token_request(PROMPT, max_tokens=MAX_TOKENS, priority=priority)
    try:
        assert (await router.ask(request, PATIENCE_S)).token_ids == expected_tokens(
            PROMPT, MAX_TOKENS
        )
    except BatonError as error:
        return error
    return None


async def measured(router: RouterHarness) -> None:
    """Run requests that teach the router its service times. None waits in the queue, however slow
    the machine is."""
    for _ in range(3):
        assert (
            await asyncio.gather(*(outcome(router, PATIENCE_S) for _ in range(PLACES)))
            == [None] * PLACES
        )


async def test_at_saturation_a_pool_refuses_no_reservation() -> None:
    prefill, decode = workers()
    decode.token_pause_s = 0.005
    async with running_router(prefill, decode) as router:
        assert await asyncio.gather(*(outcome(router, 60.0) for _ in range(40))) == [None] * 40
        assert not decode.refused
        assert (
            router.metric("baton_router_retries_total", role="decode", reason="OUT_OF_CAPACITY")
            == 0
        )
        await router.assert_nothing_left()


async def test_a_request_whose_queue_wait_exceeds_its_deadline_is_refused() -> None:
    prefill, decode = workers()
    async with running_router(
        prefill, decode, admission=replace(ADMISSION_LIMITS, max_wait_s=PATIENCE_S)
    ) as router:
        await measured(router)
        held = [asyncio.create_task(outcome(router, PATIENCE_S)) for _ in range(40)]
        await eventually(
            lambda: router.service.counts.accepted == 3 * PLACES + len(held), "the queue"
        )
        wait_s = router.services.admission.wait_s()
        refused = await outcome(router, 2.0, priority=1)
        assert isinstance(refused, CapacityError)
        assert refused.resource == "router queue"
        assert "more than its deadline leaves" in str(refused)
        assert refused.retry_after_s is not None
        assert wait_s / 2 < refused.retry_after_s < wait_s * 2
        assert router.metric("baton_router_refused_total", cause="deadline") == 1
        assert await outcome(router, 60.0, priority=-1) is None, (
            "the urgent one is served before those 40"
        )
        for call in held:
            call.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await router.assert_nothing_left()


def test_one_client_may_ask_for_more_than_may_wait_and_run() -> None:
    """Else its own gRPC holds back what the router would refuse at once."""
    assert (
        RouterConfig.model_fields["max_streams"].default
        > RouterConfig.model_fields["max_calls"].default
    )
    assert (
        RouterConfig.model_fields["max_calls"].default
        > RouterConfig.model_fields["max_waiting"].default
    )


async def test_a_queue_that_takes_too_long_is_closed_to_more() -> None:
    async with running_router(*workers(), admission=AdmissionLimits(max_wait_s=2.0)) as router:
        await measured(router)
        outcomes = await asyncio.gather(*(outcome(router, PATIENCE_S) for _ in range(60)))
        refused = [error for error in outcomes if isinstance(error, CapacityError)]
        assert outcomes.count(None) + len(refused) == 60
        at_once = [error for error in refused if error.resource == "router queue"]
        assert router.metric("baton_router_refused_total", cause="wait") == len(at_once) > 0
        assert all(
            error.retry_after_s is not None and error.retry_after_s > 2.0 for error in at_once
        )
        await router.assert_nothing_left()


@pytest.mark.long
async def test_rejected_requests_do_not_all_come_back_at_once() -> None:
    """Of 60 requests of one client 4 may be queued. Each comes again when it is told to."""
    num_calls = 0

    async def patient(router: RouterHarness) -> None:
        nonlocal num_calls
        while True:
            num_calls += 1
            error = await outcome(router, PATIENCE_S)
            if error is None:
                return
            assert isinstance(error, CapacityError)
            await asyncio.sleep(error.retry_after_s or 1.0)

    prefill, decode = workers()
    decode.token_pause_s = 0.02
    async with running_router(prefill, decode, admission=AdmissionLimits(max_waiting=4)) as router:
        await measured(router)
        await asyncio.gather(*(patient(router) for _ in range(60)))
        assert num_calls < 60 * 4, "with the same delay for all there were 330"
        await router.assert_nothing_left()


async def test_a_request_that_cannot_finish_is_dropped_before_placement() -> None:
    """The pool stops, so no request is placed. Service takes 1.5 s: the request is dropped that long
    before its deadline, and a machine that stalls for less changes nothing."""
    prefill, decode = workers()
    decode.token_pause_s = 0.15
    async with running_router(prefill, decode) as router:
        await measured(router)
        goes_on = asyncio.Event()
        decode.at(Point.TOKEN, lambda _: goes_on.wait())
        running = [asyncio.create_task(outcome(router, PATIENCE_S)) for _ in range(PLACES)]
        await eventually(lambda: len(decode.open_requests) == PLACES, "requests that run")
        before = prefill.journal.events().count(Point.QUEUED)
        error = await outcome(router, 4.0)
        assert isinstance(error, CapacityError)
        assert (error.resource, str(error)) == (
            "workers",
            "no pair of workers had room before its deadline",
        )
        assert router.metric("baton_router_dropped_total", cause="deadline") == 1
        assert prefill.journal.events().count(Point.QUEUED) == before
        goes_on.set()
        assert await asyncio.gather(*running) == [None] * PLACES
        await router.assert_nothing_left()


async def test_at_twice_the_load_half_of_the_responses_are_in_time() -> None:
    """Served first come first, without a look at deadlines, every one but the first few would be
    late."""
    prefill, decode = workers()
    async with running_router(prefill, decode) as router:
        await measured(router)
        outcomes = await asyncio.gather(*(outcome(router, 6.0) for _ in range(60)))
        assert outcomes.count(None) > PLACES
        late = [
            error
            for error in outcomes
            if error is not None and not isinstance(error, CapacityError)
        ]
        assert len(late) <= outcomes.count(None), "who is served is served in time"
        await router.assert_nothing_left()

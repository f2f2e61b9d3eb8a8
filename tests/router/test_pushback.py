"""Details of refusals: the retry delay, in the details and in the trailer that gRPC obeys."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from router.request.rejections import AdmissionLimits
from runtime.errors import CapacityError
from tests.router.harness import FLOW_LIMITS, NO_GRACE, RouterHarness, running_router, token_request
from tests.support.router.fake_workers import Fabric, FakeDecode, FakePrefill, Journal, Point
from tests.support.router.outside import details_of


def pair() -> tuple[FakePrefill, FakeDecode]:
    fabric, journal = Fabric(), Journal()
    return FakePrefill("prefill", fabric, journal), FakeDecode("decode", fabric, journal)


async def refusal(
    router: RouterHarness, timeout_s: float = 60
) -> tuple[grpc.StatusCode, dict[str, Any], str | None]:
    """Return the code, details and pushback trailer."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        _ = [
            response
            async for response in router.stub.Generate(token_request([1]), timeout=timeout_s)
        ]
    trailers = dict(failed.value.trailing_metadata())
    pushback = trailers.get("grpc-retry-pushback-ms")
    return (
        failed.value.code(),
        details_of(failed.value),
        None if pushback is None else str(pushback),
    )


async def test_a_full_queue_names_its_limit_and_no_delay_if_unknown() -> None:
    async with running_router(*pair(), admission=AdmissionLimits(max_waiting=0)) as router:
        code, details, pushback = await refusal(router)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details["ErrorInfo"].reason == "OUT_OF_CAPACITY"
    assert details["QuotaFailure"].violations[0].subject == "router queue"
    assert "RetryInfo" not in details
    assert pushback is None


async def test_no_workers_is_unavailable_with_a_retry_delay() -> None:
    prefill, decode = pair()
    prefill.address, decode.address = (
        "127.0.0.1:1",
        "127.0.0.1:2",
    )  # no service of a test listens below 1024
    async with running_router(prefill, decode, admission=NO_GRACE, start_workers=False) as router:
        code, details, pushback = await refusal(router)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details["ErrorInfo"].reason == "UNAVAILABLE"
    assert pushback == str(details["RetryInfo"].retry_delay.ToMilliseconds())


async def test_the_retry_delay_of_lost_workers_is_their_usual_start_time() -> None:
    """The pool reports a start time of 20 s and does not return; requests are not queued for it
    here."""
    prefill, decode = pair()
    decode.start_s = 20.0
    limits = replace(FLOW_LIMITS, peer_wait_s=0.3, migrations=0)
    async with running_router(prefill, decode, flow=limits, longest_restart_s=60.0) as router:
        decode.die_at(Point.TOKEN)
        code, details, _ = await refusal(router)
    assert code is grpc.StatusCode.ABORTED
    assert 15.0 < details["RetryInfo"].retry_delay.ToMilliseconds() / 1e3 <= 30.0


async def test_a_pool_that_stays_full_is_expected_after_a_service() -> None:
    """The pool reports half a second per response, and each had the maximum length."""
    prefill, decode = pair()
    async with running_router(
        prefill, decode, flow=replace(FLOW_LIMITS, capacity_wait_s=0.3)
    ) as router:
        for _ in range(4):
            await router.ask(token_request([1], max_tokens=40))
        decode.fail_at(Point.RESERVE, CapacityError("no pages", resource="pages"), times=1000)
        error = await router.failure(token_request([1], max_tokens=40))
        assert error.retry_after_s is not None
        assert 0.5 <= error.retry_after_s < 0.9


async def test_a_pool_that_stays_full_names_the_resource() -> None:
    prefill, decode = pair()
    decode.fail_at(
        Point.RESERVE, CapacityError("no pages", resource="pages", retry_after_s=2.5), times=1000
    )
    async with running_router(
        prefill, decode, flow=replace(FLOW_LIMITS, capacity_wait_s=0.3)
    ) as router:
        code, details, pushback = await refusal(router)
        await router.assert_nothing_left()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details["QuotaFailure"].violations[0].subject == "pages"
    assert pushback == "2500"


async def test_a_deadline_ends_the_request_on_every_worker() -> None:
    prefill, decode = pair()

    async def never(_: object) -> None:
        await asyncio.sleep(30)

    prefill.at(Point.COMPUTED, never)
    async with running_router(prefill, decode) as router:
        code, _, pushback = await refusal(router, timeout_s=0.3)
        await router.assert_nothing_left()
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert pushback is None

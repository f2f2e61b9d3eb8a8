"""Placement: pairs, the queue, readiness, load."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import generation_pb2, types_pb2, worker_pb2
from router.api.generation import RequestKey
from router.request.rejections import AdmissionLimits
from router.request.validate import AdmissibleRequest
from router.workers.placement_request import PlacementRequest
from router.workers.policy import Policy
from router.workers.prefix_index import RoutedPrompt
from runtime.clock import NO_DEADLINE
from runtime.errors import CapacityError, InvalidRequestError, UnavailableError
from tests.router.harness import (
    NO_GRACE,
    RouterHarness,
    eventually,
    running_router,
    token_request,
)
from tests.support.router.fake_workers import (
    VOCAB_SIZE,
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_sequence_is_limited_by_its_pool() -> None:
    fabric, journal = Fabric(), Journal()
    pool = FakeDecode("small", fabric, journal, num_pages=3)
    async with running_router(FakePrefill("p", fabric, journal), pool) as router:
        error = await router.failure(token_request([1] * 48))
        assert isinstance(error, InvalidRequestError)
        assert "the maximum context length of 48 tokens" in str(error)
        assert (await router.ask(token_request([1] * 47, max_tokens=9))).token_ids == [47]


async def test_round_robin_takes_turns_in_both_roles() -> None:
    fabric, journal = Fabric(), Journal()
    workers = [FakePrefill(f"p{i}", fabric, journal) for i in range(2)]
    pools = [FakeDecode(f"d{i}", fabric, journal) for i in range(2)]
    async with running_router(*workers, *pools, policy=Policy.ROUND_ROBIN) as router:
        for _ in range(6):
            await router.ask(token_request([1], max_tokens=1))
    entries = [worker for worker, what in journal.entries if what in (Point.QUEUED, Point.RESERVE)]
    assert {name: entries.count(name) for name in entries} == {"p0": 3, "p1": 3, "d0": 3, "d1": 3}


def pair(**decode: int) -> tuple[FakePrefill, FakeDecode]:
    fabric, journal = Fabric(), Journal()
    return FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal, **decode)


async def test_incompatible_workers_are_refused_with_both_texts() -> None:
    prefill, decode = pair()
    decode.compatibility = "other"
    async with running_router(prefill, decode, admission=NO_GRACE) as router:
        error = await router.failure(token_request([1]))
        assert isinstance(error, UnavailableError)
        assert "text of digest" in str(error)
        assert "text of other" in str(error)
        status = await router.stub.GetClusterStatus(generation_pb2.GetClusterStatusRequest())
        assert {worker.reason for worker in status.workers} == {
            "no usable decode worker fits it: it has text of digest; there text of other",
            "no usable prefill worker fits it: it has text of other; there text of digest",
        }


async def test_a_router_logs_that_its_workers_are_unusable(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to log only that it had found them, for any length of wait."""
    monkeypatch.setattr("router.api.readiness.NOTICE_S", 0.02)
    prefill, decode = pair()
    decode.compatibility = "other"
    async with running_router(prefill, decode, warms_up=True):
        await eventually(lambda: "not ready" in caplog.messages, "a line about it")
        await asyncio.sleep(0.1)
    said = [record for record in caplog.records if record.message == "not ready"]
    assert "do not fit together" in said[-1].reason  # type: ignore[attr-defined]
    assert len({record.reason for record in said}) == len(said)  # type: ignore[attr-defined]


async def test_workers_that_still_start_are_waited_for_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start of more than 20 s logged a warning that there were none."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("router.api.readiness.NOTICE_S", 0.02)
    prefill, decode = pair()
    decode.serving = False

    def reasons() -> list[str]:
        """Return what the router waited for; at first it may not have reached the other worker."""
        waits = [each for each in caplog.records if each.message == "waiting for workers"]
        return [each.reason for each in waits]  # type: ignore[attr-defined]

    async with running_router(prefill, decode, warms_up=True):
        await eventually(
            lambda: any("no decode worker is usable" in reason for reason in reasons()),
            "a line about it",
        )
        monkeypatch.setattr("router.api.readiness.STARTING_S", 0.0)  # of the next router
    assert "not ready" not in caplog.messages
    caplog.clear()
    prefill, decode = pair()
    decode.serving = False
    async with running_router(prefill, decode, warms_up=True):
        await eventually(lambda: "not ready" in caplog.messages, "a warning in the end")
    assert "waiting for workers" not in caplog.messages


async def test_only_compatible_pairs_are_made() -> None:
    fabric, journal = Fabric(), Journal()
    workers = [FakePrefill(f"p{c}", fabric, journal, compatibility=c) for c in "abc"]
    pools = [FakeDecode(f"d{c}", fabric, journal, compatibility=c) for c in "ab"]
    async with running_router(*workers, *pools) as router:
        answers = await asyncio.gather(
            *(router.ask(token_request([i], max_tokens=2)) for i in range(30))
        )
    assert [answer.token_ids for answer in answers] == [expected_tokens([i], 2) for i in range(30)]
    assert not any(worker == "pc" for worker, _ in journal.entries)
    assert {worker for worker, _ in journal.entries} == {"pa", "da", "pb", "db"}


async def test_a_draft_pairs_with_itself_and_with_none_but_not_with_another() -> None:
    fabric, journal = Fabric(), Journal()
    source = FakePrefill("p", fabric, journal, compatibility="m+d")
    pools = [
        FakeDecode(f"d {c}", fabric, journal, compatibility=c, max_running=1)
        for c in ("m+d", "m", "m+e")
    ]
    pools[1].fail_at(Point.RESERVE, CapacityError("full", resource="slots"), times=3)
    async with running_router(source, *pools) as router:
        await asyncio.gather(*(router.ask(token_request([i], max_tokens=2)) for i in range(30)))
        assert router.directory.placement.has_decode(PlacementRequest(RoutedPrompt([1]), 0, "m+e"))
        refused = router.metric(
            "baton_router_retries_total", role="decode", reason="OUT_OF_CAPACITY"
        )
        assert refused >= 3, "what a pool that takes both refused found another"
    assert {worker for worker, _ in journal.entries} == {"p", "d m+d", "d m"}


async def test_no_worker_at_all_is_unavailable_after_the_grace_and_then_at_once() -> None:
    prefill, decode = pair()
    prefill.address, decode.address = "127.0.0.1:1", "127.0.0.1:2"
    limits = AdmissionLimits(pairless_grace_s=1.0)
    async with running_router(prefill, decode, admission=limits, start_workers=False) as router:
        await eventually(
            lambda: all("cannot be reached" in w.problem for w in router.directory.workers),
            "two tries",
        )
        error = await router.failure(token_request([1]))
        assert isinstance(error, UnavailableError)
        assert str(error) == "no prefill worker is usable (cannot be reached)", (
            "no address of the inside"
        )
        assert (
            "no prefill worker is usable (127.0.0.1:1: cannot be reached"
            in router.directory.pair_problem()
        )
        queued = router.services.admission.num_let_in
        assert isinstance(await router.failure(token_request([1])), UnavailableError)
        assert router.services.admission.num_let_in == queued, "it waited for nothing"


async def test_a_request_rides_out_a_restart() -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        await decode.die()
        await eventually(lambda: router.directory.pair_problem(), "a pair")
        answer = asyncio.create_task(router.ask(token_request([1], max_tokens=2)))
        await eventually(lambda: router.services.admission.num_waiting == 1, "the queue")
        await decode.start()
        assert (await answer).token_ids == [1, 2]


async def test_a_draining_worker_gets_no_requests_and_reports_the_reason() -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode, admission=NO_GRACE) as router:
        prefill.serving = False
        await eventually(lambda: "draining" in router.directory.pair_problem(), "usable prefill")
        error = await router.failure(token_request([1]))
        assert "draining" in str(error)
        prefill.serving = True
        await eventually(lambda: not router.directory.pair_problem(), "the problem")
        await router.ask(token_request([1]))


async def test_a_stalled_router_loses_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.workers.watch.MIN_SILENCE_S", 0.5)
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        caplog.clear()
        time.sleep(1.0)  # noqa: ASYNC251 - the whole process stands still
        await asyncio.sleep(0.3)
        assert not [record for record in caplog.records if "worker lost" in record.getMessage()]
        await router.ask(token_request([5, 6], max_tokens=2))


async def test_a_worker_that_falls_silent_is_lost() -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        decode.reports = False
        await eventually(
            lambda: "no report for 2 s" in router.directory.pair_problem(), "usable decode"
        )
        decode.reports = True
        await eventually(lambda: not router.directory.pair_problem(), "the problem")


async def test_nothing_is_dispatched_that_no_pool_could_take_soon() -> None:
    prefill, decode = pair(max_running=2)
    decode.token_pause_s = 0.02
    async with running_router(prefill, decode) as router:
        answers = [
            asyncio.create_task(router.ask(token_request([i], max_tokens=10))) for i in range(12)
        ]
        seen = 0
        while not all(answer.done() for answer in answers):
            seen = max(seen, len(set(prefill.open_requests) | set(decode.open_requests)))
            await asyncio.sleep(0.005)
        assert seen <= 2, "two run"
        assert [(await answer).token_ids for answer in answers] == [
            expected_tokens([i], 10) for i in range(12)
        ]
        await router.assert_nothing_left()


async def test_a_pair_is_booked_until_it_is_released() -> None:
    async with running_router(*pair()) as router:
        admission = router.services.admission
        placed = admission.place_at_once(admission.arrive(admissible_request(), NO_DEADLINE))
        assert placed is not None
        assert [len(worker._bookings) for worker in router.directory.workers] == [1, 1]
        placed.pair.release()
        await router.assert_nothing_left()


async def test_a_request_that_gives_up_in_the_moment_it_is_placed_keeps_nothing() -> None:
    prefill, decode = pair()
    decode.serving = False
    async with running_router(
        prefill, decode, admission=AdmissionLimits(pairless_grace_s=30)
    ) as router:
        admission = router.services.admission
        waiting = asyncio.create_task(
            admission.wait(admission.arrive(admissible_request(), NO_DEADLINE))
        )
        await eventually(lambda: admission.num_waiting, "the queue")
        router.directory.workers[1].reported(worker_pb2.WorkerLoad(serving=True))
        admission._pump()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await router.assert_nothing_left()


def admissible_request() -> AdmissibleRequest:
    return AdmissibleRequest(types_pb2.EngineRequest(prompt_token_ids=[1]), (), wants_text=False)


@asynccontextmanager
async def a_busy_pool(limits: AdmissionLimits) -> AsyncIterator[RouterHarness]:
    """Run a pool for one request that is taken, so that further ones are queued."""
    prefill, decode = pair(max_running=1)
    decode.at(Point.TOKEN, lambda _: asyncio.sleep(300))
    async with running_router(prefill, decode, admission=limits) as router:
        running = asyncio.create_task(router.failure(token_request([1])))
        await eventually(lambda: Point.COMPUTED in decode.journal.events(), "dispatch")
        yield router
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await router.assert_nothing_left()


async def test_a_full_queue_refuses_at_once() -> None:
    async with a_busy_pool(AdmissionLimits(max_waiting=2)) as router:
        held = [asyncio.create_task(router.failure(token_request([1]))) for _ in range(2)]
        await eventually(lambda: router.metric("baton_queue_depth") == 2, "the queue")
        error = await router.failure(token_request([1]))
        assert isinstance(error, CapacityError)
        assert (error.resource, error.retry_after_s) == ("router queue", None), (
            "nothing was measured"
        )
        for call in held:
            call.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_no_request_is_queued_forever() -> None:
    async with a_busy_pool(AdmissionLimits(max_wait_s=1.0)) as router:
        for error in await asyncio.gather(*(router.failure(token_request([1])) for _ in range(2))):
            assert isinstance(error, CapacityError)
            assert error.resource == "workers"


async def test_the_queue_is_ordered_by_priority_then_arrival() -> None:
    prefill, decode = pair(max_running=1)
    may_go = asyncio.Event()
    order: list[str] = []

    async def note(request: object) -> None:
        order.append(request.request_id)  # type: ignore[attr-defined]
        await may_go.wait()

    prefill.at(Point.QUEUED, note)
    async with running_router(prefill, decode) as router:
        calls = []
        for name, priority in (("first", 0), ("b", 0), ("c", 0), ("low", 5), ("high", -5)):
            request = token_request([1], max_tokens=1, request_id=name, priority=priority)
            calls.append(asyncio.create_task(router.ask(request)))
            await eventually(
                partial(router.service._running.__contains__, RequestKey("", name)), "arrival"
            )
        may_go.set()
        await asyncio.gather(*calls)
    assert order == ["first", "high", "b", "c", "low"]


READINESS = health_pb2.HealthCheckRequest(service="baton.v1.Generation")


def health_stub(router: RouterHarness) -> Any:  # noqa: ANN401 (published without types)
    return health_pb2_grpc.HealthStub(router.channel)


async def until_health(router: RouterHarness, status: int) -> None:
    async with asyncio.timeout(30):
        watch = health_stub(router).Watch(READINESS)
        async for answer in watch:
            if answer.status == status:
                watch.cancel()
                return


async def test_ready_only_after_a_token_went_the_whole_way() -> None:
    prefill, decode = pair()
    may_start = asyncio.Event()
    prefill.at(Point.QUEUED, lambda _: may_start.wait())
    async with running_router(prefill, decode, warms_up=True) as router:
        await eventually(lambda: prefill.open_requests, "the warm-up")
        assert (await health_stub(router).Check(READINESS)).status == NOT_SERVING
        may_start.set()
        await until_health(router, SERVING)
        assert Point.TOKEN in decode.journal.events()
        assert router.metric("baton_ttft_seconds_count") == 0, "a warm-up is no client's request"
        await decode.die()
        await until_health(router, NOT_SERVING)
        await decode.start()
        await until_health(router, SERVING)
        await router.assert_nothing_left()


async def test_a_failed_warm_up_is_tried_again() -> None:
    prefill, decode = pair()
    decode.fail_at(Point.TOKEN, RuntimeError("not yet"))
    async with running_router(prefill, decode, warms_up=True) as router:
        await until_health(router, SERVING)


async def test_model_info_and_status_describe_the_cluster() -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        model = await router.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
        assert (
            model.model,
            model.architecture,
            model.vocab_size,
            model.max_context_tokens,
            model.revision,
        ) == ("tiny", "Tiny", VOCAB_SIZE, 256, "r1")
        assert model.has_tokenizer
        assert model.has_chat_template
        status = await router.stub.GetClusterStatus(generation_pb2.GetClusterStatusRequest())
        assert [(w.role, w.address, w.serving, w.reason) for w in status.workers] == [
            ("prefill", prefill.address, True, ""),
            ("decode", decode.address, True, ""),
        ]
        assert list(status.workers[0].stages) == ["0-2", "2-4"]
        assert status.workers[0].incarnation == prefill.incarnation


async def test_three_hundred_requests_with_random_cancels_leave_nothing() -> None:
    fabric, journal, rng = Fabric(), Journal(), random.Random(1)
    workers = [FakePrefill(f"p{i}", fabric, journal) for i in range(2)]
    pools = [FakeDecode(f"d{i}", fabric, journal, max_running=40) for i in range(2)]
    for pool in pools:
        pool.token_pause_s = 0.002

    async def one(router: RouterHarness, i: int) -> str:
        length = rng.randint(1, 30)
        request = token_request([i, i + 1], max_tokens=length)
        request.stop.ignore_eos = True
        call = asyncio.create_task(router.ask(request))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 1.0))
            if call.cancel():
                await asyncio.gather(call, return_exceptions=True)
                return "cancelled"
        assert (await call).token_ids == expected_tokens([i, i + 1], length)
        return "right"

    async with running_router(*workers, *pools) as router:
        outcomes = await asyncio.gather(*(one(router, i) for i in range(300)))
        assert outcomes.count("cancelled") > 20
        assert outcomes.count("right") > 180
        await router.assert_nothing_left()

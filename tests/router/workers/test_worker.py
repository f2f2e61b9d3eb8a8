"""Capacity of a worker: its last report and later bookings."""

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos import worker_pb2
from router.workers.pace import HALF_LIFE_S
from router.workers.worker import PREFILL_LOOKAHEAD, Worker, WorkerRole
from runtime.clock import Clock, ManualClock, SystemClock
from tests.router.harness import (
    FACTS,
    worker_info,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def a_worker(role: WorkerRole, clock: Clock | None = None, **load: int) -> Worker:
    worker = Worker(
        role,
        "h:1",
        grpc.aio.insecure_channel("127.0.0.1:1"),
        lambda: None,
        lambda: None,
        clock or SystemClock(),
    )
    worker.introduced(worker_info(role), FACTS)
    worker.reported(worker_pb2.WorkerLoad(serving=True, **load))  # type: ignore[arg-type]
    return worker


async def test_bookings_since_the_report_are_added_to_it() -> None:
    worker = await a_worker(WorkerRole.PREFILL, queued_tokens=100)
    assert worker.snapshot.candidate.load == 100
    booking, twin = worker.book(30), worker.book(30)
    twin.release()
    assert worker.snapshot.candidate.load == 130
    worker.reported(worker_pb2.WorkerLoad(serving=True, queued_tokens=130, queued_requests=1))
    assert worker.snapshot.candidate.load == 130
    other = worker.book(30)
    booking.release()
    booking.release()
    assert worker.snapshot.candidate.load == 130
    other.release()
    assert worker.snapshot.candidate.load == 100


async def test_a_stale_report_never_hides_bookings() -> None:
    worker = await a_worker(WorkerRole.PREFILL)
    for _ in range(2):
        worker.book(50)
    worker.reported(worker_pb2.WorkerLoad(serving=True))
    assert worker.snapshot.candidate.load == 100


async def test_a_full_prefill_queue_has_no_room() -> None:
    worker = await a_worker(WorkerRole.PREFILL, queued_requests=2)
    assert worker.snapshot.has_room(1)
    worker.book(1)
    assert not worker.snapshot.has_room(1)


async def test_decode_room_counts_pages_that_no_report_shows_yet() -> None:
    worker = await a_worker(WorkerRole.DECODE, pages_free=10, slots_free=4)
    booked = [worker.book(32) for _ in range(2)]  # two pages each, and one to grow into
    assert worker.snapshot.has_room(48)
    assert not worker.snapshot.has_room(49)
    assert worker.snapshot.has_room(49, context_tokens=64), "it can come to no more than four pages"
    for booking in booked:
        booking.reserved()
    worker.reported(
        worker_pb2.WorkerLoad(serving=True, pages_free=4, slots_free=2, running_requests=2)
    )
    for _ in range(2):
        worker.book(0)
    assert not worker.snapshot.has_room(0), "both slots are promised"


async def test_a_full_pool_gets_nothing_until_a_request_has_ended_there() -> None:
    """Not even to wait for it: it would be refused."""
    worker = await a_worker(WorkerRole.DECODE, pages_free=4, slots_free=1, running_requests=3)
    booked = worker.book(32)
    booked.reserved()
    worker.reported(
        worker_pb2.WorkerLoad(serving=True, pages_free=1, slots_free=0, running_requests=4)
    )
    assert not worker.snapshot.has_room(16)
    booked.finished()
    assert not worker.snapshot.has_room(16), "it counts as running until its streams have ended"
    booked.release()
    assert worker.snapshot.has_room(32), (
        "its three pages and its slot are free before a report says so"
    )
    assert not worker.snapshot.has_room(64)


async def test_a_failed_request_frees_nothing_before_a_report() -> None:
    worker = await a_worker(WorkerRole.DECODE, pages_free=4, slots_free=4)
    booked = worker.book(32)
    booked.reserved()
    worker.reported(
        worker_pb2.WorkerLoad(serving=True, pages_free=1, slots_free=3, running_requests=1)
    )
    booked.release()
    assert not worker.snapshot.has_room(16), "bytes may still be landing"
    worker.reported(worker_pb2.WorkerLoad(serving=True, pages_free=4, slots_free=4))
    assert worker.snapshot.has_room(16)


async def test_requests_that_were_set_back_go_before_new_ones() -> None:
    worker = await a_worker(WorkerRole.DECODE, pages_free=4, slots_free=4, queued_requests=1)
    assert not worker.snapshot.has_room(1)


async def test_prompts_queue_at_a_worker_for_half_a_second_at_its_speed() -> None:
    clock = ManualClock()
    worker = await a_worker(WorkerRole.PREFILL, clock=clock)
    worker.introduced(worker_info(WorkerRole.PREFILL, max_queued_requests=100), FACTS)
    for _ in range(3):  # a hundred tokens per second
        booking = worker.book(100)
        clock.advance(1.0)
        booking.computed()
    for _ in range(PREFILL_LOOKAHEAD):
        assert worker.snapshot.has_room(10), "so many, however long they are"
        worker.book(20)
    assert not worker.snapshot.has_room(20), "sixty tokens take more than half a second"
    assert worker.snapshot.has_room(4), (
        "a short one does not wait for all of three that are long beside it"
    )
    assert worker.has_queue_place, (
        "who has been placed before and lost its worker goes there all the same"
    )


async def test_a_short_prompt_has_room_despite_long_ones() -> None:
    """Short prompts get one token in four for any number of long ones: only other short ones are
    ahead."""
    clock = ManualClock()
    worker = await a_worker(WorkerRole.PREFILL, clock=clock)
    worker.introduced(worker_info(WorkerRole.PREFILL, max_queued_requests=100), FACTS)
    for _ in range(3):  # a hundred tokens per second: fifty are enough for half a second
        booking = worker.book(100)
        clock.advance(1.0)
        booking.computed()
    for _ in range(4):
        worker.book(10_000)
    assert worker.snapshot.has_room(20), "three times two others' twenty would be too much"
    worker.book(20)
    assert not worker.snapshot.has_room(20)
    assert not worker.snapshot.has_room(5_000), "as long as the others"


async def test_reports_count_own_prompt_chunks_and_not_those_of_other_routers() -> None:
    clock = ManualClock()
    worker = await a_worker(WorkerRole.PREFILL, clock=clock, prompt_tokens=7_000)
    for _ in range(3):  # a hundred tokens per second
        booking = worker.book(100)
        clock.advance(1.0)
        booking.computed()
    worker.book(1_000)

    def reports(prompt_tokens: int, queued_tokens: int) -> None:
        clock.advance(1.0)
        worker.reported(
            worker_pb2.WorkerLoad(
                serving=True, prompt_tokens=prompt_tokens, queued_tokens=queued_tokens
            )
        )

    reports(7_350, 1_950)  # the first is left out: it tells of prompts from before
    reports(
        7_550, 1_800
    )  # of 2,000 that there were, 1,000 are this router's, and so is half of these 200
    assert worker.prefill_pace.tokens_under_way == 100
    assert worker.prompts_ahead == [900]
    kept = 0.5 ** (1.0 / HALF_LIFE_S)
    before = (
        1 + kept + kept**2
    ) * kept**2  # of three seconds with a hundred tokens each, two seconds ago
    assert worker.prefill_pace.tokens_per_s == pytest.approx((before * 100 + 100) / (before + 2))
    worker.lost("it ended its reports")
    worker.introduced(worker_info(WorkerRole.PREFILL), FACTS)
    reports(9_000, 0)
    assert worker.prefill_pace.tokens_under_way == 100


async def test_a_worker_whose_adapters_change_stays_usable() -> None:
    worker = await a_worker(WorkerRole.DECODE, pages_free=10, slots_free=4)
    info = worker_info(WorkerRole.DECODE, adapters=["a@1"])
    worker.introduced(info, FACTS)
    assert worker.is_usable
    assert worker.snapshot.has_room(1)
    assert worker.info == info
    worker.lost("no report for 4 s")
    worker.introduced(info, FACTS)  # with a new stream of reports
    assert worker.problem == "no load report yet"
    worker.reported(worker_pb2.WorkerLoad(serving=True, pages_free=10))
    worker.introduced(worker_info(WorkerRole.DECODE, incarnation="b"), FACTS)
    assert worker.problem == "no load report yet"


async def test_a_new_incarnation_owes_nothing() -> None:
    worker = await a_worker(WorkerRole.DECODE, pages_free=10, slots_free=4)
    old = worker.book(100)
    worker.introduced(worker_info(WorkerRole.DECODE, incarnation="b"), FACTS)
    worker.reported(worker_pb2.WorkerLoad(serving=True, pages_free=10))
    assert worker.snapshot.candidate.load == 0
    old.release()
    assert worker.snapshot.candidate.load == 0


async def test_a_worker_of_another_model_is_not_used() -> None:
    worker = await a_worker(WorkerRole.DECODE)
    worker.introduced(worker_info(WorkerRole.DECODE, vocab_size=7), FACTS)
    assert "vocab_size is 7, the router's is 512" in worker.problem
    worker.introduced(worker_info(WorkerRole.PREFILL), FACTS)
    assert "it is a prefill worker, configured as decode" in worker.problem


async def test_a_sequence_is_limited_by_the_model() -> None:
    assert (await a_worker(WorkerRole.DECODE)).max_context_tokens == 160

"""Workers that die, refuse, stall or send wrong data: every request ends in one state, and nothing
leaks."""

import asyncio
import logging
import time
from dataclasses import replace

import pytest

from protos import generation_pb2, types_pb2
from router.request import search
from router.workers.worker import WorkerRole
from runtime.errors import (
    CapacityError,
    FieldViolation,
    HandoffError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    UnavailableError,
)
from tests.router.harness import (
    FLOW_LIMITS,
    NO_GRACE,
    eventually,
    request_tasks,
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

PREFILL_POINTS = [Point.QUEUED, Point.STARTED, Point.COMPUTED, Point.SENDING]
PROMPT = [1, 2, 3]


class Workers:
    """Two of each, sharing one fabric and journal."""

    def __init__(self) -> None:
        self.fabric, self.journal = Fabric(), Journal()
        self.p0, self.p1 = (FakePrefill(f"p{i}", self.fabric, self.journal) for i in range(2))
        self.d0, self.d1 = (FakeDecode(f"d{i}", self.fabric, self.journal) for i in range(2))


@pytest.fixture
def workers() -> Workers:
    return Workers()


def lost_streams(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the workers that the log reports lost."""
    return {
        vars(record)["worker"] for record in caplog.records if record.getMessage() == "stream lost"
    }


@pytest.mark.parametrize("point", PREFILL_POINTS)
async def test_another_prefill_worker_takes_over(workers: Workers, point: Point) -> None:
    async with running_router(workers.p0, workers.p1, workers.d0) as router:
        first_choice = min((workers.p0, workers.p1), key=lambda worker: worker.address)
        first_choice.die_at(point)
        answer = await router.ask(token_request(PROMPT, max_tokens=5))
        assert answer.token_ids == expected_tokens(PROMPT, 5)
        assert router.metric("baton_router_retries_total", role="prefill", reason="PEER_LOST") == 1
        assert workers.d0.sources_lost == (point is not Point.QUEUED), (
            "a pool that waits for it is told"
        )
        await router.assert_nothing_left()


@pytest.mark.parametrize("point", PREFILL_POINTS)
async def test_the_only_prefill_worker_serves_again_when_it_is_back(
    workers: Workers, point: Point
) -> None:
    async with running_router(workers.p0, workers.d0) as router:
        workers.p0.die_at(point)
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(lambda: not workers.p0._hooks, "the death")
        await asyncio.sleep(0.1)
        first_incarnation = workers.p0.incarnation
        await workers.p0.start()
        assert workers.p0.incarnation != first_incarnation
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)
        await router.assert_nothing_left()


@pytest.mark.parametrize("point", PREFILL_POINTS)
async def test_no_prefill_worker_left_is_one_clear_status(
    workers: Workers, point: Point, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_router(
        workers.p0, workers.d0, flow=replace(FLOW_LIMITS, peer_wait_s=0.3)
    ) as router:
        workers.p0.die_at(point)
        error = await router.failure(token_request(PROMPT))
        assert isinstance(error, PeerLostError)
        assert str(error) == "the prefill worker was lost", "which one is for the log"
        assert workers.p0.address in lost_streams(caplog)
        await router.assert_nothing_left()


@pytest.mark.parametrize("role", list(WorkerRole))
@pytest.mark.parametrize("is_there", [False, True], ids=["never there", "dies"])
async def test_errors_for_clients_name_no_address(
    workers: Workers,
    role: WorkerRole,
    is_there: bool,  # noqa: FBT001
) -> None:
    """`failure` checks it. The worker's address is in the cluster's status and in the log."""
    victim = workers.p0 if role is WorkerRole.PREFILL else workers.d0
    flow = replace(FLOW_LIMITS, peer_wait_s=0.2, migrations=0)
    async with running_router(workers.p0, workers.d0, flow=flow, admission=NO_GRACE) as router:
        if is_there:
            victim.die_at(Point.COMPUTED if role is WorkerRole.PREFILL else Point.TOKEN)
        else:
            await victim.die()
            await eventually(lambda: router.directory.pair_problem(), "the loss")
        error = await router.failure(token_request(PROMPT))
        assert isinstance(error, PeerLostError if is_there else UnavailableError)
        assert role.value in str(error)
        status = await router.stub.GetClusterStatus(generation_pb2.GetClusterStatusRequest())
        (lost,) = [worker for worker in status.workers if not worker.serving]
        assert lost.address == victim.address


async def test_a_worker_whose_stream_broke_gets_nothing_until_it_reports_again(
    workers: Workers,
) -> None:
    async with running_router(workers.p0, workers.d0) as router:
        workers.p0.fail_at(Point.STARTED, PeerLostError("a stage is gone"))
        workers.p0.reports = False
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(lambda: router.directory.pair_problem(), "trust in the worker")
        await asyncio.sleep(0.2)
        assert workers.journal.events().count(Point.QUEUED) == 1
        workers.p0.reports = True
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)


async def test_a_failed_transfer_is_tried_again_by_prefill(workers: Workers) -> None:
    async with running_router(workers.p0, workers.d0) as router:
        workers.p0.fail_at(Point.SENDING, HandoffError("no route"))
        assert (await router.ask(token_request(PROMPT, max_tokens=5))).token_ids == expected_tokens(
            PROMPT, 5
        )
        assert (
            router.metric("baton_router_retries_total", role="prefill", reason="HANDOFF_FAILED")
            == 1
        )
        await router.assert_nothing_left()


async def test_retries_of_prefill_are_bounded(workers: Workers) -> None:
    async with running_router(workers.p0, workers.p1, workers.d0) as router:
        for worker in (workers.p0, workers.p1):
            worker.fail_at(Point.STARTED, HandoffError("no route"), times=100)
        assert isinstance(await router.failure(token_request(PROMPT)), HandoffError)
        assert workers.journal.events().count(Point.QUEUED) == FLOW_LIMITS.prefill_attempts
        await router.assert_nothing_left()


@pytest.mark.parametrize(
    "error", [InvalidRequestError(FieldViolation("prompt", "no")), InternalError("a bug")]
)
async def test_errors_common_to_all_workers_are_not_retried(
    workers: Workers, error: Exception
) -> None:
    async with running_router(workers.p0, workers.p1, workers.d0) as router:
        for worker in (workers.p0, workers.p1):
            worker.fail_at(Point.STARTED, error, times=100)
        assert type(await router.failure(token_request(PROMPT))) is type(error)
        assert workers.journal.events().count(Point.QUEUED) == 1
        await router.assert_nothing_left()


async def test_another_first_token_after_a_retry_is_a_bug_and_never_sent(workers: Workers) -> None:
    async with running_router(workers.p0, workers.d0) as router:
        workers.p0.fail_at(Point.SENDING, HandoffError("no route"))
        answer = asyncio.create_task(router.failure(token_request(PROMPT)))
        await eventually(lambda: Point.COMPUTED in workers.journal.events(), "the first token")
        workers.p0.first_token_offset = 1
        assert isinstance(await answer, InternalError)
        await router.assert_nothing_left()


async def test_a_full_pool_refuses_and_the_next_one_takes_it(workers: Workers) -> None:
    async with running_router(workers.p0, workers.d0, workers.d1) as router:
        workers.d0.fail_at(Point.RESERVE, CapacityError("full", resource="pages"))
        workers.d1.fail_at(Point.RESERVE, CapacityError("full", resource="pages"))
        assert (await router.ask(token_request(PROMPT, max_tokens=5))).token_ids == expected_tokens(
            PROMPT, 5
        )
        await router.assert_nothing_left()


async def test_when_all_pools_refuse_the_request_waits_for_one(workers: Workers) -> None:
    async with running_router(workers.p0, workers.d0) as router:
        workers.d0.fail_at(Point.RESERVE, CapacityError("full", resource="pages"), times=4)
        answer = await router.ask(token_request(PROMPT, max_tokens=5))
        assert answer.token_ids == expected_tokens(PROMPT, 5)
        assert answer.chunks[0].token_ids == [6], "the first token does not wait for a pool"
        assert (
            router.metric("baton_router_retries_total", role="decode", reason="OUT_OF_CAPACITY")
            == 4
        )
        await router.assert_nothing_left()


async def test_patience_with_full_pools_ends(workers: Workers) -> None:
    limits = replace(FLOW_LIMITS, capacity_wait_s=0.3)
    async with running_router(workers.p0, workers.d0, flow=limits) as router:
        workers.d0.fail_at(Point.RESERVE, CapacityError("full", resource="pages"), times=1000)
        error = await router.failure(token_request(PROMPT))
        assert isinstance(error, CapacityError)
        assert error.retry_after_s is None, "nothing was measured"
        await router.assert_nothing_left()


async def test_a_pool_that_dies_at_its_reservation_is_replaced(workers: Workers) -> None:
    async with running_router(workers.p0, workers.d0, workers.d1) as router:
        first_choice = min((workers.d0, workers.d1), key=lambda worker: worker.address)
        first_choice.die_at(Point.RESERVE)
        assert (await router.ask(token_request(PROMPT, max_tokens=5))).token_ids == expected_tokens(
            PROMPT, 5
        )
        assert not first_choice._hooks, "it was not chosen, so nothing was tested"
        await router.assert_nothing_left()


@pytest.mark.parametrize("point", [Point.RESERVED, Point.COMMIT, Point.TOKEN, Point.FINISH])
async def test_the_only_decode_pool_lost_is_one_clear_status(
    workers: Workers, point: Point, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_router(
        workers.p0, workers.d0, flow=replace(FLOW_LIMITS, peer_wait_s=0.3)
    ) as router:
        workers.d0.die_at(point)
        error = await router.failure(token_request(PROMPT))
        assert isinstance(error, PeerLostError)
        assert str(error) == "the decode worker was lost", "which one is for the log"
        assert workers.d0.address in lost_streams(caplog)
        await router.assert_nothing_left()
        await workers.d0.start()
        await eventually(lambda: not router.directory.pair_problem(), "the pool's return")
        assert (await router.ask(token_request(PROMPT, max_tokens=5))).token_ids == expected_tokens(
            PROMPT, 5
        )


async def test_a_pool_that_ignores_a_reservation_is_abandoned(workers: Workers) -> None:
    limits = replace(FLOW_LIMITS, reserve_s=0.5)
    async with running_router(workers.p0, workers.d0, workers.d1, flow=limits) as router:
        silent = asyncio.Event()

        async def stall(_: types_pb2.EngineRequest) -> None:
            if not silent.is_set():
                silent.set()
                await asyncio.sleep(30)

        workers.d0.at(Point.RESERVE, stall)
        workers.d1.at(Point.RESERVE, stall)
        assert (await router.ask(token_request(PROMPT, max_tokens=5))).token_ids == expected_tokens(
            PROMPT, 5
        )
        await router.assert_nothing_left()


async def test_a_router_that_was_held_up_gives_up_no_pool(workers: Workers) -> None:
    async with running_router(
        workers.p0, workers.d0, flow=replace(FLOW_LIMITS, reserve_s=0.5)
    ) as router:

        async def stand_still(_: types_pb2.EngineRequest) -> None:
            time.sleep(1.5)  # noqa: ASYNC251 - the whole process does

        workers.d0.at(Point.RESERVE, stand_still)
        assert (await router.ask(token_request(PROMPT, max_tokens=5))).token_ids == expected_tokens(
            PROMPT, 5
        )
        assert router.metric("baton_router_retries_total", role="decode", reason="PEER_LOST") == 0
        await router.assert_nothing_left()


async def test_a_pool_that_never_commits_is_given_up(workers: Workers) -> None:
    limits = replace(FLOW_LIMITS, commit_s=0.2, migrations=0)
    async with running_router(workers.p0, workers.d0, flow=limits) as router:
        workers.d0.at(Point.COMMIT, lambda _: asyncio.sleep(30))
        error = await router.failure(token_request(PROMPT))
        assert isinstance(error, PeerLostError)
        assert "commit" in str(error)
        await router.assert_nothing_left()


async def test_a_prefill_worker_that_never_sends_the_first_token_is_replaced(
    workers: Workers,
) -> None:
    """The pool has everything else and cannot be blamed: it keeps its reservation."""
    limits = replace(FLOW_LIMITS, commit_s=1.0, migrations=0)
    async with running_router(workers.p0, workers.p1, workers.d0, flow=limits) as router:
        mute = min((workers.p0, workers.p1), key=lambda worker: worker.address)
        mute.says_first_token = False
        assert (await router.ask(token_request(PROMPT, max_tokens=5))).token_ids == expected_tokens(
            PROMPT, 5
        )
        assert router.metric("baton_router_retries_total", role="prefill", reason="PEER_LOST") == 1
        assert router.metric("baton_router_retries_total", role="decode", reason="PEER_LOST") == 0
        await router.assert_nothing_left()


async def test_prefill_dies_while_all_pools_are_full(workers: Workers) -> None:
    async with running_router(workers.p0, workers.p1, workers.d0) as router:
        workers.d0.fail_at(Point.RESERVE, CapacityError("full", resource="pages"), times=4)
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(lambda: Point.COMPUTED in workers.journal.events(), "the first token")
        busy = workers.p0 if workers.p0.open_requests else workers.p1
        await busy.die()
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)
        await router.assert_nothing_left()


async def test_prefill_dies_between_reservation_and_destination_terms(workers: Workers) -> None:
    """The destination terms for the dead worker arrive when its successor is already announced, and
    must be dropped."""
    async with running_router(workers.p0, workers.p1, workers.d0) as router:
        may_land = asyncio.Event()
        workers.d0.at(Point.RESERVE, lambda _: may_land.wait())
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(
            lambda: workers.p0.open_requests or workers.p1.open_requests, "a prefill worker"
        )
        busy, other = (
            (workers.p0, workers.p1) if workers.p0.open_requests else (workers.p1, workers.p0)
        )
        await eventually(lambda: Point.COMPUTED in workers.journal.events(), "the first token")
        await busy.die()
        await eventually(lambda: other.open_requests, "the successor")
        await asyncio.sleep(0.1)
        may_land.set()
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)
        assert workers.journal.events().count(Point.RESERVED) == 2
        assert workers.journal.events().count(Point.SENDING) == 1
        await router.assert_nothing_left()


async def test_terms_for_a_lost_worker_are_not_sent_to_its_queued_successor(
    workers: Workers,
) -> None:
    """A prefill worker takes destination terms only after it has started."""
    async with running_router(workers.p0, workers.p1, workers.d0) as router:
        first, successor = sorted((workers.p0, workers.p1), key=lambda worker: worker.address)
        may_land, may_start = asyncio.Event(), asyncio.Event()
        workers.d0.at(Point.RESERVE, lambda _: may_land.wait())
        successor.at(Point.QUEUED, lambda _: may_start.wait())
        first.die_at(Point.STARTED)
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(lambda: successor.open_requests, "the successor")
        may_land.set()
        pool = router.directory.workers[-1]
        await eventually(
            lambda: any(booking.has_reserved for booking in pool._bookings), "the destination terms"
        )
        await asyncio.sleep(0.1)  # in which it would reach the successor
        may_start.set()
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)
        assert router.metric("baton_router_retries_total", role="decode", reason="PEER_LOST") == 0
        await router.assert_nothing_left()


async def test_a_pool_told_of_the_successor_in_time_posts_its_terms_once(workers: Workers) -> None:
    async with running_router(workers.p0, workers.p1, workers.d0) as router:
        first, successor = sorted((workers.p0, workers.p1), key=lambda worker: worker.address)
        may_land = asyncio.Event()
        workers.d0.at(Point.POSTING, lambda _: may_land.wait())
        first.die_at(Point.STARTED)
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(
            lambda: (successor.name, Point.STARTED) in workers.journal.entries,
            "the successor's turn",
        )
        await asyncio.sleep(0.1)  # in which the pool hears of it
        may_land.set()
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)
        assert router.metric("baton_router_retries_total", role="decode", reason="PEER_LOST") == 0
        await router.assert_nothing_left()


async def test_prefill_dies_after_delivery_and_before_the_commit(workers: Workers) -> None:
    """A successor is on its way when decode commits what the dead worker had delivered: it is not
    needed any more."""
    async with running_router(workers.p0, workers.p1, workers.d0) as router:
        may_commit = asyncio.Event()
        workers.d0.at(Point.COMMIT, lambda _: may_commit.wait())
        first_choice = min((workers.p0, workers.p1), key=lambda worker: worker.address)
        first_choice.die_at(Point.SENT)
        successor = workers.p1 if first_choice is workers.p0 else workers.p0
        successor.at(Point.QUEUED, lambda _: asyncio.sleep(30))
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(lambda: successor.open_requests, "the successor")
        may_commit.set()
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)
        await router.assert_nothing_left()


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_pool_may_commit_during_the_search_for_another_prefill_worker(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, *, is_alone: bool
) -> None:
    """No prefill worker is needed any more: the search ends without ending the request or sending
    the pool a second offer."""
    monkeypatch.setattr(search, "RETRY_PAUSE_S", 60.0)  # longer than the test looks
    prefill = (workers.p0,) if is_alone else (workers.p0, workers.p1)

    def searches() -> list[str]:
        return [name for name in request_tasks() if name == "RequestFlow._report"]

    async def commit(_: types_pb2.EngineRequest) -> None:
        await eventually(lambda: workers.d0.sources_lost, "the word that the source is lost")
        assert searches()

    async with running_router(*prefill, workers.d0) as router:
        min(prefill, key=lambda worker: worker.address).die_at(Point.SENT)
        workers.d0.at(Point.COMMIT, commit)
        workers.d0.at(
            Point.FINISH, lambda _: eventually(lambda: not searches(), "the search", within_s=10.0)
        )
        answer = await router.ask(token_request(PROMPT, max_tokens=5))
        assert answer.token_ids == expected_tokens(PROMPT, 5)
        assert workers.journal.events().count(Point.QUEUED) == 1
        assert router.metric("baton_router_retries_total", role="decode", reason="PEER_LOST") == 0
        await router.assert_nothing_left()


@pytest.mark.parametrize("kind", ["started", "first_token", "destination", "committed", "finished"])
async def test_a_worker_that_repeats_itself_is_given_up(
    workers: Workers, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The second finish comes too late to matter."""
    caplog.set_level(logging.INFO)
    is_source = kind in {"started", "first_token"}
    async with running_router(workers.p0, workers.p1, workers.d0, workers.d1) as router:
        for worker in (workers.p0, workers.p1) if is_source else (workers.d0, workers.d1):
            worker.repeats = kind
        answer = await router.ask(token_request(PROMPT, max_tokens=5))
        assert answer.token_ids == expected_tokens(PROMPT, 5)
        assert bool(lost_streams(caplog)) is (kind != "finished")
        await router.assert_nothing_left()

"""Workers that restart where they were while requests are on their way to them."""

import asyncio
from dataclasses import replace

import grpc

from protos import prefill_pb2, worker_pb2
from router.request.events import Received, StreamEnded
from router.request.worker_stream import WorkerStream
from router.workers.discovery import StaticSource
from router.workers.worker import Worker, WorkerRole
from runtime.errors import PeerLostError, UnavailableError
from tests.router.harness import (
    FACTS,
    FLOW_LIMITS,
    NO_GRACE,
    eventually,
    running_router,
    token_request,
    worker_info,
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


async def test_a_booking_keeps_the_channel_but_no_load_of_a_new_incarnation() -> None:
    worker = Worker(
        WorkerRole.DECODE,
        "h:1",
        grpc.aio.insecure_channel("127.0.0.1:1"),
        lambda: None,
        lambda: None,
    )
    worker.introduced(worker_info(WorkerRole.DECODE, compatibility="m"), FACTS)
    booking = worker.book(10)
    assert not booking.is_outlived
    worker.introduced(worker_info(WorkerRole.DECODE, incarnation="b", compatibility="other"), FACTS)
    worker.reported(worker_pb2.WorkerLoad(serving=True, pages_free=10))
    assert (booking.is_outlived, booking.compatibility) == (True, "m")
    assert worker.snapshot.candidate.load == 0
    assert worker.is_in_use
    booking.lost("its stream broke")
    assert worker.is_usable, "the new incarnation did nothing wrong"
    booking.release()
    booking.release()
    assert not worker.is_in_use


async def test_a_worker_whose_channel_is_closed_was_lost() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    worker = Worker(WorkerRole.PREFILL, "h:1", channel, lambda: None, lambda: None)
    await channel.close()
    delivered: asyncio.Queue[Received | StreamEnded] = asyncio.Queue()
    async with asyncio.timeout(30):
        stream = WorkerStream.open(
            7,
            worker,
            worker.prefill_calls.current(),
            prefill_pb2.PrefillInput(),
            delivered.put_nowait,
        )
        assert worker.is_in_use
        ended = await delivered.get()
        stream.close()
    assert isinstance(ended, StreamEnded)
    assert ended.number == 7
    assert isinstance(ended.error, PeerLostError)
    assert not worker.is_in_use


async def test_a_pool_restarted_unlisted_while_its_request_queues_is_replaced() -> None:
    """As a container does that restarts in its pod: not ready, so discovery drops it; then another
    incarnation."""
    fabric, journal = Fabric(), Journal()
    prefill, pools = (
        FakePrefill("p", fabric, journal),
        [FakeDecode(f"d{i}", fabric, journal) for i in range(2)],
    )
    async with running_router(prefill, *pools) as router:
        may_start = asyncio.Event()
        prefill.at(Point.QUEUED, lambda _: may_start.wait())
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(lambda: prefill.open_requests, "the request")
        (booked,) = (
            w for w in router.directory.workers if w.role is WorkerRole.DECODE and w.is_in_use
        )
        (pool,) = (pool for pool in pools if pool.address == booked.address)
        await pool.die()
        await eventually(lambda: booked.problem, "trust in the dead")
        known = router.directory._worker_set
        (index,) = (
            at
            for at, (_, source) in enumerate(known._sources)
            if isinstance(source, StaticSource) and source.address == booked.address
        )
        known._found(index, frozenset())  # as discovery does when a name is gone
        pool.serving = False
        await pool.start()
        await eventually(lambda: booked.incarnation == pool.incarnation, "the first incarnation")
        may_start.set()
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)
        assert (pool.name, Point.RESERVE) not in journal.entries
        assert router.metric("baton_router_retries_total", role="decode", reason="PEER_LOST") == 1
        assert not booked.is_in_use
        assert booked not in router.directory.workers
        await router.assert_nothing_left()


async def test_the_only_pool_restarts_while_its_request_queues() -> None:
    fabric, journal = Fabric(), Journal()
    prefill, pool = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    async with running_router(prefill, pool) as router:
        may_start = asyncio.Event()
        prefill.at(Point.QUEUED, lambda _: may_start.wait())
        answer = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
        await eventually(lambda: prefill.open_requests, "the request")
        await pool.die()
        await pool.start()
        await eventually(lambda: router.directory.workers[1].incarnation == pool.incarnation, "it")
        await eventually(lambda: not router.directory.pair_problem(), "absence of a pair")
        may_start.set()
        assert (await answer).token_ids == expected_tokens(PROMPT, 5)
        assert not router.directory.pair_problem(), (
            "the new incarnation is not blamed for the old one"
        )
        await router.assert_nothing_left()


async def test_patience_with_a_lost_worker_is_as_long_as_its_start_was() -> None:
    """This is much longer than the setting: new requests wait, and so do those it was running."""
    fabric, journal = Fabric(), Journal()
    prefill, pool = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    pool.token_pause_s = 0.05
    for worker in (prefill, pool):
        worker.start_s = 20.0
    async with running_router(
        prefill,
        pool,
        flow=replace(FLOW_LIMITS, peer_wait_s=0.1),
        admission=NO_GRACE,
        longest_restart_s=60.0,
    ) as router:
        for worker in (prefill, pool):
            held = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=40)))
            await eventually(lambda: pool.open_requests, "the request")
            await worker.die()
            await eventually(router.directory.pair_problem, "the dead worker")
            new = asyncio.create_task(router.ask(token_request(PROMPT, max_tokens=5)))
            await asyncio.sleep(1.0)
            await worker.start()
            assert (await held).token_ids == expected_tokens(PROMPT, 40)
            assert (await new).token_ids == expected_tokens(PROMPT, 5)
        await router.assert_nothing_left()


async def test_waiting_for_a_restart_ends_despite_worker_reports() -> None:
    fabric, journal = Fabric(), Journal()
    prefill, pool = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    pool.start_s = 1e6
    async with running_router(prefill, pool, admission=NO_GRACE, longest_restart_s=0.5) as router:
        await pool.die()
        await eventually(router.directory.pair_problem, "the dead worker")
        assert isinstance(await router.failure(token_request(PROMPT)), UnavailableError)

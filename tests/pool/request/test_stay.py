"""A request's stay on a pool, seen from a caller that behaves badly, over real gRPC; and who frees its memory, and
when: two lifetimes, request and transfer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from engine.core.layer_range import Placement
from engine.core.request import Request, SamplingParams
from pool.pipeline.group import SessionReports, StageGroup
from pool.request import stay as module
from pool.request.stay import MAX_UNREAD, EventPost, Inbox, MemoryReclaimer, RequestParts, serve
from protos import prefill_pb2 as pb
from protos import prefill_pb2_grpc
from runtime.client import open_channel
from runtime.clock import SystemClock
from runtime.metrics import RpcMetrics
from runtime.server import GrpcServer, ServerOptions
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms, StageSessionEvent, StageSessionState
from transfer.session import ReceiveSession, SendSession

Context = grpc.aio.ServicerContext[pb.RunRequest, pb.RunResponse]
STALL_S = 0.5


class Talkative:
    """A stay that always has more to say."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.num_said = 0
        self.ended = asyncio.Event()

    async def run(self) -> AsyncIterator[pb.RunResponse]:
        while True:
            self.num_said += 1
            await asyncio.sleep(self.pause_s)
            response = pb.RunResponse()
            response.started.terms.compatibility_text = "x" * (1 << 16)
            yield response

    def end(self) -> None:
        self.ended.set()


class Service(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, stay: Talkative) -> None:
        self.stay = stay
        self.inbox: Inbox[pb.RunRequest, object] | None = None

    async def Run(self, request_iterator: AsyncIterator[pb.RunRequest],
                  context: Context) -> AsyncIterator[pb.RunResponse]:
        parts = cast(RequestParts, SimpleNamespace(grammars=None))
        request = Request("r", (1,), 1, SamplingParams(temperature=0))
        self.inbox = Inbox(request_iterator, Counter("expired", "Waits.", registry=CollectorRegistry()))

        async def begin() -> Talkative:
            return self.stay

        async with aclosing(serve(parts, self.inbox, request, begin)) as responses:
            async for response in responses:
                yield response


@asynccontextmanager
async def serving(stay: Talkative) -> AsyncIterator[tuple[Service, GrpcServer, Any]]:
    service = Service(stay)
    server = GrpcServer(ServerOptions("127.0.0.1:0", write_s=STALL_S), services=(),
                        metrics=RpcMetrics.create(CollectorRegistry()))
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.grpc)
    try:
        async with open_channel(await server.start()) as channel:
            yield service, server, prefill_pb2_grpc.PrefillStub(channel)
    finally:
        await server.drain(grace_s=0.1)


async def test_a_caller_that_never_reads_does_not_keep_its_handler() -> None:
    """Its connection lives, so nothing else would end the call; and every drain waited for it as long as it may."""
    stay = Talkative()
    async with serving(stay) as (_, server, stub):
        call = stub.Run()
        await call.write(pb.RunRequest())
        async with asyncio.timeout(30):
            await stay.ended.wait()
            await server.drain(grace_s=600)
        call.cancel()


async def test_a_caller_that_reads_slowly_is_not_cut_off() -> None:
    stay = Talkative(pause_s=STALL_S / 10)
    async with serving(stay) as (_, _, stub):
        call = stub.Run()
        for _ in range(40):
            await call.read()
        assert not stay.ended.is_set()
        call.cancel()
        await asyncio.wait_for(stay.ended.wait(), 30)


async def test_a_caller_that_never_stops_talking_is_read_no_further_than_it_is_heard() -> None:
    stay = Talkative(pause_s=60)  # it takes nothing out of its inbox
    async with serving(stay) as (service, _, stub):
        call = stub.Run()
        for _ in range(4 * MAX_UNREAD):
            await call.write(pb.RunRequest())
        await until(lambda: service.inbox is not None and service.inbox._queue.qsize() == MAX_UNREAD)
        await asyncio.sleep(0.2)
        assert service.inbox is not None
        assert service.inbox._queue.qsize() == MAX_UNREAD
        call.cancel()
        await asyncio.wait_for(stay.ended.wait(), 30)


def drained_event() -> StageSessionEvent:
    return StageSessionEvent("s", 0, StageSessionState.DRAINED)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - lists have no event to wait for
            await asyncio.sleep(0.005)


class FakeLoop:
    """Runs commands at once."""

    def post(self, command: Callable[[], object]) -> None:
        command()


def make_reclaimer() -> tuple[MemoryReclaimer, SessionReports, list[str]]:
    reports, told = SessionReports(asyncio.get_running_loop()), list[str]()
    return MemoryReclaimer(reports, FakeLoop(), told.append), reports, told  # type: ignore[arg-type]


def watched(reports: SessionReports, *, num_stages: int) -> ReceiveSession:
    session = ReceiveSession("s", num_stages=num_stages, clock=SystemClock())
    reports.watch(session, lambda: None)
    return session


async def test_memory_is_released_only_when_every_stage_has_drained_s4_7_s4_10() -> None:
    reclaimer, reports, told = make_reclaimer()
    done: list[str] = []
    session = watched(reports, num_stages=2)
    reclaimer.end(lambda: done.append("released"), close=lambda: done.append("closed"), session=session)
    assert done == ["closed"]
    reports.deliver(0, drained_event())
    await asyncio.sleep(0)
    assert done == ["closed"]
    reports.deliver(1, drained_event())
    await until(lambda: done == ["closed", "released"])
    assert reports.num_watched == 0
    assert told == []
    await until(lambda: reclaimer.open_tasks == 0)


async def test_without_a_session_memory_is_released_at_once() -> None:
    reclaimer, _, _ = make_reclaimer()
    done: list[str] = []
    reclaimer.end(lambda: done.append("released"))
    assert done == ["released"]


async def test_a_session_that_does_not_drain_keeps_its_memory_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 0.01)
    reclaimer, reports, told = make_reclaimer()
    done: list[str] = []
    reclaimer.end(lambda: done.append("released"), session=watched(reports, num_stages=1))
    await until(lambda: told)
    assert done == []
    assert "did not drain" in told[0]


async def test_a_process_that_was_held_up_reads_what_was_reported_before_it_despairs(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGSTOP: the time is over before anybody could listen, and nothing would make the pool serve again."""
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 1.0)
    reclaimer, reports, told = make_reclaimer()
    done: list[str] = []
    reclaimer.end(lambda: done.append("released"), session=watched(reports, num_stages=1))
    await asyncio.sleep(0)  # it waits

    async def report() -> None:
        for _ in range(5):  # what comes over a stream takes some turns of the loop
            await asyncio.sleep(0)
        reports.deliver(0, drained_event())

    reporting = asyncio.create_task(report())
    time.sleep(1.5)  # noqa: ASYNC251 - the whole loop stands still
    await reporting
    await until(lambda: reclaimer.open_tasks == 0)
    assert (done, told) == (["released"], [])


class FakeAgent:
    """Leaves everything to the test."""

    def open_send(self, request_key: int, source: SourceTerms, destination: DestinationTerms) -> None:
        pass


async def test_a_request_that_comes_back_to_its_source_lets_the_older_epoch_drain() -> None:
    reclaimer, reports, told = make_reclaimer()
    group = StageGroup(FakeAgent(), [Placement()], reports)  # type: ignore[arg-type]
    source = SourceTerms("", "", 4, 4, 4, (1,), 0, ())
    released: list[int] = []
    sessions = [SendSession("s", epoch=epoch, num_stages=1, clock=SystemClock()) for epoch in range(2)]

    def begin(epoch: int) -> None:
        group.open_send(epoch + 1, source, DestinationTerms("s", epoch, 0, (1,), 0, (), ""),
                        sessions[epoch], lambda: None)

    def end(epoch: int) -> None:
        sessions[epoch].abort("its stream ended")
        reclaimer.end(lambda: released.append(epoch), session=sessions[epoch])

    begin(0)
    end(0)
    begin(1)
    reports.deliver(0, StageSessionEvent("s", 0, StageSessionState.DRAINED))
    await until(lambda: released == [0])
    end(1)
    reports.deliver(0, StageSessionEvent("s", 1, StageSessionState.DRAINED))
    await until(lambda: released == [0, 1])
    assert (group.open_sessions, told) == (0, [])


async def test_what_a_step_posted_arrives_at_once_and_an_error_holds_nothing_up() -> None:
    loop, seen, errors = asyncio.get_running_loop(), list[object](), list[object]()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    failure = RuntimeError("of one request")

    def fail(event: object) -> None:
        raise failure

    post = EventPost(loop)
    for receive, event in ((seen.append, 1), (fail, 2), (seen.append, 3)):
        post.put(receive, event)
    post.flush()
    loop.call_soon(seen.append, "the loop's next callback")
    await until(lambda: len(seen) == 3)
    assert (seen, errors) == ([1, 3, "the loop's next callback"], [failure])


async def test_the_loop_is_let_in_at_once_but_not_behind_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(module, "_give_way", lambda: taken.append("way"))
    monkeypatch.setattr(module, "LET_IN_S", 60.0)
    post = EventPost(asyncio.get_running_loop())
    for event in ("first", "second"):
        post.put(taken.append, event)
        post.flush()
    assert taken == ["way"]
    await asyncio.sleep(0)
    monkeypatch.setattr(module, "LET_IN_S", 0.0)
    post.flush()  # nothing
    post.put(taken.append, "third")
    post.flush()
    assert taken == ["way", "first", "second", "way"]
    await asyncio.sleep(0)
    assert taken == ["way", "first", "second", "way", "third"]


async def test_what_can_wait_wakes_the_loop_once_and_is_found_by_its_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, seen, calls = asyncio.get_running_loop(), list[object](), list[object]()
    post, wake = EventPost(loop), loop.call_soon_threadsafe

    def called(*args: Any) -> None:  # noqa: ANN401 - as the loop has it
        calls.append(args)
        wake(*args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", called)

    def step(event: object, *, can_wait: bool = True) -> None:
        post.put(seen.append, event, can_wait=can_wait)
        post.flush()

    step("first")
    await asyncio.sleep(0)
    assert (seen, len(calls)) == (["first"], 1), "nobody is awake, so it goes at once"
    step("second")
    step("third")
    await asyncio.sleep(0)
    assert (seen, len(calls)) == (["first"], 1)
    await until(lambda: seen == ["first", "second", "third"])
    assert len(calls) == 1
    step("fourth")
    step("last", can_wait=False)
    await asyncio.sleep(0)
    assert (seen[3:], len(calls)) == (["fourth", "last"], 2), "what must not wait takes along what came before"
    await asyncio.sleep(3 * module.PACE_S)
    step("after a pause")
    assert len(calls) == 3
    await asyncio.sleep(0)
    assert seen[5:] == ["after a pause"]


async def test_nothing_is_lost_between_a_thread_that_posts_and_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACE_S", 0.0001)
    seen, post = list[object](), EventPost(asyncio.get_running_loop())

    def engine() -> None:
        for number in range(20_000):
            post.put(seen.append, number, can_wait=True)
            post.flush()

    await asyncio.to_thread(engine)
    await until(lambda: len(seen) == 20_000)
    assert seen == list(range(20_000))

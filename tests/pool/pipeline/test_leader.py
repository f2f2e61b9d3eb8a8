"""A leader whose pipeline breaks while every stage is joined, and one whose warm-up fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.layer_range import Placement
from engine.core.rows import Row, build_batch
from engine.pipeline.channel import Packet
from engine.pipeline.ranks import StageRanks
from engine.pipeline.results import StepResult
from engine.sampling.guided import GuidedSampler
from pool import leader_server
from pool.pipeline import leader as leader_module
from pool.pipeline.leader import Leader
from pool.pipeline.session_reports import SessionReports
from pool.stage.config import WorkerConfig
from pool.stage.stage import Stage
from protos import pipeline_pb2 as pb
from protos import pipeline_pb2_grpc
from runtime.digests import Compatibility
from runtime.errors import BatonError, CapacityError, PeerLostError, UnavailableError
from runtime.observe.exposition import new_registry
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.client import open_channel
from runtime.rpc.server import GrpcServer, ServerOptions
from tests.pool.pipeline.test_membership import COUNTED, RANGES, SETTINGS, WEIGHTS, FakeStage
from transfer.transport.forming import Forming


class OneBatch:
    """A scheduler with one batch to run after each call of `give`. `on_result` can be made to
    fail."""

    def __init__(self) -> None:
        self.work = 0
        self.lost: list[BatonError] = []
        self.result_error: Exception | None = None

    def give(self) -> None:
        self.work += 1

    def next_batch(self) -> ForwardBatch | None:
        if not self.work:
            return None
        self.work -= 1
        return build_batch(ForwardMode.DECODE, [Row(1, [1], 0, [1], 0, None)])

    def on_result(self, batch: ForwardBatch, result: StepResult) -> None:
        if self.result_error is not None:
            raise self.result_error

    def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
        self.lost.append(error)

    def on_idle(self) -> None:
        pass


class BreakingChannel:
    """A batch channel that returns nothing, as UCX that fails while gRPC lives."""

    address, parts = b"channel-0", None

    def connect(self, addresses: list[bytes], forming: Forming) -> None: ...

    def send(self, rank: int, packet: Packet, *, timeout_s: float) -> None: ...

    def receive(self, rank: int, *, timeout_s: float) -> Packet | None:
        raise PeerLostError("the connection to stage 1 has ended")

    def fail(self, rank: int, reason: str) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class FailingExecutor:
    """Computes nothing."""

    def run(self, batch: ForwardBatch, incoming: object = None) -> None:
        raise RuntimeError("nothing to compute with")


async def nothing() -> None:
    """Warm up successfully."""


@dataclass
class Rig:
    leader: Leader
    scheduler: OneBatch
    may_let_go: asyncio.Event  # whether what runs has ended, when a stage leaves
    serving: list[str] = field(default_factory=list)  # why not, or ""
    handed_back: list[BatonError] = field(default_factory=list)  # with what requests were ended

    async def until_serving(self, *, now: bool = True) -> None:
        async with asyncio.timeout(60):
            while self.leader.serving is not now:  # noqa: ASYNC110 - happens on other threads
                await asyncio.sleep(0.005)

    async def until_warm_again(self, before: asyncio.Task[None] | None) -> None:
        async with asyncio.timeout(60):
            while self.leader._warming is before or self.leader._warming is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await self.leader._warming

    async def until_said(self, reason: str) -> None:
        async with asyncio.timeout(60):
            while reason not in self.serving:  # noqa: ASYNC110 - a list has no event to wait for
                await asyncio.sleep(0.005)


@asynccontextmanager
async def leading(
    world_size: int, warm_up: Callable[[], Awaitable[None]] = nothing, *, step_limit_s: float = 0.0
) -> AsyncIterator[Rig]:
    scheduler, reasons, handed_back = OneBatch(), list[str](), list[BatonError]()
    stage = SimpleNamespace(
        agent=None,
        executor=FailingExecutor(),
        drafter=None,
        device=None,
        ranks=StageRanks(),
        grammars=None,
        plan=SimpleNamespace(
            ranges=RANGES[:world_size],
            settings=SETTINGS,
            compatibility=lambda weights: Compatibility("c", "text"),
        ),
        counted=COUNTED,
        weights=WEIGHTS,
    )
    stage.agent = SimpleNamespace(endpoint=None, incarnation="life-0")

    may_let_go = asyncio.Event()
    may_let_go.set()

    class Owner:
        """Implements `PoolListener` and `Evictor`."""

        async def warm_up(self) -> None:
            await warm_up()

        def serving_changed(self, reason: str, *, serving: bool) -> None:
            reasons.append(reason)

        async def empty(self, grace_s: float) -> None:
            await may_let_go.wait()

        async def hand_back(self, error: BatonError) -> None:
            handed_back.append(error)

    config = cast(
        WorkerConfig,
        SimpleNamespace(
            world_size=world_size,
            tp=1,
            dp_attention=1,
            step_limit_s=step_limit_s,
            frame_timeout_s=10.0,
            placement=Placement(0, world_size),
            overlap_steps=False,
        ),
    )
    leader = Leader(
        config,
        cast(Stage, stage),
        [scheduler],
        GuidedSampler(None),
        reports=SessionReports(asyncio.get_running_loop()),
        listener=Owner(),
        evictor=Owner(),
    )
    leader.start()
    try:
        yield Rig(leader, scheduler, may_let_go, reasons, handed_back)
    finally:
        leader.stop()


@asynccontextmanager
async def joining(leader: Leader) -> AsyncIterator[pipeline_pb2_grpc.PipelineStub]:
    server = GrpcServer(
        ServerOptions("127.0.0.1:0"),
        services=(),
        metrics=RpcMetrics.create(new_registry(role="test", version="0")),
        background_methods=frozenset({"/baton.v1.Pipeline/Join"}),
    )
    assert leader.service is not None
    pipeline_pb2_grpc.add_PipelineServicer_to_server(leader.service, server.grpc)
    try:
        async with open_channel(await server.start()) as channel:
            yield pipeline_pb2_grpc.PipelineStub(channel)
    finally:
        await server.drain(grace_s=0.1)


@pytest.fixture(autouse=True)
def broken_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        leader_module, "open_pool_channel", lambda *given, **named: BreakingChannel()
    )
    monkeypatch.setattr(leader_module, "check_channels", lambda addresses: None)
    monkeypatch.setattr(leader_module, "max_frame_bytes", lambda *given: 0)
    monkeypatch.setattr(leader_module, "WARM_UP_PAUSE_S", 0.02)
    monkeypatch.setattr(leader_module, "LINGER_S", 0.02)


@pytest.mark.parametrize("leaves", [False, True], ids=["died", "left"])
async def test_a_stage_that_died_did_not_leave(leaves: bool) -> None:  # noqa: FBT001
    """In the log, in the reason routers read, and in the error of what ran."""
    async with leading(2) as rig, joining(rig.leader) as stub:
        stage = FakeStage(stub)
        await stage.hello(1)
        await stage.forms()
        await rig.until_serving()
        rig.scheduler.lost.clear()
        if leaves:
            await stage.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=60)))
        else:
            stage.die()
        said = f"stage 1 of the pool {'left' if leaves else 'died'}"
        await rig.until_said(said)
        async with asyncio.timeout(60):
            while not rig.scheduler.lost:  # noqa: ASYNC110 - happens on the engine's thread
                await asyncio.sleep(0.005)
        assert str(rig.scheduler.lost[0]) == said


async def test_a_leader_sends_nothing_before_its_stage_is_ready() -> None:
    async with leading(2) as rig, joining(rig.leader) as stub:
        stage = FakeStage(stub)
        await stage.hello(1)
        formed = (await stage.read()).formed
        rig.leader.loop.post(rig.scheduler.give)
        await rig.leader.loop.submit(lambda: None)
        assert rig.scheduler.work == 1, "a batch was launched before anybody could take it"
        assert not rig.leader.serving
        await stage.send(pb.JoinRequest(ready=pb.StageReady(session=formed.session)))
        async with asyncio.timeout(60):
            while rig.scheduler.work:  # noqa: ASYNC110 - happens on the engine's thread
                await asyncio.sleep(0.005)


async def test_a_pipeline_broken_in_the_engine_only_forms_again() -> None:
    async with leading(2) as rig, joining(rig.leader) as stub:
        for _ in range(2):
            stage = FakeStage(stub)
            await stage.hello(1)
            await stage.forms()
            await rig.until_serving()
            rig.scheduler.lost.clear()
            rig.leader.loop.post(rig.scheduler.give)
            assert await stage.hears_goodbye(), "it has to join again"
            await rig.until_serving(now=False)
            assert isinstance(rig.scheduler.lost[0], PeerLostError)
        assert "the pipeline broke: the connection to stage 1 has ended" in rig.serving
        assert rig.leader.failure is None


async def test_a_pool_that_forms_while_a_stage_is_leaving_does_not_serve() -> None:
    """Another stage was lost and is back: what the pool took now, it would hand back in a
    moment."""
    async with leading(3) as rig, joining(rig.leader) as stub:
        first, second = FakeStage(stub), FakeStage(stub)
        await first.hello(1)
        await second.hello(2)
        await first.forms()
        await second.forms()
        await rig.until_serving()
        warmed = rig.leader._warming
        rig.may_let_go.clear()
        await first.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=60)))
        await rig.until_serving(now=False)
        second.die()
        await rig.until_said("stage 2 of the pool died")
        successor = FakeStage(stub)
        await successor.hello(2)
        await successor.forms()
        await first.forms()
        await rig.until_warm_again(warmed)
        assert not rig.leader.serving
        rig.may_let_go.set()
        assert await first.hears_goodbye()
        await rig.until_said("stage 1 of the pool left")
        returned = FakeStage(stub)
        await returned.hello(1)
        await returned.forms()
        await successor.forms()
        await rig.until_serving()


async def test_a_one_stage_worker_ends_with_the_reason_its_engine_stopped() -> None:
    async with leading(1) as rig:
        await rig.until_serving()
        rig.scheduler.result_error = ZeroDivisionError("boom")
        rig.leader.loop.post(rig.scheduler.give)
        async with asyncio.timeout(60):
            with pytest.raises(
                UnavailableError, match="this worker cannot continue: the engine stopped: boom"
            ):
                await leader_server._watch_engine(rig.leader)
        assert not rig.leader.serving


async def test_an_unhealthy_pool_rejects_its_requests_and_joining_stages() -> None:
    async with leading(2) as rig, joining(rig.leader) as stub:
        stage = FakeStage(stub)
        await stage.hello(1)
        await stage.forms()
        await rig.until_serving()
        warmed = rig.leader._warming
        rig.leader.unhealthy("page 3 has two owners")
        stage.die()
        await rig.until_said("stage 1 of the pool died")
        successor = FakeStage(stub)
        await successor.hello(1)  # a pool that forms again used to serve again
        await successor.forms()
        await rig.until_warm_again(warmed)
        assert not rig.leader.serving
        async with asyncio.timeout(60):
            with pytest.raises(
                UnavailableError,
                match="cannot continue: the pool is unhealthy: page 3 has two owners",
            ):
                await leader_server._watch_engine(rig.leader)
        assert [type(error) for error in rig.handed_back] == [UnavailableError], (
            "its routers move them elsewhere"
        )


async def test_a_hung_engine_hands_its_requests_back_and_ends_its_process() -> None:
    gate = threading.Event()
    async with leading(1, step_limit_s=1.0) as rig:
        await rig.until_serving()
        rig.leader.loop.step_limit.observe(0.01)  # one was measured
        rig.leader.loop.post(lambda: gate.wait(240))
        try:
            async with asyncio.timeout(30):
                with pytest.raises(
                    UnavailableError, match="has been in one step for more than 1 s"
                ):
                    await leader_server._watch_engine(rig.leader)
            assert not rig.leader.serving
            assert [type(error) for error in rig.handed_back] == [UnavailableError], (
                "its routers move them elsewhere"
            )
            async with asyncio.timeout(9):  # it would give the thread ten
                await asyncio.to_thread(rig.leader.stop)  # it does not wait for what never ends
        finally:
            gate.set()
            rig.leader.loop.stop()


async def test_a_warm_up_that_fails_is_tried_again() -> None:
    errors = [
        CapacityError("8 requests hold memory", resource="held requests"),
        PeerLostError("gone"),
    ]

    async def warm_up() -> None:
        if errors:
            raise errors.pop(0)

    async with leading(1, warm_up) as rig:
        await rig.until_serving()
        assert [reason for reason in rig.serving if reason] == [
            "warm-up failed: 8 requests hold memory",
            "warm-up failed: gone",
        ]

"""A stage that loses its leader, or its own footing: over real gRPC, with a real transfer agent and
engine thread."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from engine.core.request import ProblemCause, Request, SamplingParams
from engine.core.rows import sampling_row
from engine.pipeline.ranks import StageRanks
from engine.sampling.guided import GuidedSampler
from models.weights_digest import StageDigests
from pool.pipeline import follower as follower_module
from pool.pipeline.follower import Follower
from pool.pipeline.follower_engine import FollowerEngine
from pool.pipeline.join import JoinReports
from pool.pipeline.membership import PipelineService, StageLink
from pool.pipeline.stage_channel import PoolChannel
from pool.stage.config import WorkerConfig
from pool.stage.stage import Stage
from pool.stage.tiers import StageTiers
from protos import pipeline_pb2 as pb
from protos import pipeline_pb2_grpc
from runtime.clock import SystemClock
from runtime.errors import DeadlineError, PeerLostError
from runtime.observe.exposition import new_registry
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.security.access import PLAIN_CHANNEL
from testing.memory_transport import Fault, MemoryNetwork, MemoryTransport
from tests.pool.pipeline.test_membership import Observer
from tests.support.pool.formings import forming_of
from tests.support.transfer.handoff import Pool, hybrid_specs
from transfer.agent.agent import AgentLimits, AgentStats, TransferAgent
from transfer.plan.handoff_terms import StageSessionEvent, StageSessionState
from transfer.transport.forming import Forming

SPECS = hybrid_specs(2)


class ScriptedChannel:
    """The batch channel of a stage. `step` is the engine's work between two polls of its
    commands."""

    parts = None

    def __init__(self) -> None:
        self.num_formings = 0
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.step: Callable[[], None] = lambda: None
        self._woken = threading.Event()

    def connect(self, addresses: list[bytes], forming: Forming) -> None:
        self.num_formings += 1
        self.may_connect.wait(60)

    def wake(self) -> None:
        self._woken.set()

    def receive(self, rank: int, *, timeout_s: float) -> None:
        self.step()
        self._woken.wait(0.01)
        self._woken.clear()


class WatchingLeader(Observer):
    """A leader that records the state of its stage's agent at each formation."""

    agent: TransferAgent
    stats: list[AgentStats]

    def pool_formed(self, forming: Forming, links: list[StageLink]) -> None:
        self.stats.append(self.agent.stats())
        super().pool_formed(forming, links)


@dataclass
class Rig:
    leader: WatchingLeader
    network: MemoryNetwork
    channel: ScriptedChannel
    pool: Pool
    joining: asyncio.Task[None]
    reports: JoinReports
    server: GrpcServer
    service: PipelineService
    address: str

    async def end_leader(self) -> None:
        """End the leader as a dead process would, without its state of the pool."""
        await self.server.stop()

    async def start_leader(self) -> None:
        """Start another leader at the same address."""
        self.server, self.service = leader_server(self.leader, self.pool, self.address)
        await self.server.start()

    @property
    def agent(self) -> TransferAgent:
        return self.pool.stages[0].agent

    @property
    def transport(self) -> MemoryTransport:
        return cast(MemoryTransport, self.agent._transport)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - what is waited for happens on other threads
                await asyncio.sleep(0.005)


def leader_server(
    leader: WatchingLeader, pool: Pool, listen: str
) -> tuple[GrpcServer, PipelineService]:
    layers = pool.stages[0].memory.geometry.layers
    server = GrpcServer(
        ServerOptions(listen),
        services=(),
        metrics=RpcMetrics.create(new_registry(role="test", version="0")),
        background_methods=frozenset({"/baton.v1.Pipeline/Join"}),
    )
    service = PipelineService(
        layers=[layers, layers],
        settings={},
        counted={},
        leader_channel=b"0",
        incarnation="leader",
        observer=leader,
        check_channels=lambda addresses: None,
    )
    pipeline_pb2_grpc.add_PipelineServicer_to_server(service, server.grpc)
    return server, service


@asynccontextmanager
async def joined() -> AsyncIterator[Rig]:
    """Join stage 1 of a pool of two."""
    network, channel = MemoryNetwork(), ScriptedChannel()
    pool = Pool("decode", [network.transport(SystemClock())], SPECS, limits=AgentLimits(drain_s=60))
    agent = pool.stages[0].agent
    leader = WatchingLeader()
    leader.agent, leader.stats = agent, []
    server, service = leader_server(leader, pool, "127.0.0.1:0")
    address = await server.start()
    config = cast(WorkerConfig, SimpleNamespace(leader=address, rank=1))
    stage = cast(
        Stage,
        SimpleNamespace(
            agent=agent,
            plan=SimpleNamespace(settings={}),
            executor=None,
            weights=StageDigests("0" * 32),
            drafter=None,
            ranks=StageRanks(),
            adapters=None,
            tiers=StageTiers(),
        ),
    )
    engine = FollowerEngine(
        stage,
        GuidedSampler(None),
        cast(PoolChannel, channel),
        rank=1,
        size=2,
        on_step=lambda seconds, batch: None,
    )
    engine.start()
    reports = JoinReports(asyncio.get_running_loop())
    follower = Follower(config, stage, engine, b"1", PLAIN_CHANNEL, reports)
    joining = asyncio.create_task(follower.run(lambda serving: None))
    rig = Rig(leader, network, channel, pool, joining, reports, server, service, address)
    try:
        await leader.until("formed 1")
        await rig.until(lambda: channel.num_formings == 1)
        yield rig
    finally:
        network.release()
        joining.cancel()
        with suppress(asyncio.CancelledError, DeadlineError):
            await joining
        engine.stop()
        await rig.server.stop()
        pool.shutdown()


async def test_a_stage_joins_again_only_when_its_old_receives_can_write_no_more() -> None:
    async with joined() as rig:
        sources = [
            Pool(name, [rig.network.transport(SystemClock())], SPECS) for name in ("old", "new")
        ]
        for source, fill in zip(sources, (0xAA, 0x55), strict=True):
            for array in source.stages[0].memory.arrays.values():
                array[:] = fill
        rig.network.fault = lambda tag, num_bytes: Fault.DELAY
        terms = sources[0].terms([3], 4)
        destination = rig.pool.destination(terms, [5], session_id="old", nonce=1)
        rig.pool.open_receive(terms, destination)
        sources[0].send(terms, destination)
        await rig.until(lambda: len(rig.transport._delayed) > 0)
        rig.network.fault = None
        rig.leader.links[0].dismiss()  # it gives page 5 to another request
        await rig.leader.until("lost 1")
        await asyncio.sleep(3 * follower_module.REJOIN_MIN_S)
        assert "formed 2" not in rig.leader.log, "a late write could land in another request's page"
        rig.network.release()
        await rig.leader.until("formed 2")
        assert rig.leader.stats[1].num_open == rig.leader.stats[1].num_draining == 0
        terms = sources[1].terms([3], 4)
        destination = rig.pool.destination(terms, [5], session_id="new", nonce=2)
        rig.pool.open_receive(terms, destination)
        sources[1].send(terms, destination)
        rig.pool.wait("new", StageSessionState.COMPLETE)
        for (_, kind), array in rig.pool.stages[0].memory.arrays.items():
            assert (array[5 if kind.is_paged else 1] == 0x55).all()
        for source in sources:
            source.shutdown()


async def test_layers_of_a_lost_leaders_step_are_dropped_before_the_next_leader() -> None:
    async with joined() as rig:
        running, gate = threading.Event(), threading.Event()

        def first_chunk() -> None:
            running.set()
            gate.wait(60)
            rig.agent.expect_send(7)
            rig.agent.layer_done(7, 0, 8)

        rig.channel.step = first_chunk
        await rig.until(running.is_set)
        rig.leader.links[0].dismiss()
        await rig.leader.until("lost 1")
        await asyncio.sleep(3 * follower_module.REJOIN_MIN_S)
        assert "formed 2" not in rig.leader.log, "the step of the time before still runs"
        gate.set()
        await rig.leader.until("formed 2")
        assert rig.leader.stats[1].num_prompts == 0


async def test_a_stage_that_cannot_release_its_memory_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower_module, "SETTLE_S", 0.1)
    async with joined() as rig:
        running, gate = threading.Event(), threading.Event()

        def hang() -> None:
            running.set()
            gate.wait(60)

        rig.channel.step = hang
        await rig.until(running.is_set)
        rig.leader.links[0].dismiss()
        with pytest.raises(DeadlineError, match="cannot join again"):
            await asyncio.wait_for(rig.joining, 60)
        gate.set()


def test_state_of_requests_ends_with_their_leader() -> None:
    """Another one counts its requests from 1 again, too."""
    sampler, stage = (
        GuidedSampler(None),
        cast(Stage, SimpleNamespace(executor=None, drafter=None, ranks=StageRanks())),
    )
    engine = FollowerEngine(
        stage,
        sampler,
        cast(PoolChannel, ScriptedChannel()),
        rank=1,
        size=2,
        on_step=lambda seconds, batch: None,
    )
    request = Request("r", (1, 2), 4, SamplingParams(frequency_penalty=1))
    sampler(torch.zeros(1, 8), [sampling_row(request, (3,), key=1, is_only=False)])
    engine._connect([], forming_of(1, 2))
    (token,) = sampler(
        torch.zeros(1, 8), [sampling_row(request, (3, 4), key=1, known=1, is_only=False)]
    )
    assert token.cause is ProblemCause.DEFECT


async def test_a_stage_reports_ready_when_its_channel_is_connected() -> None:
    async with joined() as rig:
        await rig.leader.until("ready 1")
        rig.channel.may_connect.clear()
        rig.leader.links[0].dismiss()
        await rig.leader.until("formed 2")
        await rig.until(lambda: rig.channel.num_formings == 2)
        assert "ready 2" not in rig.leader.log
        rig.channel.may_connect.set()
        await rig.leader.until("ready 2")


async def test_an_engine_error_makes_the_pool_form_again() -> None:
    async with joined() as rig:

        def fail() -> None:
            rig.channel.step = lambda: None
            raise IndexError("index out of range in self")

        rig.channel.step = fail
        await rig.leader.until("lost 1")
        await rig.leader.until("formed 2")
        await rig.until(lambda: rig.channel.num_formings == 2)


async def formed_again(rig: Rig, count: int) -> None:
    """Dismiss the stage `count` times; it rejoins each time."""
    for _ in range(count):
        formings = rig.channel.num_formings
        rig.leader.links[0].dismiss()
        await rig.until(lambda before=formings: rig.channel.num_formings == before + 1)  # type: ignore[misc]


async def test_joining_again_leaks_no_task() -> None:
    async with joined() as rig:
        await formed_again(rig, 1)
        before = len(asyncio.all_tasks())
        await formed_again(rig, 4)
        await rig.until(lambda: len(asyncio.all_tasks()) <= before)


@pytest.mark.parametrize(
    "error", [ValueError("no such session"), asyncio.QueueFull(), PeerLostError("gone")]
)
async def test_the_stage_joins_again_after_any_end_of_the_stream(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined() as rig:

        def fail(session_id: str) -> None:
            raise error

        monkeypatch.setattr(rig.agent, "close", fail)
        rig.leader.links[0].send(close_session=pb.CloseSession(session_id="any"))
        await rig.leader.until("lost 1")
        await rig.leader.until("formed 2")
        assert not rig.joining.done()


async def test_a_leader_that_leaves_reports_unread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined() as rig:
        stream = rig.reports.stream
        assert stream is not None
        monkeypatch.setattr(stream, "_outbox", asyncio.Queue(1))  # which the writer does not read
        for _ in range(2):
            rig.reports.report(StageSessionEvent("s", 1, StageSessionState.COMPLETE))
        await rig.leader.until("lost 1")
        await rig.leader.until("formed 2")


async def test_a_restarted_leader_is_joined_without_a_pause() -> None:
    """This holds for any downtime. An attempt during a stall of the machine does not count."""
    waits_s = []
    for _ in range(6):
        async with joined() as rig:
            await rig.end_leader()
            await asyncio.sleep(3.2)  # pauses that grow to 2 s would now be that long
            await rig.start_leader()
            began_s = time.monotonic()
            await rig.until(lambda channel=rig.channel: channel.num_formings == 2)  # type: ignore[misc]
            waits_s.append(time.monotonic() - began_s)
        if waits_s[-1] < 1.0:
            break
    assert min(waits_s) < 1.0


@pytest.mark.parametrize(
    ("stands_in", "why"),
    [(False, "connection refused"), (True, "it accepts the connection but sends nothing")],
)
async def test_a_leader_that_cannot_be_reached_is_reported_with_the_reason(
    stands_in: bool,  # noqa: FBT001
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where something else listens there; and it is joined as soon as it is back."""
    monkeypatch.setattr("pool.pipeline.follower.REPORT_S", 0.1)
    async with joined() as rig:
        await rig.end_leader()
        with ExitStack() as stack:
            if stands_in:
                stack.enter_context(
                    socket.create_server(("127.0.0.1", int(rig.address.rpartition(":")[2])))
                )
            said = f"the leader {rig.address} cannot be reached: {rig.address}: {why}"
            await rig.until(lambda: said in caplog.messages)
        await rig.start_leader()
        await rig.until(lambda: rig.channel.num_formings == 2)


async def test_a_stage_reports_finished_epochs_to_the_next_leader() -> None:
    async with joined() as rig:
        rig.service._epoch = 0  # as of a leader that has just started
        rig.leader.links[0].dismiss()
        await rig.leader.until("formed 2")
        assert rig.leader.epochs[1] > rig.leader.epochs[0]

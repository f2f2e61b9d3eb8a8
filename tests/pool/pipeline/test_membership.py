"""Joining a pool over real gRPC: forming, refusing, losing and replacing a stage."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from engine.core.layer_range import LayerRange
from models.weights_digest import StageDigests
from pool.pipeline import membership
from pool.pipeline.forming import forming_from_proto
from pool.pipeline.membership import PipelineService, StageLink, weights_to_proto
from protos import pipeline_pb2 as pb
from protos import pipeline_pb2_grpc
from runtime.errors import ConfigError, InvalidRequestError
from runtime.observe.exposition import new_registry
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.client import open_channel
from runtime.rpc.server import GrpcServer, ServerOptions
from transfer.plan import codec
from transfer.plan.handoff_terms import StageEndpoint, StageSessionEvent, StageSessionState
from transfer.transport.forming import Forming

RANGES = [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 7)]
SETTINGS = {"numerics": "exact", "page_size": "64"}
COUNTED = {"embed_tokens.weight": "a" * 32}
WEIGHTS = StageDigests("1" * 32, {"embed_tokens.weight": "a" * 32})


@dataclass
class Observer:
    log: list[str] = field(default_factory=list)
    links: list[StageLink] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def pool_formed(self, forming: Forming, links: list[StageLink]) -> None:
        self.epochs.append(forming.epoch)
        self.log.append(f"formed {len(self.epochs)}")
        self.links = links

    def pool_ready(self, forming: Forming) -> None:
        self.log.append(f"ready {len(self.epochs)}")

    def stage_lost(self, rank: int) -> None:
        self.log.append(f"lost {rank}")

    def stage_event(self, rank: int, event: StageSessionEvent) -> None:
        self.log.append(f"{rank} says {event.session_id} {event.state}")

    def stage_answered(self, rank: int, answer: pb.JoinRequest) -> None: ...

    def stage_leaving(self, link: StageLink, grace_s: float) -> None:
        self.log.append(f"leaving {link.rank} in {grace_s:g} s")
        self.leaving = link

    async def until(self, entry: str) -> None:
        async with asyncio.timeout(60):
            while entry not in self.log:  # noqa: ASYNC110 - a list has no event to wait for
                await asyncio.sleep(0.01)


class FakeStage:
    """A stage as the leader sees it: one Join stream."""

    def __init__(self, stub: pipeline_pb2_grpc.PipelineStub) -> None:
        join: Any = stub.Join  # typed for a request iterator, used by writing
        self._call = join()

    async def hello(
        self,
        rank: int,
        *,
        layers: LayerRange | None = None,
        numerics: str = "exact",
        weights: StageDigests = WEIGHTS,
        channel: str = "channel",
        pool_epoch: int = 0,
    ) -> None:
        endpoint = StageEndpoint(layers or RANGES[rank], b"ucx", f"life-{rank}")
        await self.send(
            pb.JoinRequest(
                hello=pb.StageHello(
                    rank=rank,
                    endpoint=codec.endpoint_to_proto(endpoint),
                    channel_address=f"{channel}-{rank}".encode(),
                    settings={**SETTINGS, "numerics": numerics},
                    weights=weights_to_proto(weights),
                    pool_epoch=pool_epoch,
                )
            )
        )

    async def send(self, request: pb.JoinRequest) -> None:
        await self._call.write(request)

    async def read(self) -> pb.JoinResponse:
        response = await asyncio.wait_for(self._call.read(), 60)
        assert isinstance(response, pb.JoinResponse), "the stream has ended"
        return response

    async def forms(self) -> pb.PoolFormed:
        """Return the message of the pool's formation and report ready."""
        formed = (await self.read()).formed
        assert formed.key, "told something else"
        await self.send(pb.JoinRequest(ready=pb.StageReady(session=formed.session)))
        return formed

    async def hears_goodbye(self) -> bool:
        """Return whether the stream ended with OK."""
        ended = await asyncio.wait_for(self._call.read(), 60) is grpc.aio.EOF
        return ended and await self._call.code() is grpc.StatusCode.OK

    async def closes(self) -> None:
        """Close the sending side and keep reading."""
        await self._call.done_writing()

    def die(self) -> None:
        self._call.cancel()


def check_channels(addresses: Sequence[bytes]) -> None:
    if any(address.startswith(b"foreign") for address in addresses):
        raise ConfigError(f"of {len(addresses)} channels one is foreign", field="stage_channel")


@asynccontextmanager
async def leader() -> AsyncIterator[tuple[Observer, pipeline_pb2_grpc.PipelineStub]]:
    observer = Observer()
    server = GrpcServer(
        ServerOptions("127.0.0.1:0"),
        services=(),
        metrics=RpcMetrics.create(new_registry(role="test", version="0")),
        background_methods=frozenset({"/baton.v1.Pipeline/Join"}),
    )
    service = PipelineService(
        layers=RANGES,
        settings=SETTINGS,
        counted=COUNTED,
        leader_channel=b"channel-0",
        incarnation="life-0",
        observer=observer,
        check_channels=check_channels,
    )
    pipeline_pb2_grpc.add_PipelineServicer_to_server(service, server.grpc)
    address = await server.start()
    async with open_channel(address) as channel:
        yield observer, pipeline_pb2_grpc.PipelineStub(channel)
    await server.drain(grace_s=0.1)


async def test_a_pool_forms_when_the_last_stage_joins_and_again_after_a_loss() -> None:
    async with leader() as (observer, stub):
        first, second = FakeStage(stub), FakeStage(stub)
        await second.hello(2)
        await first.hello(1)
        formed = await first.read()
        assert list(formed.formed.channel_addresses) == [b"channel-0", b"channel-1", b"channel-2"]
        assert formed.formed.pool_epoch == observer.epochs[0]
        assert [link.rank for link in observer.links] == [1, 2]
        second.die()
        await observer.until("lost 2")
        successor = FakeStage(stub)
        await successor.hello(2)
        assert (await successor.read()).formed.pool_epoch == (await first.read()).formed.pool_epoch
        assert observer.epochs[1] > observer.epochs[0]
        assert observer.log == ["formed 1", "lost 2", "formed 2"]


async def test_nothing_is_sent_before_every_member_is_ready() -> None:
    """What is said about another forming, or said twice, does not count."""
    async with leader() as (observer, stub):
        first, second = FakeStage(stub), FakeStage(stub)
        await first.hello(1)
        await second.hello(2)
        formed = await first.forms()
        for session in (0, formed.session + 1, formed.session):
            await first.send(pb.JoinRequest(ready=pb.StageReady(session=session)))
        await first.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=9)))
        await observer.until("leaving 1 in 9 s")
        assert observer.log == ["formed 1", "leaving 1 in 9 s"]
        await second.forms()
        await observer.until("ready 1")


async def test_a_member_that_is_lost_meanwhile_was_ready_for_nothing() -> None:
    async with leader() as (observer, stub):
        first, second, successor = FakeStage(stub), FakeStage(stub), FakeStage(stub)
        await first.hello(1)
        await second.hello(2)
        before = await first.forms()
        second.die()
        await observer.until("lost 2")
        await successor.hello(2)
        formed = await successor.forms()
        await first.send(pb.JoinRequest(ready=pb.StageReady(session=before.session)))
        await first.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=9)))
        await observer.until("leaving 1 in 9 s")
        assert "ready 2" not in observer.log
        assert (await first.forms()).session == formed.session
        await observer.until("ready 2")
        assert "ready 1" not in observer.log


async def test_a_member_that_does_not_become_ready_has_to_join_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "READY_TIMEOUT_S", 0.2)
    async with leader() as (observer, stub):
        first, second = FakeStage(stub), FakeStage(stub)
        await first.hello(1)
        await second.hello(2)
        await first.forms()
        await second.read()
        assert await second.hears_goodbye()
        await observer.until("lost 2")
        assert "lost 1" not in observer.log


async def test_every_formation_has_its_own_key_and_session_and_lists_members() -> None:
    async with leader() as (observer, stub):
        first, second, successor = FakeStage(stub), FakeStage(stub), FakeStage(stub)
        await first.hello(1)
        await second.hello(2)
        one, same = await first.forms(), await second.forms()
        second.die()
        await observer.until("lost 2")
        await successor.hello(2)
        two = await first.forms()
        assert (one.key, one.session) == (same.key, same.session)
        assert len({one.key, two.key}) == len({one.session, two.session}) == 2
        assert {len(one.key), len(two.key)} == {32}
        assert list(one.members) == ["life-0", "life-1", "life-2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": b"k" * 31}, "formed.key"),
        ({"members": ["a", "b"]}, "formed.members must be as many"),
        ({"members": ["a", "c", "b"]}, "formed.members must name this process, b, as rank 1"),
    ],
)
def test_a_forming_of_other_processes_is_refused(change: dict[str, object], message: str) -> None:
    formed = {
        "pool_epoch": 1,
        "channel_addresses": [b"", b"", b""],
        "key": b"k" * 32,
        "session": 5,
        "members": ["a", "b", "c"],
    }
    assert forming_from_proto(pb.PoolFormed(**formed), rank=1, incarnation="b").session == 5  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as refused:
        forming_from_proto(pb.PoolFormed(**formed | change), rank=1, incarnation="b")  # type: ignore[arg-type]
    assert (
        message in f"{refused.value.violations[0].field} {refused.value.violations[0].description}"
    )


async def test_a_new_leader_uses_a_higher_epoch_than_its_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages refuse an epoch that is not above their own: a slow clock would keep the pool from
    forming."""
    monkeypatch.setattr(time, "time", lambda: 1.0)
    async with leader() as (observer, stub):
        first, second = FakeStage(stub), FakeStage(stub)
        seen = 1_800_000_000_000  # as leaders before this one gave them
        await first.hello(1, pool_epoch=seen)
        await second.hello(2, pool_epoch=seen - 7)
        assert (
            (await first.read()).formed.pool_epoch == (await second.read()).formed.pool_epoch > seen
        )
        second.die()
        await observer.until("lost 2")
        successor = FakeStage(stub)
        await successor.hello(2)
        await successor.read()
        assert observer.epochs[1] > observer.epochs[0]


async def test_an_epoch_that_no_forming_gave_is_refused_by_name() -> None:
    async with leader() as (_, stub):
        stage = FakeStage(stub)
        await stage.hello(1, pool_epoch=membership.MAX_EPOCH + 1)
        with pytest.raises(grpc.aio.AioRpcError, match="pool_epoch must be at most"):
            await stage.read()


async def test_a_leaving_stage_gets_all_earlier_commands_and_a_goodbye() -> None:
    async with leader() as (observer, stub):
        first, second = FakeStage(stub), FakeStage(stub)
        await first.hello(1)
        await second.hello(2)
        await second.read()
        await second.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=2)))
        await observer.until("leaving 2 in 2 s")
        assert "lost 2" not in observer.log
        observer.leaving.send(close_session=pb.CloseSession(session_id="last words"))
        observer.leaving.dismiss()
        assert (await second.read()).close_session.session_id == "last words"
        assert await second.hears_goodbye()
        await observer.until("lost 2")


async def test_a_stage_that_rejoins_early_replaces_its_old_stream() -> None:
    async with leader() as (observer, stub):
        first, second, again = FakeStage(stub), FakeStage(stub), FakeStage(stub)
        await first.hello(1)
        await second.hello(2)
        await observer.until("formed 1")
        await again.hello(2)
        await observer.until("formed 2")
        assert observer.log == ["formed 1", "lost 2", "formed 2"]
        second.die()
        await asyncio.sleep(0.1)
        assert observer.log[-1] == "formed 2", "the old stream's end is no news"


async def test_a_stage_that_dies_leaks_no_task() -> None:
    async with leader() as (observer, stub):
        stage = FakeStage(stub)
        await stage.hello(1)
        await stage.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=9)))
        await observer.until("leaving 1 in 9 s")
        stage.die()
        await observer.until("lost 1")
        async with asyncio.timeout(60):
            while [task for task in asyncio.all_tasks() if "Queue.get" in repr(task.get_coro())]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_stream_that_ends_without_a_hello_gets_an_error() -> None:
    async with leader() as (observer, stub):
        stage = FakeStage(stub)
        await stage.closes()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stage.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert observer.log == []


async def test_session_reports_reach_the_observer() -> None:
    async with leader() as (observer, stub):
        stage = FakeStage(stub)
        await stage.hello(1)
        event = StageSessionEvent("abc", 0, StageSessionState.COMPLETE, num_bytes=9)
        await stage.send(pb.JoinRequest(session=codec.event_to_proto(event)))
        await observer.until("1 says abc complete")


async def test_commands_reach_the_stage_in_order() -> None:
    async with leader() as (observer, stub):
        first, second = FakeStage(stub), FakeStage(stub)
        await first.hello(1)
        await second.hello(2)
        await observer.until("formed 1")
        for i in range(3):
            observer.links[0].send(close_session=pb.CloseSession(session_id=str(i)))
        await first.read()
        assert [(await first.read()).close_session.session_id for _ in range(3)] == ["0", "1", "2"]


async def test_a_stage_that_reads_nothing_is_lost_and_others_lose_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What gives memory back must reach every stage that keeps its memory."""
    monkeypatch.setattr(membership, "OUTBOX_LIMIT", 8)
    async with leader() as (observer, stub):
        deaf, second = FakeStage(stub), FakeStage(stub)
        await deaf.hello(1)
        await second.hello(2)
        await observer.until("formed 1")
        async with asyncio.timeout(60):
            while "lost 1" not in observer.log:
                observer.links[0].send(close_session=pb.CloseSession(session_id="s" * (1 << 20)))
                await asyncio.sleep(0.005)
        await second.read()
        observer.links[1].send(close_session=pb.CloseSession(session_id="last"))
        assert (await second.read()).close_session.session_id == "last"
        assert "lost 2" not in observer.log


@pytest.mark.parametrize(
    ("rank", "layers", "numerics", "weights", "message"),
    [
        (
            1,
            LayerRange(2, 5),
            "exact",
            WEIGHTS,
            "rank 1 owns layers 2-5, this pool's partition gives it 2-4",
        ),
        (3, LayerRange(4, 7), "exact", WEIGHTS, "rank 3 is outside 1..2"),
        (1, None, "fast", WEIGHTS, "numerics is exact here, fast there"),
        (
            1,
            LayerRange(2, 5),
            "fast",
            WEIGHTS,
            "the stages differ: numerics is exact here, fast there",
        ),
        (
            1,
            None,
            "exact",
            replace(WEIGHTS, copies={"embed_tokens.weight": "b" * 32}),
            "stage 1 has read a different embed_tokens.weight than stage 0",
        ),
    ],
)
async def test_an_incompatible_stage_gets_the_reason(
    rank: int, layers: LayerRange | None, numerics: str, weights: StageDigests, message: str
) -> None:
    async with leader() as (observer, stub):
        stage = FakeStage(stub)
        await stage.hello(rank, layers=layers, numerics=numerics, weights=weights)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stage.read()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert message in (refused.value.details() or "")
        assert observer.log == []


async def test_a_stage_with_a_different_channel_is_refused_with_the_reason() -> None:
    async with leader() as (observer, stub):
        await FakeStage(stub).hello(2)
        stage = FakeStage(stub)
        await stage.hello(1, channel="foreign")
        with pytest.raises(grpc.aio.AioRpcError, match="of 3 channels one is foreign"):
            await stage.read()
        await FakeStage(stub).hello(1)
        await observer.until("formed 1")

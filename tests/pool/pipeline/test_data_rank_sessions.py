"""Sessions of a pool with data ranks: only the processes of the request's rank take part."""

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from engine.core.layer_range import LayerRange, Placement
from models.weights_digest import StageDigests
from pool.pipeline.group import StageGroup
from pool.pipeline.membership import StageLink
from pool.pipeline.session_reports import SessionReports
from protos import pipeline_pb2 as pb
from runtime.clock import SystemClock
from runtime.errors import IncompatiblePeerError
from transfer.agent.agent import TransferAgent
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
    StageSessionEvent,
    StageSessionState,
)
from transfer.session import ReceiveSession, SendSession
from transfer.session_states import ReceiveState
from transfer.transport.authenticator import new_key

PLACES = [Placement.of(rank, 8, 4, 2) for rank in range(8)]
SOURCE = SourceTerms("", "", 4, 4, 4, (1,), 0, ())


def endpoint(rank: int) -> StageEndpoint:
    place = PLACES[rank]
    return StageEndpoint(
        LayerRange(place.pipeline_rank, place.pipeline_rank + 1),
        b"%d" % rank,
        f"i{rank}",
        place.tensor.attention,
    )


class NotingAgent:
    def __init__(self) -> None:
        self.endpoint = endpoint(0)
        self.calls: list[str] = []

    def open_receive(self, source: SourceTerms, destination: DestinationTerms) -> None:
        self.calls.append(destination.session_id)


async def test_only_the_processes_of_its_data_rank_take_part_in_a_session() -> None:
    agent, reports = NotingAgent(), SessionReports(asyncio.get_running_loop())
    group = StageGroup(cast(TransferAgent, agent), PLACES, reports)
    links = [StageLink(rank, endpoint(rank), b"", StageDigests("0" * 32)) for rank in range(1, 8)]
    group.pool_formed(links)
    assert group.session_size == 4
    assert [each.address for each in group.endpoints(1)] == [b"2", b"3", b"6", b"7"]
    assert all(group.includes(group.endpoints(data_rank)) for data_rank in (0, 1))
    assert not group.includes([replace(endpoint(0), incarnation="of another pool")])
    session = ReceiveSession("s", num_stages=group.session_size, clock=SystemClock())
    destination = DestinationTerms("s", 0, 0, (1,), 0, group.endpoints(1), "", new_key())
    group.open_receive(SOURCE, destination, session, lambda: None, 1)
    assert agent.calls == []
    opened = [link.rank for link in links if not link.window.empty()]
    assert opened == [2, 3, 6, 7]
    assert all(isinstance(links[rank - 1].window.get_nowait(), pb.JoinResponse) for rank in opened)
    for rank in range(8):
        reports.deliver(rank, StageSessionEvent("s", 0, StageSessionState.OPEN))
    assert session.state is ReceiveState.RECEIVING
    group.open_receive(
        SOURCE,
        DestinationTerms("t", 0, 0, (1,), 0, group.endpoints(0), "", new_key()),
        ReceiveSession("t", num_stages=4, clock=SystemClock()),
        lambda: None,
        0,
    )
    assert agent.calls == ["t"]


async def test_a_session_is_open_once_in_a_pool() -> None:
    """Otherwise the reports of one would be taken for those of the other, and neither would drain."""
    reports = SessionReports(asyncio.get_running_loop())
    clock = SystemClock()
    reports.watch(ReceiveSession("s", num_stages=1, clock=clock), lambda: None)
    for epoch in (0, 1):
        with pytest.raises(IncompatiblePeerError, match="session_id is that of an open session"):
            reports.watch(SendSession("s", epoch=epoch, num_stages=1, clock=clock), lambda: None)
    for epoch in (0, 1):  # the older one may still drain
        reports.watch(SendSession("t", epoch=epoch, num_stages=1, clock=clock), lambda: None)
    with pytest.raises(IncompatiblePeerError, match="session_id is that of an open session"):
        reports.watch(SendSession("t", epoch=1, num_stages=1, clock=clock), lambda: None)
    assert reports.num_watched == 3

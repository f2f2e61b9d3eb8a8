"""A prefill worker dies after sending every byte but before its first token: the request still
completes.

The three roles run in this process, so that the worker can be made to die between the two.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pool.request.router_call import Opening
from pool.request.streams import EventSender
from prefill import worker
from prefill.service import PrefillService
from protos import prefill_pb2 as pb
from runtime.errors import PeerLostError
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from transfer.plan.handoff_terms import StageSessionEvent
from transfer.session import ReceiveSession
from transfer.session_states import ReceiveState

hear = ReceiveSession.on_stage_event


class DyingEventSender(EventSender[pb.PrefillEvent]):
    """A sender that sends the start of the prompt and drops all later events."""

    def __init__(self, event_sender: EventSender[pb.PrefillEvent]) -> None:
        super().__init__(event_sender._queue, event_sender.key)
        self.has_sent = asyncio.Event()

    def send(self, event: pb.PrefillEvent, weight: int = 1) -> None:
        if event.HasField("started"):
            super().send(event, weight)
        elif event.HasField("sent"):
            self.has_sent.set()


class DyingService(PrefillService):
    """A service that, once armed, drops the first token of the next request and dies when decode
    has all the rest."""

    is_armed = False
    has_died = False
    has_landed = asyncio.Event()

    @classmethod
    def arm(cls) -> None:
        cls.is_armed, cls.has_died = True, False
        cls.has_landed.clear()

    async def _run(self, opening: Opening[pb.PrefillInput, pb.PrefillEvent]) -> None:
        dies, DyingService.is_armed = DyingService.is_armed, False
        if not dies:
            await super()._run(opening)
            return
        event_sender = DyingEventSender(opening.event_sender)
        running = asyncio.create_task(super()._run(replace(opening, event_sender=event_sender)))
        try:
            await event_sender.has_sent.wait()
            await DyingService.has_landed.wait()
        finally:
            running.cancel()
            await asyncio.wait({running})
        DyingService.has_died = True
        raise PeerLostError("the worker died")


def hear_and_note(session: ReceiveSession, rank: int, event: StageSessionEvent) -> ReceiveState:
    state = hear(session, rank, event)
    if state is ReceiveState.COMPLETE:
        DyingService.has_landed.set()
    return state


async def test_a_prompt_whose_source_dies_before_its_report_is_sent_again(
    checkpoint: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    (question,) = make_questions(1, seed=31)
    right = on_the_wire(reference.answers([question]))[0]
    monkeypatch.setattr(worker, "PrefillService", DyingService)
    monkeypatch.setattr(ReceiveSession, "on_stage_event", hear_and_note)
    async with cluster_in_process(checkpoint, decode_pp=2) as client:
        DyingService.arm()
        assert shown(await client.complete(as_query(question), timeout_s=60)) == right
        assert DyingService.has_died

"""A prefill worker dies with every byte sent and its first token untold: the request is answered all the same.

The three roles run in this process, so that the worker can be made to die between the two.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import cast

import pytest

from prefill import worker
from prefill.service import Context, PrefillService
from protos import prefill_pb2 as pb
from runtime.errors import PeerLostError
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from transfer.plan.handoff_terms import StageSessionEvent
from transfer.session import ReceiveSession, ReceiveState

hear = ReceiveSession.on_stage_event


class DyingService(PrefillService):
    """Once armed, it keeps the first token of the next request to itself and dies when decode has all the rest."""

    is_armed = False
    has_died = False
    has_landed = asyncio.Event()

    @classmethod
    def arm(cls) -> None:
        cls.is_armed, cls.has_died = True, False
        cls.has_landed.clear()

    async def Run(self, request_iterator: AsyncIterator[pb.RunRequest],
                  context: Context) -> AsyncIterator[pb.RunResponse]:
        dies, DyingService.is_armed = DyingService.is_armed, False
        run = cast("AsyncGenerator[pb.RunResponse]", super().Run(request_iterator, context))
        async with aclosing(run) as responses:
            async for response in responses:
                if not dies or response.HasField("started"):
                    yield response
                elif response.HasField("sent"):
                    await DyingService.has_landed.wait()
                    DyingService.has_died = True
                    raise PeerLostError("the worker died")


def hear_and_note(session: ReceiveSession, rank: int, event: StageSessionEvent) -> ReceiveState:
    state = hear(session, rank, event)
    if state is ReceiveState.COMPLETE:
        DyingService.has_landed.set()
    return state


async def test_a_prompt_that_landed_without_a_word_is_computed_and_delivered_again(
        checkpoint: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    (question,) = make_questions(1, seed=31)
    right = on_the_wire(reference.answers([question]))[0]
    monkeypatch.setattr(worker, "PrefillService", DyingService)
    monkeypatch.setattr(ReceiveSession, "on_stage_event", hear_and_note)
    async with cluster_in_process(checkpoint, decode_pp=2) as client:
        DyingService.arm()
        assert shown(await client.complete(as_query(question), timeout_s=60)) == right
        assert DyingService.has_died

"""One of thousands of transfers loses its bytes: the others go on, and its prompt is computed."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.client import AsyncBatonClient
from engine.core.request import Request, SamplingParams
from engine.memory.layout import Buffer
from pool.pipeline.group import StageGroup
from pool.prefix.block_reads import MAX_READS
from pool.pulls import puller
from tests.support.cluster.leaders import flush
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms
from transfer.session import SendSession
from transfer.transport.protocol import Operation, Peer, tag_prefix
from transfer.ucx.transport import UcxTransport

PAGE = 16
NUM_TRANSFERS = 2_000
FROZEN = 1_234
WAIT_S = 10.0  # for a frozen transfer; a busy machine may hold up the others for seconds
MARGIN_S = 10.0  # for the prompt itself on such a machine


def prompts() -> list[Request]:
    dice, params = random.Random(8), SamplingParams(temperature=0.0)
    ids = [tuple(dice.choices(range(3, 256), k=3 * PAGE)) for _ in range(MAX_READS)]
    return [Request(str(at), each, 2, params, num_top_logprobs=0) for at, each in enumerate(ids)]


class LossyLink:
    """The transfers of borrowed blocks, one of which gets none of its bytes to the borrower."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._lost: int | None = None
        self._lend, self._send = StageGroup.send_cached, UcxTransport.send
        monkeypatch.setattr(StageGroup, "send_cached", lambda *given: self.lend(*given))
        monkeypatch.setattr(UcxTransport, "send", lambda *given: self.send(*given))

    def lend(
        self,
        group: StageGroup,
        source: SourceTerms,
        destination: DestinationTerms,
        session: SendSession,
        on_change: Callable[[], object],
        data_rank: int,
    ) -> None:
        self.count += 1
        if self.count == FROZEN:
            self._lost = tag_prefix(destination.tag_base)
        self._lend(group, source, destination, session, on_change, data_rank)

    def send(self, transport: UcxTransport, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Send a message, or one that nobody expects in its place."""
        return self._send(transport, peer, tag ^ (tag_prefix(tag) == self._lost) << 63, buffer)


@pytest.mark.long
async def test_one_frozen_transfer_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, slow_s = LossyLink(monkeypatch), list[float]()
    monkeypatch.setattr(puller, "LEAST_WAIT_S", WAIT_S)
    monkeypatch.setattr(puller, "AVOID_S", 0.0)  # else the next ten seconds would be without pulls
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    questions = prompts()
    right = on_the_wire(Reference(model).answers(questions))

    async def ask(client: AsyncBatonClient, number: int) -> None:
        began_s = time.monotonic()
        answer = await client.complete(as_query(questions[number]), timeout_s=60)
        assert shown(answer) == right[number]
        if (took_s := time.monotonic() - began_s) >= WAIT_S:
            slow_s.append(took_s)

    async with cluster_in_process(
        model, announced=tmp_path, page_size=PAGE, chunk_tokens=64, router={"pull_tokens": 1}
    ) as client:
        while link.count < NUM_TRANSFERS:
            await asyncio.gather(*(ask(client, number) for number in range(len(questions))))
            await flush(tmp_path / "prefill-0.json")
    assert len(slow_s) == 1, "the frozen one"
    assert slow_s[0] < WAIT_S + MARGIN_S

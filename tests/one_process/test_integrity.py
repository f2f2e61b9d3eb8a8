"""One flipped byte between real pools over real UCX: always caught, always named, nothing wrong is
emitted.

The three roles run in this process, so that the transport of the sending pool can be told to flip a
byte of one message after its digest was taken.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient
from baton.retry import NO_RETRY
from baton.values import Chunk, Query
from engine.memory.layout import Buffer
from runtime.errors import BatonError, IntegrityError
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.transfer.damaging_transport import send_damaged
from transfer.transport.protocol import Operation, Peer
from transfer.ucx.transport import UcxTransport


class FlippingTransport(UcxTransport):
    """Flips one bit of the `flip_at`-th message that is sent while armed."""

    flip_at: int | None = None
    num_sent = 0
    num_flipped = 0

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        cls = FlippingTransport
        position, cls.num_sent = cls.num_sent, cls.num_sent + 1
        if position != cls.flip_at:
            return super().send(peer, tag, buffer)
        cls.num_flipped += 1
        return send_damaged(super().send, peer, tag, buffer)


@pytest.fixture(autouse=True)
def _flipping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("transfer.ucx.transport.UcxTransport", FlippingTransport)
    FlippingTransport.flip_at, FlippingTransport.num_sent = None, 0
    yield
    FlippingTransport.flip_at = None


async def outcome(client: AsyncBatonClient, query: Query) -> tuple[list[int], BatonError | None]:
    """Return the tokens sent and the error that ended the stream; None if it finished."""
    seen: list[int] = []
    try:
        async for event in client.generate(query, timeout_s=60):
            seen += event.token_ids if isinstance(event, Chunk) else ()
    except BatonError as error:
        return seen, error
    return seen, None


async def test_a_flipped_byte_is_detected_and_named_at_every_point(
    checkpoint: Path, reference: Reference
) -> None:
    question = make_questions(3, seed=21)[2]
    right = on_the_wire(reference.answers([question]))[0]
    async with cluster_in_process(checkpoint, retry=NO_RETRY) as client:
        FlippingTransport.num_sent = 0
        assert shown(await client.complete(as_query(question), timeout_s=60)) == right
        num_messages = FlippingTransport.num_sent
        named = set()
        for position in range(num_messages):
            FlippingTransport.flip_at, FlippingTransport.num_sent, FlippingTransport.num_flipped = (
                position,
                0,
                0,
            )
            seen, error = await outcome(client, as_query(question))
            if not FlippingTransport.num_flipped:
                continue  # other pages, other runs: this time fewer messages were needed
            assert isinstance(error, IntegrityError), error
            named.add(str(error))
            assert seen in ([], [right[0][0]]), (
                "only the first token, which prefill drew, may have been sent"
            )
        FlippingTransport.flip_at = None
        assert shown(await client.complete(as_query(question), timeout_s=60)) == right
    assert any("kv" in text and "layer 3" in text for text in named), named
    assert any("state" in text for text in named), named
    assert any("conv" in text for text in named), named

"""Lenders that lie, stall or vanish: the prompt is computed instead, with the right bits."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import torch

from baton.client import AsyncBatonClient
from engine.core.request import Request, SamplingParams
from pool.pulls import puller
from protos import lending_pb2 as pb
from protos import lending_pb2_grpc, transfer_pb2
from router.workers.holders import BlockHolders
from router.workers.worker import WorkerRole
from tests.support.cluster.leaders import flush, leader_address
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint

PAGE = 16
PROMPT = random.Random(6).choices(range(3, 256), k=200)
LendContext = grpc.aio.ServicerContext[pb.LendRequest, pb.LendResponse]
TrueCall = grpc.aio.StreamStreamCall[pb.LendRequest, pb.LendResponse]


@dataclass
class Loan:
    """One loan as a lender in the middle sees it: the borrower's stream, and a true lender's."""

    requests: AsyncIterator[pb.LendRequest]
    context: LendContext
    true: TrueCall
    terms: transfer_pb2.SourceTerms

    async def offer(self) -> None:
        await self.context.write(pb.LendResponse(offered=pb.LoanOffered(terms=self.terms)))

    async def destination(self) -> pb.LendRequest:
        return await anext(self.requests)


# Before the bytes.


async def says_nothing(loan: Loan) -> None:
    await asyncio.Event().wait()


async def ends_at_once(loan: Loan) -> None:
    pass


async def fails(loan: Loan) -> None:
    await loan.context.abort(grpc.StatusCode.INTERNAL, "no")


async def has_nothing(loan: Loan) -> None:
    await loan.context.write(pb.LendResponse(offered=pb.LoanOffered()))


async def begins_with_the_end(loan: Loan) -> None:
    await loan.context.write(pb.LendResponse(sent=pb.LoanSent(num_bytes=1)))


async def offers_part_of_a_page(loan: Loan) -> None:
    loan.terms.num_tokens -= 1
    await loan.offer()


async def offers_more_than_was_asked_for(loan: Loan) -> None:
    loan.terms.num_tokens += 64 * PAGE
    loan.terms.page_ids.extend(range(100, 164))
    await loan.offer()


async def offers_another_model(loan: Loan) -> None:
    loan.terms.compatibility = "0" * len(loan.terms.compatibility)
    await loan.offer()


async def offers_other_blocks(loan: Loan) -> None:
    loan.terms.content = bytes(16)
    await loan.offer()


async def offers_other_pages(loan: Loan) -> None:
    loan.terms.page_size *= 2
    await loan.offer()


async def offers_a_page_twice(loan: Loan) -> None:
    loan.terms.page_ids[1] = loan.terms.page_ids[0]
    await loan.offer()


async def offers_no_stages(loan: Loan) -> None:
    del loan.terms.stages[:]
    await loan.offer()


async def offers_half_of_the_layers(loan: Loan) -> None:
    loan.terms.stages[0].end_layer //= 2
    await loan.offer()


async def gives_a_garbled_address(loan: Loan) -> None:
    loan.terms.stages[0].address = b"nowhere" * 9
    await loan.offer()
    await loan.destination()


# After the offer.


async def offers_and_ends(loan: Loan) -> None:
    await loan.offer()


async def offers_and_fails(loan: Loan) -> None:
    await loan.offer()
    await loan.destination()
    await loan.context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def never_sends(loan: Loan) -> None:
    await loan.offer()
    await asyncio.Event().wait()


async def says_sent_and_sends_nothing(loan: Loan) -> None:
    await loan.offer()
    await loan.destination()
    await loan.context.write(pb.LendResponse(sent=pb.LoanSent(num_bytes=1 << 20)))
    await asyncio.Event().wait()


async def seals_with_another_key(loan: Loan) -> None:
    """The true lender sends the true bytes, under a key that the borrower did not choose."""
    await loan.offer()
    message = await loan.destination()
    message.destination.key = bytes(32)
    await loan.true.write(message)
    await asyncio.Event().wait()


async def sends_under_another_session(loan: Loan) -> None:
    await loan.offer()
    message = await loan.destination()
    message.destination.session_id = "0123456789abcdef"
    await loan.true.write(message)
    await asyncio.Event().wait()


ATTACKS = [
    says_nothing,
    ends_at_once,
    fails,
    has_nothing,
    begins_with_the_end,
    offers_part_of_a_page,
    offers_more_than_was_asked_for,
    offers_another_model,
    offers_other_blocks,
    offers_other_pages,
    offers_a_page_twice,
    offers_no_stages,
    offers_half_of_the_layers,
    gives_a_garbled_address,
    offers_and_ends,
    offers_and_fails,
    never_sends,
    says_sent_and_sends_nothing,
    seals_with_another_key,
    sends_under_another_session,
]


class LenderInTheMiddle(lending_pb2_grpc.LendingServicer):
    """A lender that borrows from a true one, and does something else with it."""

    def __init__(self, true_address: str) -> None:
        self._true_address = true_address
        self.attack: Callable[[Loan], Awaitable[object]] = ends_at_once
        self.num_asked = 0

    async def Lend(  # type: ignore[override]  # it writes to the context instead
        self, request_iterator: AsyncIterator[pb.LendRequest], context: LendContext
    ) -> None:
        self.num_asked += 1
        blocks = await anext(request_iterator)
        async with grpc.aio.insecure_channel(self._true_address) as channel:
            true: TrueCall = lending_pb2_grpc.LendingStub(channel).Lend()
            await true.write(blocks)
            answer = await true.read()
            assert isinstance(answer, pb.LendResponse)
            assert answer.offered.HasField("terms")
            await self.attack(Loan(request_iterator, context, true, answer.offered.terms))


@asynccontextmanager
async def in_the_middle(true_address: str) -> AsyncIterator[tuple[LenderInTheMiddle, str]]:
    server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])  # as Baton's own
    lender = LenderInTheMiddle(true_address)
    lending_pb2_grpc.add_LendingServicer_to_server(lender, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield lender, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def name_holder(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Have the router name a decode worker at this address for every prompt, or none."""
    holder = SimpleNamespace(address=address, role=WorkerRole.DECODE) if address else None
    ranked = [(1, WorkerRole.DECODE, address)] if address else []
    monkeypatch.setattr(
        BlockHolders, "with_pulls", lambda self, held, *given: replace(held, ranked=ranked)
    )
    monkeypatch.setattr(BlockHolders, "best", lambda *given: holder)


def question(number: int) -> Request:
    params = SamplingParams(temperature=0.0)
    return Request(f"q{number}", tuple(PROMPT), 8, params, num_top_logprobs=0)


async def ask(client: AsyncBatonClient, number: int, salt: str) -> tuple[Shown, int]:
    query = replace(as_query(question(number)), cache_salt=salt)
    completion = await client.complete(query, timeout_s=60)
    return shown(completion), completion.finish.usage.cached_tokens


async def test_a_lender_that_lies_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cluster meets all attacks. On leaving it, nothing is leased."""
    monkeypatch.setattr(puller, "OFFER_S", 0.3)
    monkeypatch.setattr(puller, "LEAST_WAIT_S", 0.5)
    monkeypatch.setattr(puller, "MOVE_S", 1.0)
    monkeypatch.setattr(puller, "AVOID_S", 0.0)
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    (right,) = on_the_wire(Reference(model).answers([question(0)]))
    async with cluster_in_process(
        model,
        announced=tmp_path,
        page_size=PAGE,
        chunk_tokens=64,
        decode={"num_pages": 400},
        router={"pull_tokens": 1},
    ) as client:
        decode = leader_address(tmp_path / "decode-0.json")
        async with in_the_middle(decode) as (lender, address):
            for number, attack in enumerate(ATTACKS):
                lender.attack = attack
                salt = str(number)  # so that the prefill worker has nothing of the prompt
                name_holder(monkeypatch, "")
                assert await ask(client, number, salt) == (right, 0), attack
                await flush(tmp_path / "prefill-0.json")
                name_holder(monkeypatch, address)
                assert await ask(client, 100 + number, salt) == (right, 0), attack
                assert lender.num_asked == number + 1, attack
        # The true lender still lends.
        name_holder(monkeypatch, decode)
        await flush(tmp_path / "prefill-0.json")
        assert await ask(client, 1000, "0") == (right, 192)


async def test_what_is_lent_is_not_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between offer and sending, the lender's cache is emptied, and another prompt takes its free
    pages."""
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    (right,) = on_the_wire(Reference(model).answers([question(0)]))
    other = replace(as_query(question(1)), prompt=tuple(reversed(PROMPT)))
    async with cluster_in_process(
        model,
        announced=tmp_path,
        page_size=PAGE,
        chunk_tokens=64,
        decode={"num_pages": 44},
        router={"pull_tokens": 1},
    ) as client:
        decode = leader_address(tmp_path / "decode-0.json")

        async def forgets_and_serves_another(loan: Loan) -> None:
            await loan.offer()
            message = await loan.destination()
            await flush(tmp_path / "decode-0.json")
            name_holder(monkeypatch, "")
            await client.complete(other, timeout_s=60)
            await loan.true.write(message)
            answer = await loan.true.read()
            assert isinstance(answer, pb.LendResponse)
            await loan.context.write(answer)
            assert await anext(loan.requests, None) is None

        async with in_the_middle(decode) as (lender, address):
            lender.attack = forgets_and_serves_another
            name_holder(monkeypatch, "")
            assert await ask(client, 0, "") == (right, 0)
            await flush(tmp_path / "prefill-0.json")
            name_holder(monkeypatch, address)
            monkeypatch.setattr(puller, "LEAST_WAIT_S", 30.0)
            assert await ask(client, 2, "") == (right, 192)
            assert lender.num_asked == 1

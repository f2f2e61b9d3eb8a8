"""Borrowers that ask for what they should not, lie, or never come back: they get a named error, the
lender's memory is released, and others are served."""

import random
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from engine.core.request import Request, SamplingParams
from models.loader import read_model
from pool.pulls import lender
from protos import lending_pb2 as pb
from protos import lending_pb2_grpc, transfer_pb2, worker_pb2, worker_pb2_grpc
from runtime.digests import block_names
from tests.support.cluster.leaders import leader_address
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query
from tests.support.models.checkpoints import make_checkpoint
from transfer.plan import codec
from transfer.plan.copy_plan import plan_destination

PAGE = 16
PROMPT = random.Random(6).choices(range(3, 256), k=200)
LendCall = grpc.aio.StreamStreamCall[pb.LendRequest, pb.LendResponse]


@dataclass
class Loans:
    """The lender of a decode pool that has the blocks of one prompt."""

    stub: "lending_pb2_grpc.LendingAsyncStub"
    names: tuple[bytes, ...]
    specs: Any

    async def begin(self) -> tuple[LendCall, transfer_pb2.SourceTerms]:
        call: LendCall = self.stub.Lend()
        await call.write(pb.LendRequest(blocks=pb.BlockNames(names=b"".join(self.names))))
        answer = await call.read()
        assert isinstance(answer, pb.LendResponse)
        return call, answer.offered.terms

    def destination(self, terms: transfer_pb2.SourceTerms) -> transfer_pb2.DestinationTerms:
        """Return terms that a pool of one stage could give."""
        source = codec.source_from_proto(terms)
        return codec.destination_to_proto(
            plan_destination(
                source,
                specs=self.specs,
                session_id=secrets.token_hex(8),
                epoch=0,
                tag_base=secrets.randbits(64),
                key=secrets.token_bytes(32),
                page_ids=range(1, 1 + len(source.page_ids)),
                slot_id=0,
                stages=source.stages,
            )
        )


def _nothing(terms: transfer_pb2.DestinationTerms) -> None:
    terms.Clear()


def _no_key(terms: transfer_pb2.DestinationTerms) -> None:
    terms.key = b""


def _other_plan(terms: transfer_pb2.DestinationTerms) -> None:
    terms.plan_digest = "0" * 32


def _too_few_pages(terms: transfer_pb2.DestinationTerms) -> None:
    del terms.page_ids[3:]


def _page_zero(terms: transfer_pb2.DestinationTerms) -> None:
    terms.page_ids[0] = 0


def _all_held(terms: transfer_pb2.DestinationTerms) -> None:
    terms.held_tokens = 12 * PAGE


def _no_stages(terms: transfer_pb2.DestinationTerms) -> None:
    del terms.stages[:]


def _garbled_address(terms: transfer_pb2.DestinationTerms) -> None:
    terms.stages[0].address = b"nowhere" * 9


def _huge_session(terms: transfer_pb2.DestinationTerms) -> None:
    terms.session_id = "x" * 100_000


LIES: list[tuple[Callable[[transfer_pb2.DestinationTerms], None], str]] = [
    (_nothing, "destination"),
    (_no_key, "key"),
    (_other_plan, "derives copy plan"),
    (_too_few_pages, "page"),
    (_page_zero, "page"),
    (_all_held, "held_tokens"),
    (_no_stages, "stage"),
    (_garbled_address, "not the address of a UCX worker"),
    (_huge_session, "session_id"),
]


@asynccontextmanager
async def lending_cluster(folder: Path) -> AsyncIterator[Loans]:
    """Yield the lender of a cluster that has answered a prompt. On leaving, nothing is leased."""
    model = make_checkpoint(folder, "llama", dtype=torch.bfloat16)
    question = Request(
        "first", tuple(PROMPT), 2, SamplingParams(temperature=0.0), num_top_logprobs=0
    )
    async with cluster_in_process(
        model, announced=folder, page_size=PAGE, chunk_tokens=64
    ) as client:
        await client.complete(as_query(question), timeout_s=60)
        address = leader_address(folder / "decode-0.json")
        async with grpc.aio.insecure_channel(address) as channel:
            watch = worker_pb2_grpc.WorkerStub(channel).Watch(
                worker_pb2.WatchRequest(interval_s=1.0)
            )
            first = await anext(aiter(watch))
            yield Loans(
                lending_pb2_grpc.LendingStub(channel),
                block_names(PROMPT, PAGE, compatibility=first.info.compatibility),
                read_model(model).cache_specs(PAGE),
            )
            watch.cancel()


async def error_of(call: LendCall) -> tuple[grpc.StatusCode, str]:
    """Read a call to its end; return its status."""
    try:
        while isinstance(await call.read(), pb.LendResponse):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_lies_of_borrowers_get_named_errors(tmp_path: Path) -> None:
    async with lending_cluster(tmp_path) as loans:
        for lie, reason in LIES:
            call, terms = await loans.begin()
            assert terms.num_tokens == 192
            destination = loans.destination(terms)
            lie(destination)
            await call.write(pb.LendRequest(destination=destination))
            code, details = await error_of(call)
            assert code is not grpc.StatusCode.OK, lie
            assert reason in details, (lie, details)


@pytest.mark.parametrize(
    "names",
    [b"", b"short", b"x" * 17, b"x" * 1_600_000],
    ids=["none", "short", "long", "many"],
)
async def test_what_is_no_name_is_refused(names: bytes, tmp_path: Path) -> None:
    async with lending_cluster(tmp_path) as loans:
        call = loans.stub.Lend()
        await call.write(pb.LendRequest(blocks=pb.BlockNames(names=names)))
        code, details = await error_of(call)
        assert (code, "blocks.names" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_unknown_blocks_are_not_lent(tmp_path: Path) -> None:
    """Nor are known ones in places where no prompt has them."""
    unknown = tuple(secrets.token_bytes(16) for _ in range(12))
    async with lending_cluster(tmp_path) as loans:
        first, *others = loans.names
        for names, num_lent in (
            (unknown, 0),
            ((unknown[0], *others), 0),
            (loans.names[::-1], 0),
            ((first,) * 12, 1),
            ((first, *others[1:], others[0]), 1),
            ((*loans.names, *unknown), 12),
        ):
            call, terms = await Loans(loans.stub, names, loans.specs).begin()
            assert terms.num_tokens == num_lent * PAGE
            await call.done_writing()
            await error_of(call)
        call, terms = await loans.begin()  # the tree is as before
        assert terms.num_tokens == 12 * PAGE
        call.cancel()


async def test_a_session_is_not_taken_over(tmp_path: Path) -> None:
    async with lending_cluster(tmp_path) as loans:
        call, terms = await loans.begin()
        destination = loans.destination(terms)
        other, _ = await loans.begin()
        await call.write(pb.LendRequest(destination=destination))
        sent = await call.read()
        assert isinstance(sent, pb.LendResponse)
        await other.write(pb.LendRequest(destination=destination))
        code, details = await error_of(other)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "session_id" in details
        call.cancel()


async def test_loans_are_bounded_in_number_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender, "MESSAGE_S", 2.0)
    async with lending_cluster(tmp_path) as loans:
        idle = [await loans.begin() for _ in range(lender.MAX_LOANS)]
        refused = loans.stub.Lend()
        assert (await error_of(refused))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call, _ in idle:  # none of them ever says where to send the blocks
            assert (await error_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        call, terms = await loans.begin()
        assert terms.num_tokens == 192
        call.cancel()


async def test_a_borrower_that_vanishes_leaves_nothing_leased(tmp_path: Path) -> None:
    async with lending_cluster(tmp_path) as loans:
        for number in range(8):
            call, terms = await loans.begin()
            if number % 2:
                await call.write(pb.LendRequest(destination=loans.destination(terms)))
            call.cancel()

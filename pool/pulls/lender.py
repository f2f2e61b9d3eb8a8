"""The Lending service of a leader: sends blocks of its prefix cache to another pool.

    names ─▶ cached blocks leased ─▶ offered (source terms) ─▶ destination ─▶ every stage sends
          ─▶ sent ─▶ the borrower ends the call ─▶ released once nothing reads them

A loan is a handoff without a request: the same terms, lanes and authenticators.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import grpc

from engine.memory.layout import NULL_INDEX
from engine.memory.leases import PageLease, SlotLease
from pool.pipeline.leader import Leader
from pool.pipeline.reclaimer import MemoryReclaimer
from pool.pipeline.session_reports import until_state
from pool.prefix.cache import PrefixCache
from pool.stage.plan import StagePlan
from protos import lending_pb2 as pb
from protos import lending_pb2_grpc
from runtime.clock import SystemClock
from runtime.digests import NAME_BYTES, split_names
from runtime.errors import (
    CapacityError,
    DeadlineError,
    FieldViolation,
    InvalidRequestError,
    UnavailableError,
)
from runtime.observe.metrics.caches import PullMetrics
from runtime.rpc.read_limits import first_message
from transfer.plan import codec
from transfer.plan.copy_plan import check_plan
from transfer.plan.handoff_terms import SourceTerms
from transfer.session import SendSession, SessionTimeouts
from transfer.session_states import SendState

MAX_LOANS = 16  # at a time; each holds pages that the cache could otherwise evict
MESSAGE_S = 10.0  # seconds for the borrower to send its next message
LOAN_S = 60.0  # seconds to send the blocks
_OWNER = "loans"

LendContext = grpc.aio.ServicerContext[pb.LendRequest, pb.LendResponse]


@dataclass(frozen=True)
class _LentBlocks:
    """Cached blocks that are leased for a borrower."""

    data_rank: int
    num_tokens: int
    name: bytes  # of the last block
    pages: PageLease
    slot: SlotLease | None

    def end(self) -> None:
        self.pages.end()
        if self.slot is not None:
            self.slot.end()


class Lender(lending_pb2_grpc.LendingServicer):
    """The gRPC servicer of the Lending service of one pool.

    `caches` are those of its data ranks, by rank.
    """

    def __init__(
        self,
        leader: Leader,
        plan: StagePlan,
        caches: Sequence[PrefixCache],
        reclaimer: MemoryReclaimer,
        metrics: PullMetrics,
    ) -> None:
        self._leader = leader
        self._plan = plan
        self._caches = caches
        self._reclaimer = reclaimer
        self._metrics = metrics
        self._num_open = 0
        for cache in caches:
            cache.holders |= {_OWNER}

    async def Lend(
        self, request_iterator: AsyncIterator[pb.LendRequest], context: LendContext
    ) -> AsyncIterator[pb.LendResponse]:
        if not self._leader.serving:
            raise UnavailableError(f"the pool does not lend: {self._leader.reason}")
        if self._num_open >= MAX_LOANS:
            raise CapacityError(f"{MAX_LOANS} loans are open, which is the limit", resource="loans")
        self._num_open += 1
        try:
            message = await first_message(request_iterator, MESSAGE_S)
            names = _names_in(message, self._plan.geometry.num_pages)
            loan = await self._leader.loop.submit(lambda: self._lease(names), undo=_end)
            if loan is None:
                yield pb.LendResponse(offered=pb.LoanOffered())
                return
            async with aclosing(self._lend(loan, request_iterator)) as events:
                async for event in events:
                    yield event
        finally:
            self._num_open -= 1

    async def _lend(
        self, loan: _LentBlocks, requests: AsyncIterator[pb.LendRequest]
    ) -> AsyncGenerator[pb.LendResponse, None]:
        session: SendSession | None = None
        changed = asyncio.Event()
        group = self._leader.group
        try:
            source = self._terms(loan)
            yield pb.LendResponse(offered=pb.LoanOffered(terms=codec.source_to_proto(source)))
            message = await _next(requests)
            if message is None:
                return  # the borrower computes the tokens instead
            destination = codec.destination_from_proto(message.destination)
            check_plan(source, destination, self._plan.geometry.specs)
            session = SendSession(
                destination.session_id,
                epoch=destination.epoch,
                clock=SystemClock(),
                num_stages=group.session_size,
                timeouts=SessionTimeouts(move_s=LOAN_S),
            )
            session.computed()
            group.send_cached(source, destination, session, changed.set, loan.data_rank)
            await until_state(session, changed, SendState.SENT)
            self._metrics.lent.inc(
                len(source.page_ids) - destination.held_tokens // source.page_size
            )
            yield pb.LendResponse(sent=pb.LoanSent(num_bytes=session.num_bytes))
            with suppress(DeadlineError):
                await _next(requests)
        finally:
            self._release(loan, session)

    def _release(self, loan: _LentBlocks, session: SendSession | None) -> None:
        """Release a loan as soon as no stage reads its memory."""
        if session is None:
            self._leader.loop.post(loan.end)
            return
        session_id = session.session_id
        session.abort("its loan ended")
        self._reclaimer.end(
            loan.end, close=lambda: self._leader.group.close_session(session_id), session=session
        )

    def _lease(self, names: tuple[bytes, ...]) -> _LentBlocks | None:
        """Lease the cached ones of the first blocks, or return None. For the engine thread."""
        known = [cache.num_in_place(names) for cache in self._caches]
        rank = max(range(len(known)), key=known.__getitem__)
        names, cache = names[: known[rank]], self._caches[rank]
        assert cache.rule is not None
        found = cache.find(names, len(names) * cache.rule.block_tokens + 1)
        if not found.num_tokens:
            return None
        cache.resume(names, found)
        pages = cache.pages.alloc(0, owner=_OWNER, shared=found.page_ids)
        slot = None if found.slot_id is None else cache.slots.share(found.slot_id, owner=_OWNER)
        name = names[found.num_tokens // cache.rule.block_tokens - 1]
        return _LentBlocks(rank, found.num_tokens, name, pages, slot)

    def _terms(self, loan: _LentBlocks) -> SourceTerms:
        mine = self._leader.compatibility
        return SourceTerms(
            compatibility=mine.digest,
            compatibility_text=mine.text,
            page_size=self._plan.geometry.page_size,
            num_tokens=loan.num_tokens,
            chunk_tokens=loan.num_tokens,
            page_ids=tuple(loan.pages.page_ids),
            slot_id=NULL_INDEX if loan.slot is None else loan.slot.slot_id,
            stages=self._leader.group.endpoints(loan.data_rank),
            sends_rest=True,
            is_loan=True,
            content=loan.name,
        )


async def _next(requests: AsyncIterator[pb.LendRequest]) -> pb.LendRequest | None:
    """Return the next message of the borrower, or None if it has ended the call.

    Raises:
        DeadlineError: it is silent for too long.
    """
    try:
        async with asyncio.timeout(MESSAGE_S):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineError(f"the borrower was silent for {MESSAGE_S:g} s") from None


def _names_in(message: pb.LendRequest, most: int) -> tuple[bytes, ...]:
    """Return the names of blocks in a message.

    Raises:
        InvalidRequestError: there are none or more than `most`, or they are not names.
    """
    joined = message.blocks.names
    if not 0 < len(joined) <= most * NAME_BYTES or len(joined) % NAME_BYTES:
        raise InvalidRequestError(
            FieldViolation("blocks.names", f"must be 1 to {most} names of {NAME_BYTES} bytes")
        )
    return tuple(split_names(joined))


def _end(loan: _LentBlocks | None) -> None:
    if loan is not None:
        loan.end()

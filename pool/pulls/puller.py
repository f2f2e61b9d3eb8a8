"""Pulls of blocks from the prefix cache of another pool, as a leader runs them.

The router names a holder of more of a prompt than this pool has. The leader borrows the missing
blocks there (`pool.pulls.lender`) before the prompt is queued. Whatever goes wrong, the prompt is
computed.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from engine.core.request import Request
from pool.pipeline.leader import Leader
from pool.pipeline.reclaimer import MemoryReclaimer
from pool.pipeline.session_reports import until_state
from pool.prefix.block_reads import BlockRead, BlockReads
from pool.prefix.cache import PrefixCache
from pool.stage.plan import StagePlan
from protos import lending_pb2 as pb
from protos import lending_pb2_grpc, types_pb2
from runtime.clock import SystemClock
from runtime.digests import check_compatible, share_draft
from runtime.errors import BatonError, ConfigError, HandoffError, PeerLostError
from runtime.observe.metrics.caches import PullMetrics
from runtime.rpc.client import open_channel
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ChannelSecurity, PeerRole
from transfer.plan import codec
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import SourceTerms
from transfer.plan.term_checks import check_content
from transfer.session import ReceiveSession, SessionTimeouts
from transfer.session_states import ReceiveState
from transfer.transport.authenticator import new_key

logger = logging.getLogger(__name__)

OFFER_S = 1.0  # seconds for a holder to offer its blocks
LEAST_WAIT_S = 2.0  # seconds that a prompt waits for its blocks at least
MOVE_S = 30.0  # seconds to move them; the prompt is computed long before
AVOID_S = 10.0  # seconds in which a holder that failed is not asked again
_OWNER = "pulls"

LendCall = grpc.aio.StreamStreamCall[pb.LendRequest, pb.LendResponse]


@dataclass(eq=False)
class Puller:
    """The pulls of one data rank of a pool. Belongs to the event loop's thread."""

    data_rank: int
    cache: PrefixCache
    leader: Leader
    plan: StagePlan
    reclaimer: MemoryReclaimer
    security: ChannelSecurity
    metrics: PullMetrics
    num_expected: int = 0  # tokens of prompts that wait for pulls; belongs to the engine thread
    _failed: dict[str, float] = field(default_factory=dict)  # holders, until this loop time

    def __post_init__(self) -> None:
        self._events = asyncio.get_running_loop()
        self.reads = BlockReads(
            self.cache,
            self.leader.loop,
            _OWNER,
            self.metrics.blocks.labels,
            self.metrics.seconds,
        )

    async def bring(
        self, request: Request, names: tuple[bytes, ...], holder: types_pb2.BlockHolder
    ) -> int:
        """Bring the blocks of a prompt into the cache that the holder has.

        Return what `BlockReads.bring` does. It returns early if that fails, takes longer than to
        compute them, or is not worth it.
        """
        names = self.cache.names_to_resume(names, request)
        if not names or self._is_avoided(holder.address):
            return 0
        num_missing = len(names) - self.cache.num_resumable(names)
        wait_s = max(LEAST_WAIT_S, self.reads.computing_s(num_missing))
        try:
            async with asyncio.timeout(wait_s):
                return await self.reads.bring(names, _HoldingPool(self, holder), wait_s=wait_s)
        except TimeoutError:
            self.avoid(holder.address)
            logger.warning("%s did not lend its blocks within %.3g s", holder.address, wait_s)
            return 0

    def avoid(self, address: str) -> None:
        """Do not ask a holder for a while."""
        self._failed[address] = self._events.time() + AVOID_S

    def _is_avoided(self, address: str) -> bool:
        now = self._events.time()
        self._failed = {each: until_s for each, until_s in self._failed.items() if until_s > now}
        return address in self._failed


@dataclass(frozen=True)
class _HoldingPool:
    """Another pool that has blocks of a prompt. Implements `BlockSource`."""

    puller: Puller
    holder: types_pb2.BlockHolder

    @asynccontextmanager
    async def offer(
        self, names: Sequence[bytes], num_cached: int
    ) -> AsyncGenerator["_BorrowedBlocks", None]:
        address = self.holder.address
        try:
            security = self.puller.security.to(_role_of(self.holder))
            async with open_channel(address, security=security) as channel:
                call: LendCall = lending_pb2_grpc.LendingStub(channel).Lend()
                terms = await self._offered(call, names)
                yield _BorrowedBlocks(self.puller, call, terms, num_cached)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, BatonError) as error:
            self.puller.avoid(address)
            raise _reason(error) from None

    async def _offered(self, call: LendCall, names: Sequence[bytes]) -> SourceTerms | None:
        """Return the terms of the blocks that the holder lends, or None if it has none of them.

        Raises:
            grpc.aio.AioRpcError: the call failed.
            BatonError: it does not answer, or offers something else.
        """
        try:
            async with asyncio.timeout(OFFER_S):
                await call.write(pb.LendRequest(blocks=pb.BlockNames(names=b"".join(names))))
                answer = await call.read()
        except TimeoutError:
            raise PeerLostError(f"the holder has not answered within {OFFER_S:g} s") from None
        if not isinstance(answer, pb.LendResponse) or not answer.HasField("offered"):
            raise HandoffError("the holder ended the loan without an offer")
        if not answer.offered.HasField("terms"):
            return None
        source = codec.source_from_proto(answer.offered.terms)
        mine = self.puller.leader.compatibility
        check_compatible(mine, source.compatibility, source.compatibility_text)
        page_size = self.puller.plan.geometry.page_size
        if source.num_tokens % page_size or source.num_tokens > len(names) * page_size:
            raise HandoffError(
                f"the holder offers {source.num_tokens} tokens of {len(names)} blocks of {page_size}"
            )
        check_content(source, source.num_tokens, names[source.num_tokens // page_size - 1])
        return source


@dataclass(frozen=True)
class _BorrowedBlocks:
    """Blocks that a holder lends. Implements `BlockOffer`."""

    puller: Puller
    call: LendCall
    terms: SourceTerms | None
    num_cached: int

    @property
    def num_blocks(self) -> int:
        if self.terms is None:
            return 0
        return max(0, self.terms.num_tokens // self.terms.page_size - self.num_cached)

    async def fill(self, read: BlockRead) -> int:
        assert self.terms is not None
        puller, source = self.puller, self.terms
        group = puller.leader.group
        session = ReceiveSession(
            secrets.token_hex(8),
            num_stages=group.session_size,
            clock=SystemClock(),
            timeouts=SessionTimeouts(move_s=MOVE_S),
        )
        destination = plan_destination(
            source,
            specs=puller.plan.geometry.specs,
            session_id=session.session_id,
            epoch=session.epoch,
            tag_base=secrets.randbits(64),
            key=new_key(),
            page_ids=read.pages.page_ids,
            slot_id=read.slot_id,
            stages=group.endpoints(puller.data_rank),
            with_draft=share_draft(puller.leader.compatibility.digest, source.compatibility),
            held_tokens=read.num_found * source.page_size,
        )
        changed = asyncio.Event()
        group.open_receive(source, destination, session, changed.set, puller.data_rank)
        watching = asyncio.create_task(self._watch(session, changed))
        try:
            await until_state(session, changed, ReceiveState.RECEIVING)
            await self.call.write(
                pb.LendRequest(destination=codec.destination_to_proto(destination))
            )
            await until_state(session, changed, ReceiveState.COMPLETE)
            session.commit()
            await self.call.done_writing()
        finally:
            session.abort("its pull ended")  # no effect if everything has arrived
            if session.error is not None:
                self.call.cancel()
            group.close_session(session.session_id)
            await puller.reclaimer.drained(session)
            await asyncio.wait([watching], timeout=OFFER_S)  # the holder ends the call
            watching.cancel()
        return len(read.missing)

    async def _watch(self, session: ReceiveSession, changed: asyncio.Event) -> None:
        """Fail the session if the holder ends the call before everything has arrived."""
        reason: BatonError = PeerLostError("the holder has ended the loan")
        try:
            while isinstance(await self.call.read(), pb.LendResponse):
                pass
        except grpc.aio.AioRpcError as error:
            reason = error_from_rpc(error)
        session.fail(reason)  # no effect if everything has arrived
        changed.set()


def _reason(error: BaseException) -> BatonError:
    """Return the error of a failed loan."""
    match error:
        case BatonError():
            return error
        case grpc.aio.AioRpcError():
            return error_from_rpc(error)
        case _:
            return PeerLostError("the holder has ended the loan")


def _role_of(holder: types_pb2.BlockHolder) -> PeerRole:
    """Return the role that the certificate of a holder names.

    Raises:
        ConfigError: it is none.
    """
    try:
        return PeerRole(holder.role)
    except ValueError:
        raise ConfigError(f"a holder has the role {holder.role!r}", field="holder.role") from None

"""All stages of a formed pool as one end of a handoff.

The leader opens and closes a session on every stage at once, and each stage's reports are delivered
to the session (`pool.pipeline.session_reports`).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from engine.core.layer_range import Placement
from pool.pipeline.adapters import OnEngine, hold_adapters
from pool.pipeline.grammars import GrammarCheck, grammar_to_proto
from pool.pipeline.membership import StageLink
from pool.pipeline.questions import AnswerT, StageQuestions
from pool.pipeline.session_reports import SessionReports
from pool.pipeline.tiers import find_blocks, move_blocks, move_to_proto
from pool.stage.adapters import LoadedAdapters
from pool.tiers.block_store import Tier
from pool.tiers.stage_blocks import BlockMove, StageBlocks
from protos import pipeline_pb2 as pb
from runtime.errors import (
    CapacityError,
    ConfigError,
    FieldViolation,
    InvalidRequestError,
    UnavailableError,
)
from runtime.grammar import Grammar
from transfer.agent.agent import TransferAgent
from transfer.plan import codec
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
)
from transfer.session import ReceiveSession, SendSession

# Seconds for a stage that must first load its tokenizer; it limits compilation itself.
GRAMMAR_TIMEOUT_S = 75.0
FIND_TIMEOUT_S = 5.0  # seconds for a stage to look blocks up
HOLD_TIMEOUT_S = 60.0  # seconds for a stage to load adapters from its disk


class StageGroup:
    """Sessions on all stages of a pool.

    The leader reports FAILED and DRAINED on behalf of a lost stage, and leases its pages (the same
    ids on all stages) to other requests. The lost process may still be alive, with its transfers
    and its last step. But these touch only that process's memory, which is used again only after a
    new Join. A successor has its own memory. The same process joins only when nothing from before
    can read or write there (`pool.pipeline.follower`). Until then nothing is opened here
    (`endpoints`).
    """

    def __init__(
        self,
        agent: TransferAgent,
        places: Sequence[Placement],
        reports: SessionReports,
        *,
        grammars: GrammarCheck | None = None,
    ) -> None:
        """Create the group of processes at `places`; this one compiles `grammars` if it samples."""
        self._agent = agent
        self._size = len(places)
        self._grammars = grammars
        self._sampling_ranks = [rank for rank, place in enumerate(places) if place.samples]
        self._members = [
            [rank for rank, place in enumerate(places) if place.tensor.data_rank == data_rank]
            for data_rank in range(places[0].tensor.data_size)
        ]
        self._reports = reports
        self._links: list[StageLink] = []
        self._checks = StageQuestions[pb.GrammarChecked]()
        self._holds = StageQuestions[pb.AdaptersHeld]()
        self._moves = StageQuestions[pb.BlocksMoved]()

    @property
    def session_size(self) -> int:
        """Return the number of processes that take part in each session, joined or not.

        These are the processes of a data rank.
        """
        return len(self._members[0])

    @property
    def formed(self) -> bool:
        return len(self._links) == self._size - 1

    @property
    def links(self) -> tuple[StageLink, ...]:
        """Return the processes that have joined, by rank."""
        return tuple(self._links)

    def endpoints(self, data_rank: int = 0) -> tuple[StageEndpoint, ...]:
        """Return the endpoints of a data rank's processes, by rank.

        Raises:
            UnavailableError: a process of the pool is missing.
        """
        if not self.formed:
            raise UnavailableError(
                f"{self._size - 1 - len(self._links)} of {self._size} stages are missing"
            )
        every = (self._agent.endpoint, *(link.endpoint for link in self._links))
        return tuple(every[rank] for rank in self._members[data_rank])

    def includes(self, stages: Iterable[StageEndpoint]) -> bool:
        """Return whether one of these stages is a process of this pool, of any data rank."""
        joined = (self._agent.endpoint, *(link.endpoint for link in self._links))
        here = {process.incarnation for process in joined}
        return any(stage.incarnation in here for stage in stages)

    @property
    def open_sessions(self) -> int:
        return self._reports.num_watched

    def pool_formed(self, links: list[StageLink]) -> None:
        self._links = list(links)

    def stage_lost(self, rank: int, what: str) -> None:
        """Fail all sessions on a lost stage; `what` describes the loss as a sentence."""
        self._links = [link for link in self._links if link.rank != rank]
        for questions in (self._checks, self._holds, self._moves):
            questions.stage_lost(rank, UnavailableError(what))
        self._reports.stage_lost(rank, what)

    async def check(self, grammar: Grammar) -> None:
        """Compile a grammar on the processes that sample.

        Raises:
            InvalidRequestError: the grammar cannot be followed.
            CapacityError: a process has too many others to compile.
            UnavailableError: a process is missing, lost, or does not respond.
        """
        if not self.formed:
            raise UnavailableError("the stage that compiles grammars is missing")
        here = [] if self._grammars is None else [self._grammars.check(grammar)]
        await asyncio.gather(
            *here,
            *(
                self._check_at(link, grammar)
                for link in self._links
                if link.rank in self._sampling_ranks
            ),
        )

    async def _check_at(self, link: StageLink, grammar: Grammar) -> None:
        message = grammar_to_proto(grammar)
        answer = await self._ask(
            link,
            self._checks,
            lambda number: link.send(
                check_grammar=pb.CheckGrammar(check_id=number, grammar=message)
            ),
            GRAMMAR_TIMEOUT_S,
            "checked a grammar",
        )
        if answer.problem and answer.refused:
            raise grammar.refused(answer.problem)
        if answer.problem:
            raise CapacityError(answer.problem, resource="grammar compiler")

    async def _ask(
        self,
        link: StageLink,
        questions: StageQuestions[AnswerT],
        send: Callable[[int], object],
        timeout_s: float,
        what: str,
    ) -> AnswerT:
        """Ask a process, as `StageQuestions.ask` does, unless it is lost already."""
        if link not in self._links:  # lost before there was a question that could fail with it
            raise UnavailableError("the stage that was to be asked was lost")
        return await questions.ask(link.rank, send, timeout_s=timeout_s, what=what)

    async def hold_adapters(
        self, own: LoadedAdapters | None, keys: Sequence[str], on_engine: OnEngine
    ) -> None:
        """Have all processes hold exactly these adapters; `own` are the leader's.

        Raises:
            ConfigError: an adapter cannot be loaded on one of them.
            UnavailableError: one was lost, or does not answer.
        """
        # All of them have ended before the next change begins, whatever becomes of one.
        ended = await asyncio.gather(
            hold_adapters(own, keys, on_engine),
            *(self._hold_at(link, keys) for link in self._links),
            return_exceptions=True,
        )
        for error in filter(None, ended):
            raise error

    async def _hold_at(self, link: StageLink, keys: Sequence[str]) -> None:
        answer = await self._ask(
            link,
            self._holds,
            lambda number: link.send(hold_adapters=pb.HoldAdapters(number=number, keys=keys)),
            HOLD_TIMEOUT_S,
            "loaded adapters",
        )
        if answer.problem:
            raise ConfigError(
                f"process {link.rank} of the pool: {answer.problem}", field="adapters"
            )

    async def move_blocks(self, own: StageBlocks, data_rank: int, move: BlockMove) -> int:
        """Have all processes of a data rank move blocks; return how many of the first ones all had.

        No process uses the memory of the blocks afterwards, whatever the result.

        Raises:
            UnavailableError: a process is missing, or was lost.
        """
        # Without a limit: until it answers or is lost, a process may use the memory.
        return await self._least(
            data_rank,
            lambda: move_blocks(own, move),
            lambda link, number: link.send(move_blocks=move_to_proto(number, move)),
            math.inf,
        )

    async def find_blocks(
        self,
        own: StageBlocks,
        tier: Tier,
        data_rank: int,
        names: Sequence[bytes],
        *,
        with_state: bool,
    ) -> int:
        """Return how many blocks, from the first on, all processes of a data rank could read.

        With `with_state` the state after the last of them is there, too.

        Raises:
            UnavailableError: a process is missing, was lost, or does not answer.
        """

        def ask(link: StageLink, number: int) -> None:
            question = pb.FindBlocks(number=number, tier=tier, names=names, with_state=with_state)
            link.send(find_blocks=question)

        return await self._least(
            data_rank, lambda: find_blocks(own, names, with_state=with_state), ask, FIND_TIMEOUT_S
        )

    async def _least(
        self,
        data_rank: int,
        here: Callable[[], Awaitable[int]],
        ask: Callable[[StageLink, int], None],
        timeout_s: float,
    ) -> int:
        """Return the least number of blocks of this process, if it is of the data rank, and of
        the others there.
        """
        if not self.formed:
            raise UnavailableError("a stage of the pool is missing")
        members = self._members[data_rank]
        ended = await asyncio.gather(
            *([here()] if 0 in members else ()),
            *(
                self._ask(link, self._moves, partial(ask, link), timeout_s, "moved or found blocks")
                for rank, link in enumerate(self._links, 1)
                if rank in members
            ),
            return_exceptions=True,
        )
        counts = list[int]()
        for result in ended:
            if isinstance(result, BaseException):
                raise result
            counts.append(result if isinstance(result, int) else result.num_blocks)
        return min(counts)

    def stage_answered(self, rank: int, answer: pb.JoinRequest) -> None:
        """Take the answer of a process to a question of this group."""
        if answer.HasField("adapters_held"):
            held = answer.adapters_held
            self._holds.answered(rank, held.number, held)
        elif answer.HasField("blocks_moved"):
            moved = answer.blocks_moved
            self._moves.answered(rank, moved.number, moved)
        else:
            checked = answer.grammar_checked
            self._checks.answered(rank, checked.check_id, checked)

    def open_receive(
        self,
        source: SourceTerms,
        destination: DestinationTerms,
        session: ReceiveSession,
        on_change: Callable[[], object],
        data_rank: int = 0,
    ) -> None:
        """Post receives for the session's current epoch on every stage of the data rank.

        This closes an older epoch. `on_change` is called after each report, on the event loop's
        thread.

        Raises:
            IncompatiblePeerError: the session is open already.
        """
        self._reports.forget_older(session)
        self._reports.watch(session, on_change, self._members[data_rank])
        self._send_open(None, source, destination, data_rank)
        if 0 in self._members[data_rank]:
            self._agent.open_receive(source, destination)

    def open_send(
        self,
        request_key: int,
        source: SourceTerms,
        destination: DestinationTerms,
        session: SendSession,
        on_change: Callable[[], object],
        data_rank: int = 0,
    ) -> None:
        """Send what every stage of the data rank computes for a request.

        Raises:
            IncompatiblePeerError: the session is open already.
        """
        self._reports.watch(session, on_change, self._members[data_rank])
        self._send_open(request_key, source, destination, data_rank)
        if 0 in self._members[data_rank]:
            self._agent.open_send(request_key, source, destination)

    def send_cached(
        self,
        source: SourceTerms,
        destination: DestinationTerms,
        session: SendSession,
        on_change: Callable[[], object],
        data_rank: int = 0,
    ) -> None:
        """Send cached entries from every stage of the data rank.

        Raises:
            InvalidRequestError: the session is open already.
        """
        if self._reports.is_open(destination.session_id):
            raise InvalidRequestError(
                FieldViolation("destination.session_id", "is that of an open session")
            )
        self._reports.watch(session, on_change, self._members[data_rank])
        self._send_open(None, source, destination, data_rank, is_cached=True)
        if 0 in self._members[data_rank]:
            self._agent.send_cached(source, destination)

    def close_session(self, session_id: str) -> None:
        """Release or abort a session on every stage; each then reports DRAINED."""
        self._send_close(session_id, None)
        self._agent.close(session_id)

    def close_request(self, request_key: int, session_id: str | None) -> None:
        """Close the sending side of a request; `session_id` is None if no terms came."""
        self._send_close(session_id, request_key)
        self._agent.close_request(request_key)

    def _send_open(
        self,
        request_key: int | None,
        source: SourceTerms,
        destination: DestinationTerms,
        data_rank: int,
        *,
        is_cached: bool = False,
    ) -> None:
        message = pb.OpenSession(
            session_id=destination.session_id,
            source=codec.source_to_proto(source),
            destination=codec.destination_to_proto(destination),
            request_key=request_key,
            is_cached=is_cached,
        )
        for link in self._links:
            if link.rank in self._members[data_rank]:
                link.send(open_session=message)

    def _send_close(self, session_id: str | None, request_key: int | None) -> None:
        for link in self._links:
            link.send(close_session=pb.CloseSession(session_id=session_id, request_key=request_key))

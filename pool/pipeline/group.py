"""All stages of a formed pool as one end of a handoff: the leader opens and closes a session on
every stage at once, and each stage's reports find the session they are about.

A report takes five hops from the thread of the leader's own transfer agent to the request:

    1  `transfer.agent`: the agent's thread calls `SessionReports.report`, the port it was built with
    2  `report` hands it to the event loop's thread
    3  `deliver` finds the session; a report of another stage enters here, from that stage's Join stream
    4  `Session.on_stage_event` sums up what the stages have reported
    5  `on_change` puts `SessionChanged` into the request's inbox, and `drained` wakes the reclaimer
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.layer_range import Placement
from pool.pipeline.grammars import GrammarCheck, grammar_to_proto
from pool.pipeline.membership import StageLink
from protos import pipeline_pb2 as pb
from runtime.errors import BatonError, CapacityError, PeerLostError, UnavailableError
from runtime.grammar import Grammar
from transfer.agent.agent import TransferAgent
from transfer.plan import codec
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
    StageSessionEvent,
    StageSessionState,
)
from transfer.session import ReceiveSession, SendSession

GRAMMAR_TIMEOUT_S = (
    75.0  # for a stage that has yet to load its tokenizer; what it compiles, it ends by itself
)

Session = ReceiveSession | SendSession


@dataclass(frozen=True)
class _Watched:
    """One epoch of an open session, what is called at its changes, and whether it has drained."""

    session: Session
    on_change: Callable[[], object]
    members: Sequence[int] | None  # processes that take part, in the order of the terms; None: all
    drained: asyncio.Event = field(default_factory=asyncio.Event)


class SessionReports:
    """The port from the transfer agents of a pool to the sessions of its leader. Belongs to the
    event loop's thread, but for `report`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # By session and epoch: a source may get a session again while its older epoch still drains
        # here.
        self._watched: dict[tuple[str, int], _Watched] = {}

    @property
    def num_watched(self) -> int:
        return len(self._watched)

    def report(self, event: StageSessionEvent) -> None:
        """From the leader's own transfer agent; any thread."""
        self._loop.call_soon_threadsafe(self.deliver, 0, event)

    def deliver(self, rank: int, event: StageSessionEvent) -> None:
        """From a stage of the pool. Reports of a session that is not watched are dropped."""
        watched = self._watched.get((event.session_id, event.epoch))
        if watched is None or (watched.members is not None and rank not in watched.members):
            return
        watched.session.on_stage_event(
            rank if watched.members is None else watched.members.index(rank), event
        )
        if watched.session.drained:
            watched.drained.set()
        watched.on_change()

    def stage_lost(self, rank: int, what: str) -> None:
        """Every session that is watched and that it takes part in fails on this stage, for `what`
        became of it, and has nothing left there to drain."""
        error = PeerLostError(what)
        for session_id, epoch in list(self._watched):
            for state in (StageSessionState.FAILED, StageSessionState.DRAINED):
                self.deliver(
                    rank, StageSessionEvent(session_id, epoch, state, error.reason, str(error))
                )

    def watch(
        self,
        session: Session,
        on_change: Callable[[], object],
        members: Sequence[int] | None = None,
    ) -> None:
        """From now to `forget`, reports of the session's present epoch reach it; `on_change` is
        called after each. `members`: the processes that take part, where not all do."""
        self._watched[session.session_id, session.epoch] = _Watched(session, on_change, members)

    def drained(self, session: Session) -> asyncio.Event:
        """Set when every stage has reported the session's present epoch as drained."""
        watched = self._watched.get((session.session_id, session.epoch))
        event = asyncio.Event() if watched is None else watched.drained
        if session.drained:
            event.set()
        return event

    def forget(self, session_id: str, epoch: int) -> None:
        """This epoch of the session is no longer waited for."""
        self._watched.pop((session_id, epoch), None)

    def forget_older(self, session: Session) -> None:
        """The same of all earlier epochs of the session."""
        for session_id, epoch in list(self._watched):
            if session_id == session.session_id and epoch < session.epoch:
                self.forget(session_id, epoch)


class StageGroup:
    """Opens and closes sessions on all stages.

    A lost stage reports FAILED and DRAINED by our hand, and its pages (the same ids on all stages)
    go to others. Its process may live on, its transfers and its last step with it. But these touch
    only that process's memory, which is used again only after a new Join: a successor has memory of
    its own, and the same process joins only when nothing of the time before can read or write there
    any more (`pool.pipeline.follower`). Until then nothing is opened here (`endpoints`).
    """

    def __init__(
        self,
        agent: TransferAgent,
        places: Sequence[Placement],
        reports: SessionReports,
        *,
        grammars: GrammarCheck | None = None,
    ) -> None:
        """`places` of the pool's processes; `grammars` of this one, if it draws."""
        self._agent = agent
        self._size = len(places)
        self._grammars = grammars
        self._drawing = [rank for rank, place in enumerate(places) if place.draws]
        self._members = [
            [rank for rank, place in enumerate(places) if place.tensor.data_rank == data_rank]
            for data_rank in range(places[0].tensor.data_size)
        ]
        self._reports = reports
        self._links: list[StageLink] = []
        self._checks: dict[int, tuple[Grammar, asyncio.Future[None]]] = {}
        self._check_ids = itertools.count(1)

    @property
    def session_size(self) -> int:
        """Processes that take part in each session, whether they are there or not: those of a data
        rank."""
        return len(self._members[0])

    @property
    def formed(self) -> bool:
        return len(self._links) == self._size - 1

    @property
    def links(self) -> tuple[StageLink, ...]:
        """The processes that have joined, by rank."""
        return tuple(self._links)

    def endpoints(self, data_rank: int = 0) -> tuple[StageEndpoint, ...]:
        """Of the processes of a data rank, by rank. Raises UnavailableError while any is
        missing."""
        if not self.formed:
            raise UnavailableError(
                f"{self._size - 1 - len(self._links)} of {self._size} stages are missing"
            )
        every = (self._agent.endpoint, *(link.endpoint for link in self._links))
        return tuple(every[rank] for rank in self._members[data_rank])

    @property
    def open_sessions(self) -> int:
        return self._reports.num_watched

    def pool_formed(self, links: list[StageLink]) -> None:
        self._links = list(links)

    def stage_lost(self, rank: int, what: str) -> None:
        """`what` became of it, as a sentence: the error of all sessions."""
        self._links = [link for link in self._links if link.rank != rank]
        if rank in self._drawing:
            self._fail_checks(UnavailableError(what))
        self._reports.stage_lost(rank, what)

    async def check(self, grammar: Grammar) -> None:
        """Have the processes that draw compile it.

        Raises:
            InvalidRequestError: it cannot be followed.
            CapacityError: one has too many others to compile.
            UnavailableError: one is missing, gone, or does not answer.
        """
        if not self.formed:
            raise UnavailableError("the stage that follows grammars is missing")
        here = [] if self._grammars is None else [self._grammars.check(grammar)]
        await asyncio.gather(
            *here,
            *(self._check_at(link, grammar) for link in self._links if link.rank in self._drawing),
        )

    async def _check_at(self, link: StageLink, grammar: Grammar) -> None:
        if link not in self._links:  # lost since, before there was a check that could fail with it
            raise UnavailableError("the stage that follows grammars is gone")
        check_id, checked = next(self._check_ids), asyncio.get_running_loop().create_future()
        self._checks[check_id] = grammar, checked
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT_S):
                link.send(
                    check_grammar=pb.CheckGrammar(
                        check_id=check_id, grammar=grammar_to_proto(grammar)
                    )
                )
                await checked
        except TimeoutError:
            raise UnavailableError(
                f"the last stage has not checked a grammar within {GRAMMAR_TIMEOUT_S:g} s"
            ) from None
        finally:
            del self._checks[check_id]

    def grammar_checked(self, answer: pb.GrammarChecked) -> None:
        grammar, checked = self._checks.get(answer.check_id, (None, None))
        if grammar is None or checked is None or checked.done():
            return
        if not answer.problem:
            checked.set_result(None)
        elif answer.refused:
            checked.set_exception(grammar.refused(answer.problem))
        else:
            checked.set_exception(CapacityError(answer.problem, resource="grammar compiler"))

    def _fail_checks(self, error: BatonError) -> None:
        for _, checked in self._checks.values():
            if not checked.done():
                checked.set_exception(error.again())

    def open_receive(
        self,
        source: SourceTerms,
        destination: DestinationTerms,
        session: ReceiveSession,
        on_change: Callable[[], object],
        data_rank: int = 0,
    ) -> None:
        """Post receives for the session's present epoch on every stage of the data rank; an older
        one is closed by that. `on_change` is called after each report, on the event loop's
        thread."""
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
        self._reports.watch(session, on_change, self._members[data_rank])
        self._send_open(request_key, source, destination, data_rank)
        if 0 in self._members[data_rank]:
            self._agent.open_send(request_key, source, destination)

    def close_receive(self, session_id: str) -> None:
        """Release or abort on every stage; DRAINED follows from each."""
        self._send_close(session_id, None)
        self._agent.close(session_id)

    def close_request(self, request_key: int, session_id: str | None) -> None:
        """The sending side is done with this request; `session_id` is None if no destination terms
        ever came."""
        self._send_close(session_id, request_key)
        self._agent.close_request(request_key)

    def _send_open(
        self,
        request_key: int | None,
        source: SourceTerms,
        destination: DestinationTerms,
        data_rank: int,
    ) -> None:
        message = pb.OpenSession(
            session_id=destination.session_id,
            source=codec.source_to_proto(source),
            destination=codec.destination_to_proto(destination),
            request_key=request_key,
        )
        for link in self._links:
            if link.rank in self._members[data_rank]:
                link.send(open_session=message)

    def _send_close(self, session_id: str | None, request_key: int | None) -> None:
        for link in self._links:
            link.send(close_session=pb.CloseSession(session_id=session_id, request_key=request_key))

"""All stages of a formed pool as one end of a handoff: the leader opens and closes a session on every stage at once.

Belongs to the event loop's thread. Reports of remote stages come over their Join streams, those of the leader's own
stage from its transfer agent.
"""

import asyncio
import itertools
from collections.abc import Callable

from pool.pipeline.membership import StageLink
from pool.request.conversion import grammar_to_proto
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

GRAMMAR_TIMEOUT_S = 75.0  # for a stage that has yet to load its tokenizer; what it compiles, it ends by itself

Listener = Callable[[int, StageSessionEvent], object]


class StageGroup:
    """Opens, closes and hears sessions on all stages.

    A lost stage reports FAILED and DRAINED by our hand, and its pages (the same ids on all stages) go to others. Its
    process may live on, its transfers and its last step with it. But these touch only that process's memory, which
    is used again only after a new Join: a successor has memory of its own, and the same process asks to join only
    when nothing of the time before can read or write there any more (`pool.pipeline.follower`). Until then nothing is
    opened here (`endpoints`).
    """

    def __init__(self, agent: TransferAgent, size: int) -> None:
        self._agent = agent
        self._size = size
        self._links: list[StageLink] = []
        # By session and epoch: a source may be asked for a session again while its older epoch still drains here.
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._checks: dict[int, tuple[Grammar, asyncio.Future[None]]] = {}
        self._check_ids = itertools.count(1)

    @property
    def formed(self) -> bool:
        return len(self._links) == self._size - 1

    @property
    def endpoints(self) -> tuple[StageEndpoint, ...]:
        """By rank. Raises UnavailableError while a stage is missing."""
        if not self.formed:
            raise UnavailableError(f"{self._size - 1 - len(self._links)} of {self._size} stages are missing")
        return (self._agent.endpoint, *(link.endpoint for link in self._links))

    @property
    def open_sessions(self) -> int:
        return len(self._listeners)

    def pool_formed(self, links: list[StageLink]) -> None:
        self._links = list(links)

    def stage_lost(self, rank: int) -> None:
        self._links = [link for link in self._links if link.rank != rank]
        error = PeerLostError(f"stage {rank} of the pool died")
        if rank == self._size - 1:
            self._fail_checks(UnavailableError(str(error)))
        for session_id, epoch in list(self._listeners):
            for state in (StageSessionState.FAILED, StageSessionState.DRAINED):
                self.stage_event(rank, StageSessionEvent(session_id, epoch, state, error.reason, str(error)))

    def stage_event(self, rank: int, event: StageSessionEvent) -> None:
        listener = self._listeners.get((event.session_id, event.epoch))
        if listener is not None:
            listener(rank, event)

    async def check(self, grammar: Grammar) -> None:
        """Have the last stage, which draws, compile it.

        Raises:
            InvalidRequestError: it cannot be followed.
            CapacityError: the stage has too many others to compile.
            UnavailableError: the stage is missing, gone, or does not answer.
        """
        if not self.formed:
            raise UnavailableError("the stage that follows grammars is missing")
        check_id, checked = next(self._check_ids), asyncio.get_running_loop().create_future()
        self._checks[check_id] = grammar, checked
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT_S):
                self._links[-1].send(check_grammar=pb.CheckGrammar(check_id=check_id,
                                                                   grammar=grammar_to_proto(grammar)))
                await checked
        except TimeoutError:
            raise UnavailableError(f"the last stage has not checked a grammar within {GRAMMAR_TIMEOUT_S:g} s") from None
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
                checked.set_exception(error)

    def open_receive(self, source: SourceTerms, destination: DestinationTerms, listener: Listener) -> None:
        """Post receives for this epoch on every stage; an older epoch of the session is closed by that."""
        for session_id, epoch in [key for key in self._listeners if key[0] == destination.session_id]:
            self.forget(session_id, epoch)
        self._listeners[destination.session_id, destination.epoch] = listener
        self._send_open(0, source, destination)
        self._agent.open_receive(source, destination)

    def open_send(self, request_key: int, source: SourceTerms, destination: DestinationTerms,
                  listener: Listener) -> None:
        self._listeners[destination.session_id, destination.epoch] = listener
        self._send_open(request_key, source, destination)
        self._agent.open_send(request_key, source, destination)

    def close_receive(self, session_id: str) -> None:
        """Release or abort on every stage; DRAINED follows from each."""
        self._send_close(session_id, 0)
        self._agent.close(session_id)

    def close_request(self, request_key: int, session_id: str) -> None:
        """The sending side is done with this request; `session_id` is empty if no destination terms ever came."""
        self._send_close(session_id, request_key)
        self._agent.close_request(request_key)

    def listen(self, session_id: str, epoch: int, listener: Listener) -> None:
        """Send an open session's further reports of this epoch to somebody else."""
        if (session_id, epoch) in self._listeners:
            self._listeners[session_id, epoch] = listener

    def forget(self, session_id: str, epoch: int) -> None:
        """Nobody listens to this epoch of the session any more."""
        self._listeners.pop((session_id, epoch), None)

    def _send_open(self, request_key: int, source: SourceTerms, destination: DestinationTerms) -> None:
        message = pb.OpenSession(session_id=destination.session_id, source=codec.source_to_proto(source),
                                 destination=codec.destination_to_proto(destination), request_key=request_key)
        for link in self._links:
            link.send(open_session=message)

    def _send_close(self, session_id: str, request_key: int) -> None:
        for link in self._links:
            link.send(close_session=pb.CloseSession(session_id=session_id, request_key=request_key))

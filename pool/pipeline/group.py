"""All stages of a formed pool as one end of a handoff: the leader opens and closes a session on every stage at once.

Belongs to the event loop's thread. Reports of remote stages come over their Join streams, those of the leader's own
stage from its transfer agent.
"""

from collections.abc import Callable

from pool.pipeline.membership import StageLink
from protos import pipeline_pb2 as pb
from runtime.errors import PeerLostError, UnavailableError
from transfer.agent.agent import TransferAgent
from transfer.plan import codec
from transfer.plan.terms import Landing, SourceTerms, StageEndpoint, StageSessionEvent, StageSessionState

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

    def stage_lost(self, rank: int, what: str) -> None:
        """`what` became of it, as a sentence: the error of all sessions."""
        self._links = [link for link in self._links if link.rank != rank]
        error = PeerLostError(what)
        for session_id, epoch in list(self._listeners):
            for state in (StageSessionState.FAILED, StageSessionState.DRAINED):
                self.stage_event(rank, StageSessionEvent(session_id, epoch, state, error.reason, str(error)))

    def stage_event(self, rank: int, event: StageSessionEvent) -> None:
        listener = self._listeners.get((event.session_id, event.epoch))
        if listener is not None:
            listener(rank, event)

    def open_receive(self, source: SourceTerms, landing: Landing, listener: Listener) -> None:
        """Post receives for this epoch on every stage; an older epoch of the session is closed by that."""
        for session_id, epoch in [key for key in self._listeners if key[0] == landing.session_id]:
            self.forget(session_id, epoch)
        self._listeners[landing.session_id, landing.epoch] = listener
        self._send_open(0, source, landing)
        self._agent.open_receive(source, landing)

    def open_send(self, request_key: int, source: SourceTerms, landing: Landing, listener: Listener) -> None:
        self._listeners[landing.session_id, landing.epoch] = listener
        self._send_open(request_key, source, landing)
        self._agent.open_send(request_key, source, landing)

    def close_receive(self, session_id: str) -> None:
        """Release or abort on every stage; DRAINED follows from each."""
        self._send_close(session_id, 0)
        self._agent.close(session_id)

    def close_request(self, request_key: int, session_id: str) -> None:
        """The sending side is done with this request; `session_id` is empty if no landing ever came."""
        self._send_close(session_id, request_key)
        self._agent.close_request(request_key)

    def listen(self, session_id: str, epoch: int, listener: Listener) -> None:
        """Send an open session's further reports of this epoch to somebody else."""
        if (session_id, epoch) in self._listeners:
            self._listeners[session_id, epoch] = listener

    def forget(self, session_id: str, epoch: int) -> None:
        """Nobody listens to this epoch of the session any more."""
        self._listeners.pop((session_id, epoch), None)

    def _send_open(self, request_key: int, source: SourceTerms, landing: Landing) -> None:
        message = pb.OpenSession(session_id=landing.session_id, source=codec.source_to_proto(source),
                                 landing=codec.landing_to_proto(landing), request_key=request_key)
        for link in self._links:
            link.send(open_session=message)

    def _send_close(self, session_id: str, request_key: int) -> None:
        for link in self._links:
            link.send(close_session=pb.CloseSession(session_id=session_id, request_key=request_key))

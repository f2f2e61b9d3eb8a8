"""The reports of the stages of a pool on its sessions.

A report takes five hops from the thread of the leader's own transfer agent to the request:

    1  `transfer.agent`: the agent's thread calls `SessionReports.report`, its port
    2  `report` hands it to the event loop's thread
    3  `deliver` finds the session; a report of another stage enters here, from its Join stream
    4  `TransferSession.on_stage_event` combines the reports of the stages
    5  `on_change` puts `SessionChanged` into the request's inbox, and `drained` wakes the reclaimer
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.errors import HandoffError, IncompatiblePeerError, PeerLostError
from transfer.plan.handoff_terms import StageSessionEvent, StageSessionState
from transfer.session import ReceiveSession, SendSession
from transfer.session_states import ReceiveState, SendState

TransferSession = ReceiveSession | SendSession


@dataclass(frozen=True)
class _OpenSession:
    """One epoch of an open session, with the listener to its changes and its drain event."""

    session: TransferSession
    on_change: Callable[[], object]
    members: Sequence[int] | None  # processes that take part, in the order of the terms; None: all
    drained: asyncio.Event = field(default_factory=asyncio.Event)


class SessionReports:
    """The port from the transfer agents of a pool to the sessions of its leader.

    Belongs to the event loop's thread, except for `report`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Keyed by session and epoch: a source may open a session again while its older epoch still
        # drains here.
        self._watched: dict[tuple[str, int], _OpenSession] = {}

    @property
    def num_watched(self) -> int:
        return len(self._watched)

    def is_open(self, session_id: str) -> bool:
        """Return whether an epoch of the session is watched."""
        return any(watched == session_id for watched, _ in self._watched)

    def report(self, event: StageSessionEvent) -> None:
        """Deliver a report of the leader's own transfer agent. Any thread."""
        self._loop.call_soon_threadsafe(self.deliver, 0, event)

    def deliver(self, rank: int, event: StageSessionEvent) -> None:
        """Deliver a report of a stage. Reports of a session that is not watched are dropped."""
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
        """Report FAILED and DRAINED for a lost stage in all watched sessions that it takes part in.

        `what` describes the loss.
        """
        error = PeerLostError(what)
        for session_id, epoch in list(self._watched):
            for state in (StageSessionState.FAILED, StageSessionState.DRAINED):
                self.deliver(
                    rank, StageSessionEvent(session_id, epoch, state, error.reason, str(error))
                )

    def watch(
        self,
        session: TransferSession,
        on_change: Callable[[], object],
        members: Sequence[int] | None = None,
    ) -> None:
        """Deliver reports of the session's current epoch until `forget`.

        `on_change` is called after each report. `members` are the processes that take part, if not
        all.

        Raises:
            IncompatiblePeerError: the epoch is watched already, or an epoch of the other direction is.
        """
        key = session.session_id, session.epoch
        if any(
            name == session.session_id
            and (epoch == session.epoch or type(other.session) is not type(session))
            for (name, epoch), other in self._watched.items()
        ):
            raise IncompatiblePeerError("destination.session_id is that of an open session")
        self._watched[key] = _OpenSession(session, on_change, members)

    def drained(self, session: TransferSession) -> asyncio.Event:
        """Return an event that is set when every stage has drained the session's current epoch."""
        watched = self._watched.get((session.session_id, session.epoch))
        event = asyncio.Event() if watched is None else watched.drained
        if session.drained:
            event.set()
        return event

    def forget(self, session_id: str, epoch: int) -> None:
        """Stop watching this epoch of the session."""
        self._watched.pop((session_id, epoch), None)

    def forget_older(self, session: TransferSession) -> None:
        """Stop watching all earlier epochs of the session."""
        for session_id, epoch in list(self._watched):
            if session_id == session.session_id and epoch < session.epoch:
                self.forget(session_id, epoch)


async def until_state(
    session: TransferSession, changed: asyncio.Event, state: ReceiveState | SendState
) -> None:
    """Wait until a session is in this state. `changed` is set after each of its reports.

    Raises:
        BatonError: it failed, or one of its states took too long.
    """
    while session.state is not state:
        if session.error is not None:
            raise session.error
        try:
            async with asyncio.timeout(session.remaining_s()):
                await changed.wait()
        except TimeoutError:
            raise HandoffError(
                f"session {session.session_id} was {session.state} for too long"
            ) from None
        changed.clear()

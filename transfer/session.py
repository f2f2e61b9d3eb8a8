"""State of one handoff on its leader, derived from the reports of the stages.

    receiving   RESERVED ─▶ RECEIVING ─▶ COMPLETE ─▶ COMMITTED    any state before that, FAILED ─▶ RESERVED (next epoch)
    sending     PLANNED ──▶ SENDING ───▶ SENT ─────▶ RELEASED
    both        any state but COMMITTED and RELEASED ─▶ FAILED or ABORTED

The sessions are pure; time comes from the clock.

Whether the memory may be released is a separate question, `drained`: every stage has reported
DRAINED for the current epoch. A stage starts an epoch only after it has drained the previous one,
so the current epoch covers all of them.

The two sides never wait for each other. Each one follows
only the reports of its own stages, its timeouts and the end of its stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Self

from runtime.clock import Clock, Deadline
from runtime.errors import (
    BatonError,
    DeadlineError,
    HandoffError,
    IncompatiblePeerError,
    IntegrityError,
    InternalError,
    PeerLostError,
)
from transfer.plan.handoff_terms import ChunkTiming, StageSessionEvent, StageSessionState
from transfer.session_states import (
    RECEIVE_TRANSITIONS,
    SEND_TRANSITIONS,
    ReceiveState,
    SendState,
    SessionInput,
    State,
    Table,
)


@dataclass(frozen=True)
class SessionTimeouts:
    """Timeouts of the states of a session, in seconds.

    In order: opening on every stage, moving the bytes, waiting for the commit. After a failure:
    waiting for the report that the source is lost, then for another source. No timeout starts while
    the request is still queued.
    """

    open_s: float = 10.0
    move_s: float = 120.0
    finish_s: float = 120.0
    report_s: float = 10.0
    replace_s: float = 120.0

    @classmethod
    def within(cls, timeout_s: float) -> Self:
        """Return the timeouts of a request that waits this long for a prefill, local or remote."""
        return cls(move_s=timeout_s, finish_s=timeout_s, replace_s=timeout_s)


_StageError = (
    type[HandoffError]
    | type[IncompatiblePeerError]
    | type[PeerLostError]
    | type[DeadlineError]
    | type[InternalError]
)
_ERRORS: dict[str, _StageError] = {
    error.reason: error
    for error in (
        HandoffError,
        IncompatiblePeerError,
        IntegrityError,
        PeerLostError,
        DeadlineError,
        InternalError,
    )
}
# A stage that cannot reach its destination is not lost itself: its pool can serve other requests.
_SEND_ERRORS: dict[str, _StageError] = _ERRORS | {PeerLostError.reason: HandoffError}


class _Session(Generic[State]):
    """State shared by both sides: reports by stage, epochs, timeouts."""

    def __init__(
        self,
        session_id: str,
        *,
        num_stages: int,
        clock: Clock,
        table: Table[State],
        timeouts: Mapping[State, float],
        first: State,
        errors: Mapping[str, _StageError] = _ERRORS,
    ) -> None:
        self.session_id = session_id
        self.epoch = 0
        self.state: State = first
        self.error: BatonError | None = None
        self.num_bytes = 0
        self.num_late_events = 0
        # Of the stage in this process, once it has sent everything.
        self.chunk_timings: tuple[ChunkTiming, ...] = ()
        self._num_stages = num_stages
        self._clock = clock
        self._table: Table[State] = table
        self._timeouts: Mapping[State, float] = timeouts
        self._errors = errors
        self._reports: dict[int, set[StageSessionState]] = {}
        self._entered_at_s = clock.now()

    @property
    def drained(self) -> bool:
        """Return whether no stage can access the memory any more, so that leases may end."""
        return self._count(StageSessionState.DRAINED) == self._num_stages

    @property
    def undrained(self) -> list[int]:
        """Return the stages that may still access the memory."""
        return [
            stage
            for stage in range(self._num_stages)
            if StageSessionState.DRAINED not in self._reports.get(stage, ())
        ]

    @property
    def is_over(self) -> bool:
        """Return whether only drains can still happen."""
        return not any(
            (self.state, event) in self._table
            for event in (
                SessionInput.ALL_OPEN,
                SessionInput.ALL_COMPLETE,
                SessionInput.FINISH,
                SessionInput.NEXT_EPOCH,
            )
        )

    def on_stage_event(self, rank: int, event: StageSessionEvent) -> State:
        """Process the report of one stage.

        Repeated reports and reports of another epoch are counted and change nothing.

        Raises:
            InternalError: the rank or session id does not belong to this session.
        """
        if event.session_id != self.session_id or not 0 <= rank < self._num_stages:
            raise InternalError(
                f"session {self.session_id} of {self._num_stages} stages got a report of "
                f"{event.session_id} from stage {rank}"
            )
        reports = self._reports.setdefault(rank, set())
        if (
            event.epoch != self.epoch
            or event.state in reports
            or StageSessionState.DRAINED in reports
        ):
            self.num_late_events += 1
            return self.state
        reports.add(event.state)
        if event.state is StageSessionState.COMPLETE:
            self.num_bytes += event.num_bytes
            self.chunk_timings += event.chunk_timings
        if event.state is StageSessionState.FAILED:
            self._fail(
                self._errors.get(event.error_reason, HandoffError)(
                    f"stage {rank}: {event.error_text}"
                )
            )
        elif event.state is StageSessionState.DRAINED and not self._is_closing:
            self._fail(HandoffError(f"stage {rank} has closed the session"))
        elif self._count(StageSessionState.COMPLETE) == self._num_stages:
            # The last OPEN and the last COMPLETE may arrive in one step.
            self._move(SessionInput.ALL_OPEN)
            self._move(SessionInput.ALL_COMPLETE)
        elif self._count(StageSessionState.OPEN) == self._num_stages:
            self._move(SessionInput.ALL_OPEN)
        return self.state

    def abort(self, reason: str) -> State:
        """Abort the session, because the client, its stream or the pool is gone.

        Idempotent; a finished session stays finished.
        """
        if self._move(SessionInput.ABORT) and self.error is None:
            self.error = HandoffError(f"session {self.session_id} was aborted: {reason}")
        return self.state

    def stage_lost(self, rank: int, error: BatonError) -> State:
        """Fail the session because the process of a stage is gone. Its memory needs no drain."""
        self._reports.setdefault(rank, set()).add(StageSessionState.DRAINED)
        self._fail(error)
        return self.state

    def fail(self, error: BatonError) -> State:
        """Fail the session for a reason outside the reports of its stages."""
        self._fail(error)
        return self.state

    def remaining_s(self) -> float | None:
        """Return the seconds until the current state must end, never negative; None if unlimited.

        The task that serves the session waits that long at most, then aborts it.
        """
        timeout_s = self._timeout_s()
        if timeout_s is None:
            return None
        return Deadline(self._clock, self._entered_at_s + timeout_s).remaining_s()

    def _timeout_s(self) -> float | None:
        """Return the timeout of the current state in seconds, or None."""
        return self._timeouts.get(self.state)

    @property
    def _is_closing(self) -> bool:
        return (self.state, SessionInput.ALL_OPEN) not in self._table and (
            self.state,
            SessionInput.ALL_COMPLETE,
        ) not in self._table

    def _count(self, state: StageSessionState) -> int:
        return sum(state in reports for reports in self._reports.values())

    def _fail(self, error: BatonError) -> None:
        if self._move(SessionInput.FAIL):
            self.error = error

    def _move(self, event: SessionInput) -> bool:
        """Make the transition if the table has it; return whether it does."""
        target = self._table.get((self.state, event))
        if target is None:
            return False
        self.state = target
        self._entered_at_s = self._clock.now()
        return True

    def _finish(self) -> State:
        if not self._move(SessionInput.FINISH):
            raise InternalError(f"session {self.session_id} cannot finish from {self.state}")
        return self.state


class ReceiveSession(_Session[ReceiveState]):
    """Decode side of a session. COMPLETE if every stage has everything; FAILED if one fails."""

    def __init__(
        self,
        session_id: str,
        *,
        num_stages: int,
        clock: Clock,
        timeouts: SessionTimeouts | None = None,
    ) -> None:
        timeouts = timeouts or SessionTimeouts()
        super().__init__(
            session_id,
            num_stages=num_stages,
            clock=clock,
            table=RECEIVE_TRANSITIONS,
            first=ReceiveState.RESERVED,
            timeouts={
                ReceiveState.RESERVED: timeouts.open_s,
                ReceiveState.RECEIVING: timeouts.move_s,
                ReceiveState.COMPLETE: timeouts.finish_s,
                ReceiveState.FAILED: timeouts.report_s,
            },
        )
        self._replace_s = timeouts.replace_s
        self._is_source_lost = False

    def source_lost(self) -> None:
        """Record that the source is lost and will be replaced, the likely cause of a failure."""
        self._is_source_lost = True
        if self.state is ReceiveState.FAILED:
            self._entered_at_s = self._clock.now()

    def commit(self) -> ReceiveState:
        """Transfer the memory to the request; the caller closes the session on every stage.

        Raises InternalError unless COMPLETE.
        """
        return self._finish()

    def next_epoch(self) -> int:
        """Start an epoch with another source for the same reservation.

        Returns the new epoch, for its destination terms.

        Raises:
            InternalError: the session is over.
        """
        if not self._move(SessionInput.NEXT_EPOCH):
            raise InternalError(f"session {self.session_id} cannot start over from {self.state}")
        self.epoch += 1
        self.error = None
        self.num_bytes = 0
        self.chunk_timings = ()
        self._is_source_lost = False
        self._reports.clear()
        return self.epoch

    def _timeout_s(self) -> float | None:
        if self.state is ReceiveState.FAILED and self._is_source_lost:
            return self._replace_s
        return super()._timeout_s()


class SendSession(_Session[SendState]):
    """Prefill side of a session for one epoch.

    SENT if every stage has sent everything; FAILED if one fails.
    """

    def __init__(
        self,
        session_id: str,
        *,
        epoch: int,
        num_stages: int,
        clock: Clock,
        timeouts: SessionTimeouts | None = None,
    ) -> None:
        timeouts = timeouts or SessionTimeouts()
        super().__init__(
            session_id,
            num_stages=num_stages,
            clock=clock,
            table=SEND_TRANSITIONS,
            first=SendState.PLANNED,
            errors=_SEND_ERRORS,
            timeouts={
                SendState.PLANNED: timeouts.open_s,
                SendState.SENDING: timeouts.move_s,
                SendState.SENT: timeouts.finish_s,
            },
        )
        self.epoch = epoch
        self._is_computed = False

    def computed(self) -> None:
        """Start the time limit of sending: the whole prompt is computed.

        Until now sending was limited by the computation.
        """
        self._is_computed = True
        if self.state is SendState.SENDING:
            self._entered_at_s = self._clock.now()

    def release(self) -> SendState:
        """Record that decode has committed: the pages may be released once drained.

        Raises InternalError unless SENT.
        """
        return self._finish()

    def _timeout_s(self) -> float | None:
        return (
            None
            if self.state is SendState.SENDING and not self._is_computed
            else super()._timeout_s()
        )

"""The leader's view of one handoff: what the stages report, summed up. Pure; time comes from the
clock.

    receiving   RESERVED ─▶ RECEIVING ─▶ COMPLETE ─▶ COMMITTED    any state before that, FAILED ─▶ RESERVED (next epoch)
    sending     PLANNED ──▶ SENDING ───▶ SENT ─────▶ RELEASED
    both        any state but COMMITTED and RELEASED ─▶ FAILED or ABORTED

Whether the memory may be given back is a separate question, `drained`: every stage has reported
DRAINED for the present epoch. (A stage starts an epoch only after it has drained the one before, so
the present one stands for all.) The two sides never wait for each other: each converges on its own
stages' reports, its deadlines and its stream's end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Self, TypeVar

from runtime.clock import Clock
from runtime.errors import (
    BatonError,
    DeadlineError,
    HandoffError,
    IntegrityError,
    InternalError,
    PeerLostError,
)
from transfer.plan.handoff_terms import ChunkTiming, StageSessionEvent, StageSessionState


class SessionInput(StrEnum):
    """What can happen to a session."""

    ALL_OPEN = "all_open"
    ALL_COMPLETE = "all_complete"
    FINISH = "finish"  # commit or release
    NEXT_EPOCH = "next_epoch"
    FAIL = "fail"
    ABORT = "abort"


class ReceiveState(StrEnum):
    """How far the decode side of a session is."""

    RESERVED = "reserved"  # pages and slot are held; stages are posting receives
    RECEIVING = "receiving"  # every stage has posted: the destination terms may travel
    COMPLETE = "complete"  # everything landed and was checked
    COMMITTED = "committed"  # the memory is the request's now
    FAILED = "failed"
    ABORTED = "aborted"


class SendState(StrEnum):
    """How far the prefill side of a session is."""

    PLANNED = "planned"
    SENDING = "sending"
    SENT = "sent"  # every byte has left
    RELEASED = "released"  # decode has committed
    FAILED = "failed"
    ABORTED = "aborted"


State = TypeVar("State", ReceiveState, SendState)
Table = Mapping[tuple[State, SessionInput], State]

RECEIVE_TRANSITIONS: Table[ReceiveState] = {
    (ReceiveState.RESERVED, SessionInput.ALL_OPEN): ReceiveState.RECEIVING,
    (ReceiveState.RECEIVING, SessionInput.ALL_COMPLETE): ReceiveState.COMPLETE,
    (ReceiveState.COMPLETE, SessionInput.FINISH): ReceiveState.COMMITTED,
    # From COMPLETE, too: the source may be gone with the first token untold.
    **{
        (state, SessionInput.NEXT_EPOCH): ReceiveState.RESERVED
        for state in (
            ReceiveState.RESERVED,
            ReceiveState.RECEIVING,
            ReceiveState.COMPLETE,
            ReceiveState.FAILED,
        )
    },
    **{
        (state, SessionInput.FAIL): ReceiveState.FAILED
        for state in (ReceiveState.RESERVED, ReceiveState.RECEIVING, ReceiveState.COMPLETE)
    },
    **{
        (state, SessionInput.ABORT): ReceiveState.ABORTED
        for state in (
            ReceiveState.RESERVED,
            ReceiveState.RECEIVING,
            ReceiveState.COMPLETE,
            ReceiveState.FAILED,
        )
    },
}

SEND_TRANSITIONS: Table[SendState] = {
    (SendState.PLANNED, SessionInput.ALL_OPEN): SendState.SENDING,
    (SendState.SENDING, SessionInput.ALL_COMPLETE): SendState.SENT,
    (SendState.SENT, SessionInput.FINISH): SendState.RELEASED,
    **{
        (state, SessionInput.FAIL): SendState.FAILED
        for state in (SendState.PLANNED, SendState.SENDING, SendState.SENT)
    },
    **{
        (state, SessionInput.ABORT): SendState.ABORTED
        for state in (SendState.PLANNED, SendState.SENDING, SendState.SENT, SendState.FAILED)
    },
}


@dataclass(frozen=True)
class SessionDeadlines:
    """Seconds a session may stay in a state: opening on every stage, moving its bytes, waiting for
    the commit; after it failed, waiting for the word that its source is lost, and then for another
    one. None of them begins while the request is still queued."""

    open_s: float = 10.0
    move_s: float = 120.0
    finish_s: float = 120.0
    word_s: float = 10.0
    replace_s: float = 120.0

    @classmethod
    def within(cls, patience_s: float) -> Self:
        """For a request that waits that long for a prompt to be computed, here or there."""
        return cls(move_s=patience_s, finish_s=patience_s, replace_s=patience_s)


_StageError = type[HandoffError] | type[PeerLostError] | type[DeadlineError] | type[InternalError]
_ERRORS: dict[str, _StageError] = {
    error.reason: error
    for error in (HandoffError, IntegrityError, PeerLostError, DeadlineError, InternalError)
}
# A stage that cannot reach what it sends to is not lost itself: its pool can serve others.
_SEND_ERRORS: dict[str, _StageError] = _ERRORS | {PeerLostError.reason: HandoffError}


class _Session(Generic[State]):
    """What both sides share: reports by stage, epochs, deadlines."""

    def __init__(
        self,
        session_id: str,
        *,
        num_stages: int,
        clock: Clock,
        table: Table[State],
        deadlines: Mapping[State, float],
        first: State,
        errors: Mapping[str, _StageError] = _ERRORS,
    ) -> None:
        self.session_id = session_id
        self.epoch = 0
        self.state: State = first
        self.error: BatonError | None = None
        self.num_bytes = 0
        self.num_late_events = 0
        self.chunk_timings: tuple[
            ChunkTiming, ...
        ] = ()  # of the stage in this process, once it has sent everything
        self._num_stages = num_stages
        self._clock = clock
        self._table: Table[State] = table
        self._deadlines: Mapping[State, float] = deadlines
        self._errors = errors
        self._reports: dict[int, set[StageSessionState]] = {}
        self._entered_at_s = clock.now()

    @property
    def drained(self) -> bool:
        """No stage can still read or write the session's memory: leases may end (or pass on)."""
        return self._count(StageSessionState.DRAINED) == self._num_stages

    @property
    def is_over(self) -> bool:
        """Nothing but drains can still happen."""
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
        """Take one stage's report. Reports of another epoch, and repeated ones, are counted and
        change nothing.

        Raises:
            InternalError: a rank or session id that is not this session's.
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
            self._fail(HandoffError(f"stage {rank} has given the session up"))
        elif self._count(StageSessionState.COMPLETE) == self._num_stages:
            self._move(
                SessionInput.ALL_OPEN
            )  # the last OPEN and the last COMPLETE may come in one step
            self._move(SessionInput.ALL_COMPLETE)
        elif self._count(StageSessionState.OPEN) == self._num_stages:
            self._move(SessionInput.ALL_OPEN)
        return self.state

    def abort(self, reason: str) -> State:
        """The client, its stream or the pool is gone. Idempotent; a finished session stays
        finished."""
        if self._move(SessionInput.ABORT) and self.error is None:
            self.error = HandoffError(f"session {self.session_id} was aborted: {reason}")
        return self.state

    def stage_lost(self, rank: int, error: BatonError) -> State:
        """A stage's process is gone, its memory with it: nothing is left there to drain."""
        self._reports.setdefault(rank, set()).add(StageSessionState.DRAINED)
        self._fail(error)
        return self.state

    def fail(self, error: BatonError) -> State:
        """Something outside the stages' reports went wrong."""
        self._fail(error)
        return self.state

    def time_left_s(self) -> float | None:
        """Until the present state must have ended, never negative; None if it may last. The task
        that serves the session waits no longer than that, and then aborts it."""
        limit_s = self._limit_s()
        return (
            None if limit_s is None else max(0.0, self._entered_at_s + limit_s - self._clock.now())
        )

    def _limit_s(self) -> float | None:
        """How long the present state may last."""
        return self._deadlines.get(self.state)

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
        """Take the transition if the table has it; whether it had."""
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
    """A decode pool's side. COMPLETE when every stage has everything; FAILED when one fails."""

    def __init__(
        self,
        session_id: str,
        *,
        num_stages: int,
        clock: Clock,
        deadlines: SessionDeadlines | None = None,
    ) -> None:
        limits = deadlines or SessionDeadlines()
        super().__init__(
            session_id,
            num_stages=num_stages,
            clock=clock,
            table=RECEIVE_TRANSITIONS,
            first=ReceiveState.RESERVED,
            deadlines={
                ReceiveState.RESERVED: limits.open_s,
                ReceiveState.RECEIVING: limits.move_s,
                ReceiveState.COMPLETE: limits.finish_s,
                ReceiveState.FAILED: limits.word_s,
            },
        )
        self._replace_s = limits.replace_s
        self._is_source_lost = False

    def source_lost(self) -> None:
        """The source is known to be gone and another one will follow: if the session has failed,
        this was why."""
        self._is_source_lost = True
        if self.state is ReceiveState.FAILED:
            self._entered_at_s = self._clock.now()

    def commit(self) -> ReceiveState:
        """The request takes the memory over; close the session on every stage. Raises InternalError
        unless COMPLETE."""
        return self._finish()

    def next_epoch(self) -> int:
        """Another source will deliver into the same reservation; the new epoch, for its destination
        terms.

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

    def _limit_s(self) -> float | None:
        if self.state is ReceiveState.FAILED and self._is_source_lost:
            return self._replace_s
        return super()._limit_s()


class SendSession(_Session[SendState]):
    """A prefill pool's side, for one epoch. SENT when every stage has sent everything; FAILED when
    one fails."""

    def __init__(
        self,
        session_id: str,
        *,
        epoch: int,
        num_stages: int,
        clock: Clock,
        deadlines: SessionDeadlines | None = None,
    ) -> None:
        limits = deadlines or SessionDeadlines()
        super().__init__(
            session_id,
            num_stages=num_stages,
            clock=clock,
            table=SEND_TRANSITIONS,
            first=SendState.PLANNED,
            errors=_SEND_ERRORS,
            deadlines={
                SendState.PLANNED: limits.open_s,
                SendState.SENDING: limits.move_s,
                SendState.SENT: limits.finish_s,
            },
        )
        self.epoch = epoch
        self._is_computed = False

    def computed(self) -> None:
        """All that is to be sent is there; until now it moved no faster than it was computed."""
        self._is_computed = True
        if self.state is SendState.SENDING:
            self._entered_at_s = self._clock.now()

    def release(self) -> SendState:
        """Decode has committed: the pages may go once drained. Raises InternalError unless SENT."""
        return self._finish()

    def _limit_s(self) -> float | None:
        return (
            None
            if self.state is SendState.SENDING and not self._is_computed
            else super()._limit_s()
        )

"""The leader's state machines, edge by edge, with a clock turned by hand."""

from itertools import product

import pytest

from runtime.clock import ManualClock
from runtime.errors import HandoffError, IntegrityError, InternalError, PeerLostError
from transfer.agent.prompts import Tombstones
from transfer.plan.handoff_terms import StageSessionEvent, StageSessionState
from transfer.session import ReceiveSession, SendSession, SessionTimeouts
from transfer.session_states import (
    RECEIVE_TRANSITIONS,
    SEND_TRANSITIONS,
    ReceiveState,
    SendState,
    SessionInput,
)

OPEN, COMPLETE, DRAINED = (
    StageSessionState.OPEN,
    StageSessionState.COMPLETE,
    StageSessionState.DRAINED,
)
TIMEOUTS = SessionTimeouts(open_s=10, move_s=60, finish_s=30, report_s=5, replace_s=20)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def session(clock: ManualClock) -> ReceiveSession:
    return ReceiveSession("s", num_stages=2, clock=clock, timeouts=TIMEOUTS)


def report(
    state: StageSessionState, epoch: int = 0, reason: str = "", text: str = "", num_bytes: int = 0
) -> StageSessionEvent:
    return StageSessionEvent("s", epoch, state, reason, text, num_bytes)


def all_stages(
    session: ReceiveSession | SendSession, state: StageSessionState, epoch: int = 0
) -> None:
    for rank in range(2):
        session.on_stage_event(rank, report(state, epoch, num_bytes=10))


def test_receiving_goes_its_way_when_all_stages_have_s4_10(session: ReceiveSession) -> None:
    states = [session.state]
    for state in (OPEN, COMPLETE):
        states += [session.on_stage_event(rank, report(state, num_bytes=5)) for rank in (1, 0)]
    assert states == [
        ReceiveState.RESERVED,
        ReceiveState.RESERVED,
        ReceiveState.RECEIVING,
        ReceiveState.RECEIVING,
        ReceiveState.COMPLETE,
    ]
    assert session.num_bytes == 10
    assert session.commit() is ReceiveState.COMMITTED
    assert not session.drained
    session.on_stage_event(0, report(DRAINED))
    assert not session.drained
    session.on_stage_event(1, report(DRAINED))
    assert session.drained
    assert session.is_over


def test_sending_goes_its_way_when_all_stages_have(clock: ManualClock) -> None:
    session = SendSession("s", epoch=3, num_stages=2, clock=clock)
    states = []
    for state in (OPEN, COMPLETE):
        all_stages(session, state, 3)
        states.append(session.state)
    assert states == [SendState.SENDING, SendState.SENT]
    assert session.release() is SendState.RELEASED
    all_stages(session, DRAINED, 3)
    assert session.drained


def test_a_stage_may_complete_before_another_has_opened_s4_10(session: ReceiveSession) -> None:
    session.on_stage_event(0, report(OPEN))
    session.on_stage_event(0, report(COMPLETE))
    assert session.state is ReceiveState.RESERVED
    session.on_stage_event(1, report(OPEN))
    assert session.on_stage_event(1, report(COMPLETE)) is ReceiveState.COMPLETE


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("DIGEST_MISMATCH", IntegrityError),
        ("PEER_LOST", PeerLostError),
        ("HANDOFF_FAILED", HandoffError),
        ("INTERNAL", InternalError),
        ("SOMETHING_NEW", HandoffError),
    ],
)
def test_one_failing_stage_fails_all_with_its_reason_s4_10(
    session: ReceiveSession, reason: str, error: type[Exception]
) -> None:
    session.on_stage_event(0, report(OPEN))
    session.on_stage_event(
        1, report(StageSessionState.FAILED, reason=reason, text="layer 3 kv page 5")
    )
    assert session.state is ReceiveState.FAILED
    assert type(session.error) is error
    assert str(session.error) == "stage 1: layer 3 kv page 5"
    session.on_stage_event(0, report(COMPLETE))
    assert session.state is ReceiveState.FAILED


def test_a_stage_that_cannot_reach_its_peer_is_not_lost_itself() -> None:
    session = SendSession("s", epoch=0, num_stages=2, clock=ManualClock())
    session.on_stage_event(0, report(OPEN))
    session.on_stage_event(
        1, report(StageSessionState.FAILED, reason="PEER_LOST", text="the connection is gone")
    )
    assert type(session.error) is HandoffError
    assert str(session.error) == "stage 1: the connection is gone"


def test_failed_is_drained_only_when_every_stage_is_s4_10(session: ReceiveSession) -> None:
    session.on_stage_event(1, report(StageSessionState.FAILED))
    session.on_stage_event(1, report(DRAINED))
    assert not session.drained
    session.on_stage_event(0, report(DRAINED))
    assert session.drained


def test_the_next_epoch_starts_over_in_the_same_reservation(session: ReceiveSession) -> None:
    all_stages(session, OPEN)
    session.on_stage_event(0, report(COMPLETE, num_bytes=7))
    assert session.next_epoch() == 1
    assert session.state is ReceiveState.RESERVED
    all_stages(session, DRAINED)
    session.on_stage_event(1, report(COMPLETE))
    session.on_stage_event(1, report(StageSessionState.FAILED))
    assert (session.state, session.num_late_events, session.drained) == (
        ReceiveState.RESERVED,
        4,
        False,
    )
    all_stages(session, OPEN, 1)
    all_stages(session, COMPLETE, 1)
    assert (session.state, session.num_bytes) == (ReceiveState.COMPLETE, 20)
    assert session.next_epoch() == 2, (
        "a source may be lost with everything sent and its first token untold"
    )
    assert (session.state, session.num_bytes) == (ReceiveState.RESERVED, 0)


def test_a_session_that_is_over_does_not_start_over(session: ReceiveSession) -> None:
    all_stages(session, COMPLETE)
    session.commit()
    with pytest.raises(InternalError, match="cannot start over from committed"):
        session.next_epoch()


def test_a_failed_epoch_may_be_followed_by_another(session: ReceiveSession) -> None:
    session.on_stage_event(0, report(StageSessionState.FAILED, reason="PEER_LOST"))
    session.next_epoch()
    assert session.error is None
    assert session.state is ReceiveState.RESERVED


def test_repeated_reports_count_and_change_nothing(session: ReceiveSession) -> None:
    all_stages(session, OPEN)
    all_stages(session, OPEN)
    assert session.num_late_events == 2
    assert session.state is ReceiveState.RECEIVING


def test_aborts_are_idempotent_and_keep_the_first_reason(session: ReceiveSession) -> None:
    session.abort("the client is gone")
    session.abort("again")
    assert session.state is ReceiveState.ABORTED
    assert "the client is gone" in str(session.error)
    all_stages(session, OPEN)
    all_stages(session, COMPLETE)
    assert session.state is ReceiveState.ABORTED
    with pytest.raises(InternalError, match="cannot finish from aborted"):
        session.commit()


def test_a_commit_outlives_a_late_abort(session: ReceiveSession) -> None:
    all_stages(session, OPEN)
    all_stages(session, COMPLETE)
    session.commit()
    session.abort("too late")
    session.fail(HandoffError("too late"))
    assert session.state is ReceiveState.COMMITTED


@pytest.mark.parametrize(("num_reports", "limit_s"), [(0, 10), (1, 60), (2, 30)])
def test_every_state_has_a_deadline(
    session: ReceiveSession, clock: ManualClock, num_reports: int, limit_s: float
) -> None:
    for state in (OPEN, COMPLETE)[:num_reports]:
        clock.advance(9)
        all_stages(session, state)
    assert session.remaining_s() == limit_s, "counted from the state's beginning"
    clock.advance(limit_s - 1)
    session.on_stage_event(0, report(OPEN))
    assert session.remaining_s() == 1, "whatever happens within it"
    clock.advance(2)
    assert session.remaining_s() == 0


@pytest.mark.parametrize("is_told_before", [True, False])
def test_a_failed_session_waits_for_source_loss_and_then_a_new_source(
    session: ReceiveSession, clock: ManualClock, *, is_told_before: bool
) -> None:
    if is_told_before:
        session.source_lost()
        assert session.remaining_s() == 10, "changes nothing while nothing has failed"
    session.fail(HandoffError("the source is gone"))
    if not is_told_before:
        assert session.remaining_s() == 5
        clock.advance(4)
        session.source_lost()
    assert session.remaining_s() == 20
    clock.advance(19)
    assert session.remaining_s() == 1
    session.next_epoch()
    session.fail(HandoffError("that one, too"))
    assert session.remaining_s() == 5, "of this source nothing is known"


def test_a_prompt_that_is_computed_moves_as_long_as_that_takes(clock: ManualClock) -> None:
    session = SendSession("s", epoch=0, num_stages=2, clock=clock, timeouts=TIMEOUTS)
    assert session.remaining_s() == 10
    all_stages(session, OPEN)
    clock.advance(1000)
    assert session.remaining_s() is None
    session.computed()
    assert session.remaining_s() == 60
    all_stages(session, COMPLETE)
    assert session.remaining_s() == 30


def test_the_timeout_of_a_computed_prompt_starts_when_all_stages_open(
    clock: ManualClock,
) -> None:
    session = SendSession("s", epoch=0, num_stages=2, clock=clock, timeouts=TIMEOUTS)
    session.computed()
    clock.advance(9)
    all_stages(session, OPEN)
    assert session.remaining_s() == 60


def test_a_final_state_has_no_deadline(session: ReceiveSession) -> None:
    session.abort("gone")
    assert session.remaining_s() is None


def test_a_lost_stage_has_nothing_left_to_drain(session: ReceiveSession) -> None:
    all_stages(session, OPEN)
    session.stage_lost(1, PeerLostError("stage 1 is gone"))
    assert session.state is ReceiveState.FAILED
    session.on_stage_event(0, report(DRAINED))
    assert session.drained


def test_a_stage_that_gives_up_unasked_fails_the_session(session: ReceiveSession) -> None:
    all_stages(session, OPEN)
    session.on_stage_event(0, report(DRAINED))
    assert session.state is ReceiveState.FAILED


def test_reports_of_an_unknown_stage_are_a_bug(session: ReceiveSession) -> None:
    with pytest.raises(InternalError):
        session.on_stage_event(2, report(OPEN))
    with pytest.raises(InternalError):
        session.on_stage_event(0, StageSessionEvent("other", 0, OPEN))


def test_the_tables_never_leave_a_final_state() -> None:
    final = {ReceiveState.COMMITTED, ReceiveState.ABORTED, SendState.RELEASED, SendState.ABORTED}
    sources = {state for state, _ in [*RECEIVE_TRANSITIONS, *SEND_TRANSITIONS]}
    assert not final & sources
    for state, event in product(ReceiveState, SessionInput):
        target = RECEIVE_TRANSITIONS.get((state, event))
        if event is SessionInput.ABORT:
            assert target is (None if state in final else ReceiveState.ABORTED)


def test_tombstones_forget_the_oldest() -> None:
    tombstones = Tombstones[str](max_entries=3)
    for name in "abca":
        tombstones.add(name)
    tombstones.add("d")
    assert ["a" in tombstones, "b" in tombstones, "c" in tombstones, "d" in tombstones] == [
        True,
        False,
        True,
        True,
    ]
    assert len(tombstones) == 3

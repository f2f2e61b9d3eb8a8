"""Time and target of retries: tables of errors, with a manual clock."""

import random

import pytest

from baton.retry import (
    MAX_ASKED_S,
    MAX_JITTER,
    MAX_NAP_S,
    NO_RETRY,
    SPREAD_S,
    Retry,
    RetryBudget,
    Targets,
)
from runtime.clock import ManualClock
from runtime.errors import (
    BatonError,
    CapacityError,
    DeadlineError,
    DrainingError,
    DuplicateRequestError,
    FieldViolation,
    HandoffError,
    IntegrityError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    UnauthenticatedError,
    UnavailableError,
)

GONE = UnavailableError("gone")
RETRY = Retry(attempts=4, resumptions=10, lost=1)


def patience(
    timeout_s: float | None = None,
    *,
    targets: int = 1,
    retry: Retry = RETRY,
    clock: ManualClock | None = None,
) -> RetryBudget:
    return RetryBudget(retry, timeout_s, targets, clock or ManualClock(), random.Random(1))


def pauses(of: RetryBudget, error: BatonError, clock: ManualClock | None = None) -> list[float]:
    """Return the pauses until the last retry; each advances `clock`."""
    found: list[float] = []

    def try_for_ever() -> None:
        while True:
            found.append(of.pause_after(error))
            if clock is not None:
                clock.advance(found[-1])

    with pytest.raises(type(error)) as raised:
        try_for_ever()
    assert raised.value is error
    return found


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError(FieldViolation("n", "is wrong")),
        DuplicateRequestError("running"),
        DeadlineError("late"),
        UnauthenticatedError("who?"),
        InternalError("a bug"),
    ],
)
def test_permanent_errors_are_not_retried(error: BatonError) -> None:
    assert pauses(patience(targets=3), error) == []


@pytest.mark.parametrize(
    "error", [GONE, DrainingError("stops"), CapacityError("full", resource="pages")]
)
def test_attempts_are_bounded(error: BatonError) -> None:
    assert len(pauses(patience(), error)) == RETRY.attempts - 1
    begun = patience()
    begun.progressed()
    assert len(pauses(begun, error)) == RETRY.resumptions
    assert pauses(patience(retry=NO_RETRY), error) == []


def test_progress_resets_the_retry_limit() -> None:
    of = patience()
    for _ in range(100):
        of.pause_after(GONE)
        of.progressed()


@pytest.mark.parametrize(
    "error", [PeerLostError("died"), HandoffError("failed"), IntegrityError("damaged")]
)
def test_a_request_that_may_kill_workers_is_retried_once(error: BatonError) -> None:
    of = patience(targets=3)
    of.pause_after(error)
    of.progressed()
    with pytest.raises(type(error)):
        of.pause_after(error)


def test_a_server_is_not_retried_before_its_retry_delay() -> None:
    for error in (
        CapacityError("full", resource="pages", retry_after_s=2.0),
        PeerLostError("died", retry_after_s=2.0),
    ):
        assert all(
            2.0 <= patience(targets=5).pause_after(error) <= 2.0 * (1 + MAX_JITTER)
            for _ in range(9)
        )
    clock = ManualClock()
    error = CapacityError("full", resource="pages", retry_after_s=2.0)
    full = pauses(patience(clock=clock), error, clock)
    assert len(set(full)) == len(full), "with jitter"


def test_other_routers_are_tried_at_once_and_then_pauses_grow() -> None:
    found = pauses(patience(targets=3), GONE)
    assert all(pause < SPREAD_S for pause in found[:2])
    begun = patience(targets=1)
    begun.progressed()
    for exponent, pause in enumerate(pauses(begun, GONE)):
        longest = min(RETRY.first_pause_s * 2**exponent, RETRY.last_pause_s)
        assert longest / 2 <= pause <= longest


def test_no_attempt_begins_after_the_deadline() -> None:
    clock = ManualClock()
    of = patience(10.0, clock=clock)
    assert of.remaining_s() == 10.0
    of.pause_after(CapacityError("full", resource="pages", retry_after_s=5.0))
    clock.advance(5.5)
    assert of.remaining_s() == 4.5
    with pytest.raises(CapacityError):
        of.pause_after(CapacityError("full", resource="pages", retry_after_s=5.0))
    clock.advance(9.0)
    assert of.remaining_s() == 0.0


def test_no_server_makes_a_client_sleep_for_ever() -> None:
    """Nor pass a router over for ever that says when to come back."""
    full = CapacityError("full", resource="pages", retry_after_s=3.9e5)
    assert patience().pause_after(full) <= MAX_NAP_S * (1 + MAX_JITTER)
    clock = ManualClock()
    turns = Targets(2, clock, random.Random(0))
    turns.failed(0, UnavailableError("no workers", retry_after_s=3.9e5))
    assert {turns.next() for _ in range(4)} == {1}
    clock.advance(MAX_ASKED_S)
    assert {turns.next() for _ in range(4)} == {0, 1}


def test_attempts_within_a_pause_that_a_server_gave_are_not_counted() -> None:
    """A server that says 30 s each time is asked every 5 s, and given up as late as it would have
    been without these attempts."""
    error = CapacityError("full", resource="pages", retry_after_s=30.0)
    clock = ManualClock()
    gaps = pauses(patience(clock=clock), error, clock)
    assert all(MAX_NAP_S <= gap <= MAX_NAP_S * (1 + MAX_JITTER) for gap in gaps)
    num_counted = RETRY.attempts - 1
    assert 30.0 * num_counted <= sum(gaps) <= (30.0 + MAX_NAP_S * (1 + MAX_JITTER)) * num_counted


def test_a_former_self_may_still_be_running() -> None:
    of, error = patience(), DuplicateRequestError("running")
    of.pause_after(GONE)
    assert len(pauses(of, error)) == RETRY.attempts - 2


def test_routers_take_turns_and_those_that_failed_are_passed_over() -> None:
    clock = ManualClock()
    of = Targets(3, clock, random.Random(0))
    first = [of.next() for _ in range(6)]
    assert first[:3] == first[3:]
    assert sorted(first[:3]) == [0, 1, 2]
    of.failed(1, GONE)
    assert {of.next() for _ in range(6)} == {0, 2}
    for index in (0, 2):
        of.failed(index, CapacityError("full", resource="pages"))  # says nothing about the router
        of.failed(index, PeerLostError("a worker died"))
    assert {of.next() for _ in range(6)} == {0, 2}
    clock.advance(0.6)
    assert {of.next() for _ in range(6)} == {0, 1, 2}
    of.failed(1, GONE)
    clock.advance(0.6)
    assert {of.next() for _ in range(6)} == {0, 2}, "each failure doubles it"
    of.answered(1)
    assert {of.next() for _ in range(6)} == {0, 1, 2}


def test_after_all_failed_the_router_with_the_shortest_delay_is_tried() -> None:
    clock = ManualClock()
    of = Targets(2, clock, random.Random(0))
    of.failed(0, GONE)
    clock.advance(0.1)
    of.failed(1, GONE)
    assert [of.next() for _ in range(3)] == [0, 0, 0]

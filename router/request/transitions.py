"""The states of a request in the router, of its prefill and of its decode, with their transitions.

    request   NEW ─▶ ADMITTING ─▶ SERVING ─▶ DONE             SERVING ─▶ MIGRATING ─▶ SERVING
    prefill   BOOKED ─▶ QUEUED ─▶ COMPUTING ─▶ COMPUTED ─▶ RELEASED
              a failed attempt ─▶ SEARCHING ─▶ QUEUED, a failed handoff over LINK_FAILED
    decode    BOOKED ─▶ OFFERED ─▶ RESERVED ─▶ DECODING ─▶ FINISHED
              a refusal ─▶ SEARCHING ─▶ BOOKED; without a source BOOKED ─▶ ASKED ─▶ DECODING

Every state of prefill and decode may be CLOSED, and every state of a request may become DONE.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


class RequestState(StrEnum):
    """States of a request."""

    NEW = "new"
    ADMITTING = "admitting"  # no pair is booked yet
    SERVING = "serving"  # on a pair of workers
    MIGRATING = "migrating"  # its pool gave it up, and no other pair is booked yet
    DONE = "done"


class RequestStep(StrEnum):
    """Steps between the states of a request."""

    ARRIVE = "arrive"
    PLACE = "place"
    MIGRATE = "migrate"
    END = "end"


class SourceState(StrEnum):
    """States of a request's prefill."""

    BOOKED = "booked"  # no stream is open
    QUEUED = "queued"  # the worker has the prompt
    COMPUTING = "computing"  # it has sent its source terms
    COMPUTED = "computed"  # it has sent the first token
    LINK_FAILED = "link_failed"  # its handoff failed; whether the pool has other sources is asked
    SEARCHING = "searching"  # for another worker
    RELEASED = "released"  # it was told that the pool has everything
    CLOSED = "closed"


class SourceStep(StrEnum):
    """Steps between the states of a prefill."""

    OPEN = "open"
    STARTED = "started"
    SCORED = "scored"
    FIRST_TOKEN = "first_token"
    SENT = "sent"
    LOSE_LINK = "lose_link"
    FAIL = "fail"
    FOUND = "found"
    RELEASE = "release"
    CLOSE = "close"


class PoolState(StrEnum):
    """States of a request's decode."""

    BOOKED = "booked"  # no stream is open: no source has started
    ASKED = "asked"  # to prefill what it lacks of the prompt
    OFFERED = "offered"  # a source's terms
    SEARCHING = "searching"  # for another pool: this one refused
    RESERVED = "reserved"  # the pool has sent its destination terms
    DECODING = "decoding"  # the pool has the whole prompt
    FINISHED = "finished"
    CLOSED = "closed"


class PoolStep(StrEnum):
    """Steps between the states of a decode."""

    ASK = "ask"
    DECLINE = "decline"
    LOCAL = "local"
    OPEN = "open"
    REFUSE = "refuse"
    FOUND = "found"
    DESTINATION = "destination"
    COMMITTED = "committed"
    TOKENS = "tokens"
    FINISHED = "finished"
    CLOSE = "close"


StateT = TypeVar("StateT", RequestState, SourceState, PoolState)
StepT = TypeVar("StepT", RequestStep, SourceStep, PoolStep)
Transitions = Mapping[tuple[StateT, StepT], StateT]

REQUEST_TRANSITIONS: Transitions[RequestState, RequestStep] = {
    (RequestState.NEW, RequestStep.ARRIVE): RequestState.ADMITTING,
    (RequestState.ADMITTING, RequestStep.PLACE): RequestState.SERVING,
    (RequestState.SERVING, RequestStep.MIGRATE): RequestState.MIGRATING,
    (RequestState.MIGRATING, RequestStep.PLACE): RequestState.SERVING,
    **{
        (state, RequestStep.END): RequestState.DONE
        for state in RequestState
        if state is not RequestState.DONE
    },
}

_ATTEMPT = (SourceState.QUEUED, SourceState.COMPUTING, SourceState.COMPUTED)
SOURCE_TRANSITIONS: Transitions[SourceState, SourceStep] = {
    (SourceState.BOOKED, SourceStep.OPEN): SourceState.QUEUED,
    (SourceState.QUEUED, SourceStep.STARTED): SourceState.COMPUTING,
    (SourceState.COMPUTING, SourceStep.SCORED): SourceState.COMPUTING,
    (SourceState.COMPUTING, SourceStep.FIRST_TOKEN): SourceState.COMPUTED,
    (SourceState.COMPUTING, SourceStep.SENT): SourceState.COMPUTING,
    (SourceState.COMPUTED, SourceStep.SENT): SourceState.COMPUTED,
    (SourceState.COMPUTED, SourceStep.RELEASE): SourceState.RELEASED,
    # The pool's commit and the report that every byte has left come over different streams.
    (SourceState.RELEASED, SourceStep.SENT): SourceState.RELEASED,
    **{(state, SourceStep.LOSE_LINK): SourceState.LINK_FAILED for state in _ATTEMPT},
    **{
        (state, SourceStep.FAIL): SourceState.SEARCHING
        for state in (*_ATTEMPT, SourceState.LINK_FAILED)
    },
    (SourceState.SEARCHING, SourceStep.FOUND): SourceState.QUEUED,
    **{
        (state, SourceStep.CLOSE): SourceState.CLOSED
        for state in SourceState
        if state is not SourceState.CLOSED
    },
}

POOL_TRANSITIONS: Transitions[PoolState, PoolStep] = {
    (PoolState.BOOKED, PoolStep.ASK): PoolState.ASKED,
    (PoolState.ASKED, PoolStep.DECLINE): PoolState.BOOKED,
    # It declines the terms of this source.
    (PoolState.OFFERED, PoolStep.DECLINE): PoolState.BOOKED,
    (PoolState.ASKED, PoolStep.LOCAL): PoolState.DECODING,
    (PoolState.BOOKED, PoolStep.OPEN): PoolState.OFFERED,
    (PoolState.OFFERED, PoolStep.REFUSE): PoolState.SEARCHING,
    (PoolState.SEARCHING, PoolStep.FOUND): PoolState.BOOKED,
    (PoolState.OFFERED, PoolStep.DESTINATION): PoolState.RESERVED,
    # The reservation receives again, from a source that replaces another.
    (PoolState.RESERVED, PoolStep.DESTINATION): PoolState.RESERVED,
    (PoolState.RESERVED, PoolStep.COMMITTED): PoolState.DECODING,
    (PoolState.DECODING, PoolStep.TOKENS): PoolState.DECODING,
    (PoolState.DECODING, PoolStep.FINISHED): PoolState.FINISHED,
    **{
        (state, PoolStep.CLOSE): PoolState.CLOSED
        for state in PoolState
        if state is not PoolState.CLOSED
    },
}


class IllegalEventError(Exception):
    """An event that the state does not allow: a bug, or a worker that breaks the protocol."""


class Stateful(Generic[StateT, StepT]):
    """An object with a state that changes as a table allows."""

    def __init__(self, table: Transitions[StateT, StepT], first: StateT) -> None:
        self._table: Transitions[StateT, StepT] = table
        self.state: StateT = first

    def move(self, step: StepT) -> None:
        """Take a step.

        Raises:
            IllegalEventError: the table has no such step from this state; nothing has changed.
        """
        following = self._table.get((self.state, step))
        if following is None:
            raise IllegalEventError(
                f"{type(self).__name__}: {step.value} is illegal in state {self.state.value}"
            )
        self.state = following

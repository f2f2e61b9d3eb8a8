"""The states of a request in a scheduler of either role, and the transitions between them.

    PENDING ─▶ RUNNING ─▶ COMPUTED          the prompt of a prefill pool, until it is handed over
               RUNNING ─▶ WAITING ─▶ RUNNING   a preempted request of a decode pool
    any of these ─▶ FAILED ─▶ DISCARDED ─▶ FORGOTTEN
    any of these ─▶ RELEASED ─▶ FORGOTTEN

A released request is forgotten when the steps in flight that use its memory are over.
"""

from collections.abc import Mapping
from enum import StrEnum


class EntryState(StrEnum):
    """States of a request."""

    PENDING = "pending"  # queued, or its prompt is landing
    RUNNING = "running"  # it takes steps
    WAITING = "waiting"  # preempted: it holds no memory
    COMPUTED = "computed"  # the last chunk of its prompt has been launched
    FAILED = "failed"  # its owner is notified and will release it
    RELEASED = "released"
    DISCARDED = "discarded"  # released and failed: its computed tokens are not valid
    FORGOTTEN = "forgotten"


# Tuples, because the schedulers look at every row of every step.
RELEASED_STATES = (EntryState.RELEASED, EntryState.DISCARDED)
FAILED_STATES = (EntryState.FAILED, EntryState.DISCARDED)  # their computed tokens are not valid


class EntryStep(StrEnum):
    """Steps between the states of a request."""

    RUN = "run"
    PREEMPT = "preempt"
    COMPUTE = "compute"
    FAIL = "fail"
    RELEASE = "release"
    FORGET = "forget"


ENTRY_TRANSITIONS: Mapping[tuple[EntryState, EntryStep], EntryState] = {
    (EntryState.PENDING, EntryStep.RUN): EntryState.RUNNING,
    (EntryState.WAITING, EntryStep.RUN): EntryState.RUNNING,
    (EntryState.RUNNING, EntryStep.PREEMPT): EntryState.WAITING,
    (EntryState.RUNNING, EntryStep.COMPUTE): EntryState.COMPUTED,
    **{
        (state, step): after
        for state in (
            EntryState.PENDING,
            EntryState.RUNNING,
            EntryState.WAITING,
            EntryState.COMPUTED,
        )
        for step, after in (
            (EntryStep.FAIL, EntryState.FAILED),
            (EntryStep.RELEASE, EntryState.RELEASED),
        )
    },
    # Several steps of a request may be in flight when one of them fails.
    (EntryState.FAILED, EntryStep.FAIL): EntryState.FAILED,
    (EntryState.FAILED, EntryStep.RELEASE): EntryState.DISCARDED,
    (EntryState.RELEASED, EntryStep.FAIL): EntryState.DISCARDED,
    (EntryState.DISCARDED, EntryStep.FAIL): EntryState.DISCARDED,
    # Its steps in flight release it again when they are over.
    (EntryState.RELEASED, EntryStep.RELEASE): EntryState.RELEASED,
    (EntryState.DISCARDED, EntryStep.RELEASE): EntryState.DISCARDED,
    (EntryState.RELEASED, EntryStep.FORGET): EntryState.FORGOTTEN,
    (EntryState.DISCARDED, EntryStep.FORGET): EntryState.FORGOTTEN,
}

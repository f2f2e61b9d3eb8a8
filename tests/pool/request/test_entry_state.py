"""The states of a request in a scheduler."""

from itertools import product

import pytest

from engine.core.request import Request, SamplingParams
from engine.memory.leases import PageAllocator, SlotAllocator
from pool.request.entry import Entry, EntryTable
from pool.request.entry_state import (
    ENTRY_TRANSITIONS,
    FAILED_STATES,
    RELEASED_STATES,
    EntryState,
    EntryStep,
)
from runtime.errors import InternalError

RUN = EntryStep.RUN
PREEMPT = EntryStep.PREEMPT
COMPUTE = EntryStep.COMPUTE
FAIL = EntryStep.FAIL
RELEASE = EntryStep.RELEASE
FORGET = EntryStep.FORGET
WAYS = {
    EntryState.PENDING: [],
    EntryState.RUNNING: [RUN],
    EntryState.WAITING: [RUN, PREEMPT],
    EntryState.COMPUTED: [RUN, COMPUTE],
    EntryState.FAILED: [FAIL],
    EntryState.RELEASED: [RELEASE],
    EntryState.DISCARDED: [RELEASE, FAIL],
    EntryState.FORGOTTEN: [RELEASE, FORGET],
}
LEGAL = {
    EntryState.PENDING: {RUN, FAIL, RELEASE},
    EntryState.RUNNING: {PREEMPT, COMPUTE, FAIL, RELEASE},
    EntryState.WAITING: {RUN, FAIL, RELEASE},
    EntryState.COMPUTED: {FAIL, RELEASE},
    EntryState.FAILED: {FAIL, RELEASE},
    EntryState.RELEASED: {FAIL, RELEASE, FORGET},
    EntryState.DISCARDED: {FAIL, RELEASE, FORGET},
    EntryState.FORGOTTEN: set(),
}


def make(state: EntryState = EntryState.PENDING) -> Entry[object]:
    """Return a request in `state`."""
    request = Request("r", (1, 2, 3), 4, SamplingParams())
    entry = Entry[object](1, request, lambda event: None)
    for step in WAYS[state]:
        entry.step(step)
    assert entry.state is state
    return entry


@pytest.mark.parametrize(("state", "step"), [*product(EntryState, EntryStep)])
def test_each_state_allows_these_steps(state: EntryState, step: EntryStep) -> None:
    entry = make(state)
    if step in LEGAL[state]:
        entry.step(step)
        if step is FAIL:
            assert entry.state in FAILED_STATES
            assert (entry.state in RELEASED_STATES) is (state in RELEASED_STATES)
        if step is RELEASE:
            assert entry.state in RELEASED_STATES
            assert (entry.state in FAILED_STATES) is (state in FAILED_STATES)
    else:
        with pytest.raises(InternalError, match=f"request 1 is {state}, .* {step}"):
            entry.step(step)
        assert entry.state is state


def test_every_state_can_be_reached_and_ends() -> None:
    assert {after for _, after in ENTRY_TRANSITIONS.items()} == {*EntryState} - {EntryState.PENDING}
    for state in {*EntryState} - {EntryState.FORGOTTEN}:
        entry = make(state)
        if state not in RELEASED_STATES:
            entry.step(RELEASE)
        entry.step(FORGET)


def test_the_table_releases_the_memory_of_a_forgotten_request() -> None:
    table, pages, slots = EntryTable[Entry[object]](), PageAllocator(9), SlotAllocator(2)
    entry = make()
    table.add(entry)
    entry.lease(pages, slots, 3)
    free = pages.num_available
    assert 1 in table
    assert table.owners == {"request 1"}
    with pytest.raises(InternalError):
        table.forget(entry)
    assert pages.num_available == free, "a live request keeps its memory"
    entry.step(RELEASE)
    table.forget(entry)
    assert pages.num_available == free + 3
    assert len(table) == 0
    assert table.get(1) is None

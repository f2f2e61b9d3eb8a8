"""Every event in every situation of a request: what follows, or that it is illegal."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from protos import generation_pb2, types_pb2
from router.request import events as ev
from router.request.transitions import (
    POOL_TRANSITIONS,
    REQUEST_TRANSITIONS,
    SOURCE_TRANSITIONS,
    IllegalEventError,
    PoolState,
    PoolStep,
    RequestState,
)
from runtime.errors import BatonError, PeerLostError
from tests.router.request.machine import situations
from tests.router.request.machine import world as w
from tests.router.request.machine.driver import History
from tests.router.request.machine.situations import EVENTS, EXPECTED, MESSAGES, Build
from tests.router.request.machine.world import World

CELLS = [
    (build, event)
    for build, (_, expected) in EXPECTED.items()
    for event in dict.fromkeys((*expected, *MESSAGES))
]
STOPPED = generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_STOP)
FROM_OUTSIDE: Mapping[str, tuple[ev.RequestEvent, str]] = {
    "abort": (ev.Aborted(), "end:ABORTED"),
    "deadline": (ev.DeadlinePassed(), "end:DEADLINE_EXCEEDED"),
    "client_gone": (ev.ClientGone(), "end:"),
    "stop_string": (ev.ClientStopped(STOPPED), "end:STOP"),
    "client_stalled": (ev.CommandFailed(PeerLostError("stalled")), "end:PEER_LOST"),
}


def state_of(world: World) -> str:
    """Return the state in the form of the table."""
    if world.end is not None:
        if isinstance(world.end.error, BatonError):
            return f"end:{world.end.error.reason}"
        if world.end.finish is None:
            return "end:"
        reason = types_pb2.FinishReason.Name(world.end.finish.reason)
        return f"end:{reason.removeprefix('FINISH_REASON_')}"
    pair = world.machine.pair
    if pair is None:
        return world.machine.state.value
    return f"{pair.source.state.value}/{pair.pool.state.value}"


def check_cell(build: Build, event: str) -> None:
    """Check one event in one situation."""
    world = World()
    build(world)
    first, expected = EXPECTED[build]
    assert state_of(world) == first
    if event in expected:
        EVENTS[event](world)
        wanted = expected[event]
        assert state_of(world) == (first if wanted == "=" else wanted)
    elif event in MESSAGES and _has_stream(world, event):
        with pytest.raises(IllegalEventError):
            EVENTS[event](world)


def _has_stream(world: World, event: str) -> bool:
    streams = world.prefill if MESSAGES[event][0] is situations.source else world.decode
    return bool(streams)


@pytest.mark.parametrize(
    ("build", "event"), CELLS, ids=[f"{build.__name__}-{event}" for build, event in CELLS]
)
def test_an_event_in_a_situation_has_the_expected_result(build: Build, event: str) -> None:
    check_cell(build, event)


@pytest.mark.parametrize("name", FROM_OUTSIDE)
@pytest.mark.parametrize("build", EXPECTED, ids=lambda build: build.__name__)
def test_an_end_from_outside_leaves_nothing(build: Build, name: str) -> None:
    world = World()
    build(world)
    event, wanted = FROM_OUTSIDE[name]
    world.on(event)
    assert state_of(world) == wanted
    for later in (ev.Aborted(), ev.DeadlinePassed(), ev.ReplyOverdue(), ev.ClientGone()):
        world.on(later)
        assert world.commands == []


@pytest.mark.parametrize("build", EXPECTED, ids=lambda build: build.__name__)
def test_only_a_pool_that_generates_lets_a_request_give_way(build: Build) -> None:
    world = World()
    build(world)
    state = state_of(world)
    world.on(ev.Preempted())
    assert state_of(world) == EXPECTED[build][1].get("preempted", "=").replace("=", state)


@pytest.mark.parametrize("build", EXPECTED, ids=lambda build: build.__name__)
def test_late_messages_of_closed_streams_have_no_effect(build: Build) -> None:
    world = World()
    build(world)
    state = state_of(world)
    for message in (w.started, w.first_token, w.sent, w.destination, w.local):
        world.on(message(10**6))
    world.on(ev.StreamEnded(10**6, PeerLostError("late")))
    world.on(ev.SearchFailed(10**6))
    world.on(ev.LinkChecked(10**6, is_fed=False))
    world.on(ev.WorkerFound(10**6, world.book("prefill")))
    world.place(10**6)
    assert state_of(world) == state
    assert world.commands == [
        ev.Release(worker) for worker in (_release.worker for _release in _releases(world))
    ]


def _releases(world: World) -> Iterator[ev.Release]:
    return (command for command in world.commands if isinstance(command, ev.Release))


TABLES: Mapping[str, Mapping[Any, Any]] = {
    "router.request.machine.REQUEST_TRANSITIONS": REQUEST_TRANSITIONS,
    "router.request.source.SOURCE_TRANSITIONS": SOURCE_TRANSITIONS,
    "router.request.reservation.POOL_TRANSITIONS": POOL_TRANSITIONS,
}
FAILURES = (AssertionError, IllegalEventError, pytest.fail.Exception)
ROWS = [(name, row) for name, table in TABLES.items() for row in table]


def failing_cells() -> Iterator[str]:
    """Yield the cells that fail, and the ends from outside that do."""
    for build, event in CELLS:
        try:
            check_cell(build, event)
        except FAILURES:
            yield f"{build.__name__}-{event}"
    for build in (situations.admitting, lambda _: None, *EXPECTED):
        try:
            world = World()
            build(world)
            world.on(ev.Aborted())
        except FAILURES:
            yield f"{build.__name__}-abort"


@pytest.mark.parametrize(
    ("table", "row"), ROWS, ids=["-".join((str(row[0]), str(row[1]))) for _, row in ROWS]
)
def test_the_table_tests_notice_a_dropped_transition(
    table: str, row: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = {key: state for key, state in TABLES[table].items() if key != row}
    monkeypatch.setattr(table, reduced)
    assert next(failing_cells(), None), f"no test needs {row}"


@pytest.mark.parametrize(
    "row",
    [
        (PoolState.RESERVED, PoolStep.TOKENS),
        (PoolState.OFFERED, PoolStep.COMMITTED),
        (PoolState.DECODING, PoolStep.COMMITTED),
    ],
)
def test_the_table_tests_notice_an_added_transition(
    row: tuple[PoolState, PoolStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {**POOL_TRANSITIONS, row: PoolState.DECODING}
    monkeypatch.setattr("router.request.reservation.POOL_TRANSITIONS", more)
    assert next(failing_cells(), None)


def test_every_reachable_pair_of_states_is_a_situation() -> None:
    """As random histories find them."""

    class Seen(History):
        def feed(self, event: ev.RequestEvent) -> None:
            super().feed(event)
            if self.world.end is None:
                seen.add(state_of(self.world))

    seen = {RequestState.NEW.value}
    for seed in range(2000):
        Seen(seed).run()
    known = {first for first, _ in EXPECTED.values()}
    assert seen - known - {"new"} == set()

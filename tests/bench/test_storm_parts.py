"""Parts of a storm: its schedule, its damage, and its verdicts, by hand."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from baton.cluster_config import ClusterConfig, demo_model
from baton.values import (
    Chunk,
    ClusterStatus,
    Completion,
    Event,
    Finish,
    FinishReason,
    PromptLogprobs,
    Timings,
    TokenLogprobs,
    Usage,
    WorkerStatus,
)
from baton.wire import completion_of
from bench.partition.grid import Edge, Way
from bench.storm import child, leaks
from bench.storm.control import Control
from bench.storm.layouts import random_layout
from bench.storm.schedule import FaultKind, StormFault, Weather, forecast
from bench.storm.traffic import Manner, PlannedRequest, Seen, Shares, plan
from bench.storm.verdict import Counts, Fate, Pace, difference, fate, recoveries
from tests.support.cluster.queries import comparable

PROCESSES = (
    "decode-0.0",
    "decode-0.1",
    "prefill-0",
    "prefill-1",
    "router",
    "router-1",
    "worker-0.0",
    "worker-0.1",
)


def test_the_same_seed_gives_the_same_storm_and_no_process_is_spared() -> None:
    weather = Weather(200.0, frozenset(FaultKind), kill_every_s=5.0, other_every_s=3.0)
    faults = forecast(weather, PROCESSES, seed=4)
    assert faults == forecast(weather, PROCESSES, seed=4)
    assert faults != forecast(weather, PROCESSES, seed=5)
    kills = Counter(fault.victim for fault in faults if fault.kind is FaultKind.KILL)
    assert set(kills) == set(PROCESSES)
    assert max(kills.values()) - min(kills.values()) <= 1
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert all(weather.calm_s <= fault.at_s <= weather.seconds - weather.calm_s for fault in faults)
    assert all("." in fault.victim for fault in faults if fault.kind is FaultKind.FRAME)
    assert all(
        fault.victim.startswith(("prefill", "worker"))
        for fault in faults
        if fault.kind is FaultKind.ITEM
    )
    assert {fault.victim for fault in faults if fault.kind is FaultKind.ROLES} == {"worker-0.0"}


def test_only_the_requested_kinds_of_fault_happen() -> None:
    assert forecast(Weather(60.0, frozenset()), PROCESSES, seed=0) == []
    assert {
        fault.kind
        for fault in forecast(Weather(60.0, frozenset({FaultKind.STOP})), PROCESSES, seed=0)
    } == {FaultKind.STOP}
    assert forecast(Weather(5.0, frozenset(FaultKind), calm_s=4.0), PROCESSES, seed=0) == []


def test_a_fault_that_no_process_can_have_does_not_happen() -> None:
    pools_of_one_process = ("decode-0", "router", "router-1")
    faults = forecast(Weather(60.0, frozenset(FaultKind)), pools_of_one_process, seed=0)
    assert {fault.kind for fault in faults} == set(FaultKind) - {
        FaultKind.FRAME,
        FaultKind.ITEM,
        FaultKind.ROLES,
    }


TIERS = {"--disk-cache", "--host-cache-mb"}


def test_random_layouts_are_clusters_that_can_start() -> None:
    drafts, clients, tiers = set[str](), set[tuple[str, ...]](), set[str]()
    for seed in range(300):
        layout = random_layout(seed, Path("draft"))
        assert layout == random_layout(seed, Path("draft"))
        config = ClusterConfig(model=demo_model(), **layout.pools)
        assert sum(config.counts.values()) in (3, 4)
        clients.add(layout.clients)
        flags = layout.flags_of_workers(Path("folder"))
        drafts |= {flags[place + 1] for place, flag in enumerate(flags) if flag == "--draft"}
        if any(shape.num_data_ranks > 1 for shape in config.shapes):
            tiers |= TIERS & set(flags)
    assert tiers == TIERS, "of pools with data ranks"
    assert drafts == {"draft", "suffix"}
    assert clients == {(), ("often", "seldom", "free")}


def test_clients_behave_in_the_requested_shares() -> None:
    planned = plan(1000.0, 2.0, 8, Shares(aborting=0.6, unread=0.1, hostile=0.0), seed=1)
    assert planned == plan(1000.0, 2.0, 8, Shares(aborting=0.6, unread=0.1, hostile=0.0), seed=1)
    found = Counter(coming.manner for coming in planned)
    assert len(planned) == 2000
    assert found[Manner.HOSTILE] == 0
    assert abs(found[Manner.ABORTING] - 1200) < 100  # four standard deviations
    assert abs(found[Manner.UNREAD] - 200) < 60


def test_a_control_is_shared_by_all_that_open_it(tmp_path: Path) -> None:
    control = Control.create(tmp_path / "control")
    other = Control.open(tmp_path / "control")
    control.flip_frames(1)
    control.flip_items(2)
    control.shift_clock(-60.5)
    assert [other.takes_frame(), other.takes_frame()] == [True, False]
    assert [other.takes_item() for _ in range(3)] == [True, True, False]
    assert other.clock_shift_s == -60.5
    control.shift_clock(3.0)
    control.reset()
    assert (other.clock_shift_s, other.takes_frame(), other.takes_item()) == (0.0, False, False)


@pytest.mark.parametrize("size", [1, 2, 977])
def test_damage_is_one_bit_of_a_copy(size: int) -> None:
    buffer = bytes(range(256)) * 4
    wrong = child.damaged(memoryview(buffer)[:size])
    assert sum((a ^ b).bit_count() for a, b in zip(buffer, wrong, strict=False)) == 1
    assert len(wrong) == size


@pytest.fixture
def clock() -> Iterator[None]:
    """Return the original `time.time`, independent of patches of a test."""
    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    with patch.object(time, "time", time.time), patch.dict(vars(cygrpc)):
        yield


def test_a_shifted_clock_is_the_wall_clock_of_all_but_grpc(tmp_path: Path, clock: None) -> None:
    control, true_time = Control.create(tmp_path / "control"), time.time
    child.shift_clock(control)
    assert abs(time.time() - true_time()) < 60
    control.shift_clock(7200.0)
    assert 7100 < time.time() - true_time() < 7300
    grpc_module: dict[str, object] = {"__name__": "grpc.aio._call", "time": time}
    exec("def now(): return time.time()", grpc_module)
    now = grpc_module["now"]
    assert callable(now)
    assert abs(now() - true_time()) < 60


TOKENS = [(7, -0.5), (8, -0.25), (9, -1.0)]
OTHER_TOKENS = [(7, -0.5), (6, -0.5)]  # of another version of an adapter


def events(tokens: list[tuple[int, float]], *, index: int = 0, cached: int = 0) -> list[Event]:
    """Return a chunk for each token, and a finish."""
    usage = Usage(2, len(tokens), cached)
    chunks = [
        Chunk(
            f"{cached}", (token,), f"<{token}>", (TokenLogprobs(logprob, ()),), usage, index=index
        )
        for token, logprob in tokens
    ]
    finish = Finish(f"{cached}", FinishReason.LENGTH, None, None, usage, Timings(), index)
    return [*chunks, finish]


def whole(*choices: list[Event]) -> tuple[Completion, ...]:
    return tuple(comparable(completion_of(choice)) for choice in choices)


RESPONSE, OTHER_RESPONSE = whole(events(TOKENS)), whole(events(OTHER_TOKENS))


def request(
    *,
    sent_s: float = 0.0,
    message_s: tuple[float, ...] = (),
    ended_s: float = 1.0,
    num_tokens: int = 3,
    error: str | None = None,
    manner: Manner = Manner.PATIENT,
    is_hung: bool = False,
) -> Seen:
    return Seen(
        PlannedRequest(0.0, 0, manner, 0.5),
        sent_s,
        ended_s,
        list(message_s),
        events(TOKENS[:num_tokens])[: None if error is None and not is_hung else -1],
        has_finished=error is None and not is_hung,
        is_hung=is_hung,
        error=error,
    )


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (request(), Fate.RIGHT),
        (request(num_tokens=2), Fate.WRONG),  # it says that it is whole, and is not
        (request(num_tokens=2, error="PEER_LOST"), Fate.LOST),
        (request(num_tokens=0, error="UNAVAILABLE"), Fate.REFUSED),
        (request(num_tokens=1, error="UNAVAILABLE"), Fate.LOST),
        (request(num_tokens=0, error="INTERNAL"), Fate.LOST),
        (request(num_tokens=1, error="DIGEST_MISMATCH"), Fate.DAMAGED),
        (request(num_tokens=1, is_hung=True), Fate.HUNG),
    ],
)
def test_the_fate_of_a_request(seen: Seen, wanted: Fate) -> None:
    assert fate(seen, [RESPONSE]) is wanted
    for change in (
        {"logprobs": (TokenLogprobs(-0.75, ()),)},
        {"text": "?"},
        {"prompt_logprobs": PromptLogprobs(1, (5,), (TokenLogprobs(-0.5, ()),))},
    ):
        if seen.num_tokens:
            chunk = seen.events[0]
            assert isinstance(chunk, Chunk)
            other = replace(seen, events=[replace(chunk, **change), *seen.events[1:]])
            assert fate(other, [RESPONSE]) is Fate.WRONG, "its token is right, but not the rest"


def test_every_choice_of_a_response_must_be_right() -> None:
    right = whole(events(TOKENS), events(OTHER_TOKENS, index=1))
    seen = request()
    seen.events = [*events(OTHER_TOKENS, index=1), *events(TOKENS)]
    assert fate(seen, [right]) is Fate.RIGHT
    seen.events = [*events(TOKENS), *events(TOKENS, index=1)]
    assert fate(seen, [right]) is Fate.WRONG
    assert difference(seen, [right]).startswith("choice 1, text: <7><8><9>, not <7><6>")
    seen.events = events(TOKENS)
    assert fate(seen, [right]) is Fate.WRONG
    assert difference(seen, [right]) == "choice 1 has not finished"


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (TOKENS, Fate.RIGHT),
        (OTHER_TOKENS, Fate.RIGHT),
        (OTHER_TOKENS[:1], Fate.WRONG),
        ([*OTHER_TOKENS, TOKENS[2]], Fate.WRONG),
        ([TOKENS[0], OTHER_TOKENS[1], TOKENS[2]], Fate.WRONG),
    ],
)
def test_a_response_is_of_one_version_of_an_adapter(
    tokens: list[tuple[int, float]], wanted: Fate
) -> None:
    seen = request()
    seen.events = events(tokens)
    assert fate(seen, [RESPONSE, OTHER_RESPONSE]) is wanted


def test_a_response_whose_version_is_gone_was_not_lost() -> None:
    seen = request(num_tokens=1, error="UNAVAILABLE")
    seen.text = "resumed_from[0]: its adapter has changed, or the request differs"
    assert fate(seen, [RESPONSE, OTHER_RESPONSE]) is Fate.REPLACED
    assert fate(seen, [RESPONSE]) is Fate.LOST, "this one has no other version"


def test_output_of_an_aborting_client_counts_only_if_wrong() -> None:
    good, bad = (
        request(manner=Manner.ABORTING, num_tokens=1),
        request(manner=Manner.ABORTING, num_tokens=1),
    )
    bad.events = events([(5, -0.5)])
    hostile = request(manner=Manner.HOSTILE, num_tokens=0, error="INVALID_REQUEST")
    right = request()
    right.events = events(TOKENS, cached=16)
    changed = request(num_tokens=2)
    changed.events = events(OTHER_TOKENS)
    counts = Counts.of(
        [good, bad, hostile, right, changed, request(num_tokens=0, error="DEADLINE_EXCEEDED")],
        [[RESPONSE, OTHER_RESPONSE]],
    )
    assert counts.fates == {Fate.RIGHT: 2, Fate.LOST: 1}
    assert counts.num_changed == 1
    assert (counts.num_requests, counts.num_wrong, counts.num_hung, counts.num_cached) == (
        6,
        1,
        0,
        1,
    )
    assert counts.hostile == {"INVALID_REQUEST": 1}


def steady(begin_s: float, end_s: float, pause: tuple[float, float] = (0.0, 0.0)) -> Seen:
    """Return one message per tenth of a second, with none in the pause."""
    times = [begin_s + step / 10 for step in range(1, round((end_s - begin_s) * 10) + 1)]
    return request(
        sent_s=begin_s,
        ended_s=end_s,
        message_s=tuple(at_s for at_s in times if not pause[0] < at_s <= pause[1]),
    )


def test_recovery_is_when_all_streams_continue_for_a_second() -> None:
    """Two streams stall at the fault at 10, one to 11.4, the other again from 12.0 to 12.8; a third
    never does."""
    requests = [steady(0, 20), steady(0, 20, (10.0, 11.4)), steady(0, 20, (12.0, 12.8))]
    pace = Pace(requests)
    assert pace.mean(5.0, 9.0) == 1.0
    assert pace.served(10.7) == pytest.approx(2 / 3)
    assert pace.recovery_s(10.0, 20.0) == pytest.approx(2.8, abs=0.11)
    assert pace.recovery_s(15.0, 20.0) == 0.0
    faults = [
        StormFault(10.0, FaultKind.KILL, "router"),
        StormFault(11.0, FaultKind.STOP, "router"),
        StormFault(15.0, FaultKind.KILL, "router"),
    ]
    assert recoveries(pace, faults, 0.0, 20.0) == [
        pytest.approx(1.0, abs=0.11),
        pytest.approx(1.8, abs=0.11),
        0.0,
    ]


def test_short_pauses_and_idle_times_are_no_stall() -> None:
    pace = Pace([steady(0, 9, (5.0, 5.3))])
    assert pace.recovery_s(5.0, 9.0) == 0.0
    assert pace.served(50.0) == 1.0


def worker(**values: int) -> WorkerStatus:
    full: dict[str, Any] = {
        "queued_requests": 0,
        "running_requests": 0,
        "pages_total": 9,
        "pages_free": 9,
        "slots_total": 4,
        "slots_free": 4,
        "open_sessions": 0,
    }
    return WorkerStatus(
        "decode", "a:1", serving=True, reason="", incarnation="i", stages=(), **{**full, **values}
    )


def test_memory_a_worker_still_holds_is_a_leak() -> None:
    assert leaks.StillHeld.of(ClusterStatus("m", 0, 0, (worker(), worker()))).is_clean
    held = leaks.StillHeld.of(
        ClusterStatus("m", 1, 0, (worker(pages_free=7), worker(slots_free=3, open_sessions=1)))
    )
    assert (held.pages, held.slots, held.sessions, held.requests, held.away, held.total) == (
        2,
        1,
        1,
        1,
        0,
        5,
    )


def test_open_files_that_come_and_go_are_no_leak() -> None:
    assert leaks.grown({"a": 20, "b": 20}, {"a": 34, "b": 37, "new": 500}) == 3


def test_a_cut_is_of_one_edge_in_the_requested_directions() -> None:
    assert Way.BOTH.of(("a", "b")) == [("a", "b"), ("b", "a")]
    assert Way.THERE.of(("a", "b")) == [("a", "b")]
    assert Way.BACK.of(("a", "b")) == [("b", "a")]
    assert Edge("router-decode").pairs == (("router", "decode-0.0"),)
    assert Edge("prefill-decode").pairs == (
        ("prefill-0", "decode-0.0"),
        ("prefill-0", "decode-0.1"),
    )
    assert all(
        first.startswith(("router", "prefill-0", "decode-0"))
        for edge in Edge
        for first, _ in edge.pairs
    )

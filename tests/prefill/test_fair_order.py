"""Clients take turns at a prefill worker by their weights."""

import heapq
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.core.request import ClientShare, Request
from prefill.fair_order import MAX_CLIENTS, FairOrder
from prefill.prompts import PrefillEntry
from tests.prefill.test_scheduler import make, step

HEAVY, LIGHT = ClientShare(b"h", 4.0), ClientShare(b"l", 1.0)


@dataclass
class Line:
    """Prompts that start one after another, in the order of their tags."""

    order: FairOrder = field(default_factory=FairOrder)
    queue: list[tuple[tuple[int, float, int], PrefillEntry]] = field(default_factory=list)
    num_entered: int = 0

    def enter(self, share: ClientShare, num_tokens: int) -> PrefillEntry:
        self.num_entered += 1
        request = Request("r", range(num_tokens), 1, share=share)
        entry = PrefillEntry(self.num_entered, request, lambda event: None)
        self.order.enter(entry)
        heapq.heappush(self.queue, (entry.turn, entry))
        return entry

    def start(self, num_cached: int = 0) -> PrefillEntry:
        _, entry = heapq.heappop(self.queue)
        self.order.begin(entry, num_cached)
        return entry


@given(
    st.lists(st.integers(1, 1000), min_size=40, max_size=40),
    st.lists(st.integers(1, 1000), min_size=40, max_size=40),
    st.integers(1, 30),
)
def test_two_backlogged_clients_get_tokens_by_their_weights(
    heavy: list[int], light: list[int], num_ahead: int
) -> None:
    """Within one prompt of each, at any time while both have prompts queued; the heavy client's first
    prompts come before the light client's."""
    line, served = Line(), {HEAVY: 0.0, LIGHT: 0.0}
    for length in heavy[:num_ahead]:
        line.enter(HEAVY, length)
    for length in light:
        line.enter(LIGHT, length)
    for length in heavy[num_ahead:]:
        line.enter(HEAVY, length)
    bound = max(heavy) / HEAVY.weight + max(light) / LIGHT.weight
    left = {HEAVY: len(heavy), LIGHT: len(light)}
    while all(left.values()):
        entry = line.start()
        share = entry.request.share
        left[share] -= 1
        served[share] += entry.remaining / share.weight
        assert abs(served[HEAVY] - served[LIGHT]) <= bound + 1e-6


def test_an_idle_client_gains_nothing_and_loses_nothing() -> None:
    line = Line()
    for _ in range(10):
        line.enter(HEAVY, 100)
        line.start()
    waiting = [line.enter(HEAVY, 100) for _ in range(3)]
    first, second = (line.enter(LIGHT, 100) for _ in range(2))
    assert [line.start() for _ in range(5)] == [first, waiting[0], waiting[1], waiting[2], second]


@pytest.mark.parametrize("way", ["cached", "left"])
def test_a_client_pays_for_what_is_computed(way: str) -> None:
    line = Line()
    long = line.enter(LIGHT, 1000)
    if way == "cached":
        line.start(num_cached=990)
    else:
        line.queue.clear()
        line.order.leave(long)
    other = [line.enter(ClientShare(b"o"), 100) for _ in range(2)]
    own = line.enter(LIGHT, 100)
    assert [line.start() for _ in range(3)] == [other[0], own, other[1]]


def test_the_clients_that_are_remembered_are_bounded() -> None:
    line = Line()
    for number in range(MAX_CLIENTS + 10):
        line.enter(ClientShare(number.to_bytes(4, "big")), 10 + number)
    assert len(line.order._ends) == MAX_CLIENTS
    line.order.forget()
    assert line.enter(ClientShare((MAX_CLIENTS).to_bytes(4, "big")), 1).tag == 0.0


def test_an_idle_worker_remembers_the_clients_of_queued_prompts() -> None:
    """The engine is idle while prompts wait for the memory of one that is handed over."""
    scheduler = make(num_pages=1000, chunk_tokens=8, max_running=1, max_queued=20)

    def submit(share: ClientShare) -> int:
        request = Request("r", range(8), 5, share=share)
        return scheduler.submit(request, lambda event: None)

    started = submit(LIGHT)
    assert step(scheduler) == {started: 8}
    first = submit(LIGHT)
    scheduler.on_idle()
    second, other = submit(LIGHT), submit(HEAVY)
    order = list[int]()
    for key in (started, other, first):
        scheduler.release(key)
        order += step(scheduler)
    assert order == [other, first, second]


def test_a_prompt_does_not_wait_for_all_those_of_another_client() -> None:
    scheduler = make(num_pages=1000, chunk_tokens=8, max_running=1, max_queued=20)

    def submit(share: ClientShare) -> int:
        request = Request("r", range(8), 5, share=share)
        return scheduler.submit(request, lambda event: None)

    hog = [submit(HEAVY) for _ in range(10)]
    polite = submit(LIGHT)
    order = []
    for _ in range(3):
        (key,) = step(scheduler)
        order.append(key)
        scheduler.release(key)
    assert order == [hog[0], polite, hog[1]]

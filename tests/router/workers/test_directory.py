"""State and choices of a directory without workers: reports are given by hand."""

import asyncio
import gc
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from protos import worker_pb2
from router.request.admission import Admission
from router.request.rejections import AdmissionLimits
from router.request.service_times import MOST_ASKED, Rates, ServiceTimeModel
from router.workers.directory import START_MARGIN, Directory, DirectoryOptions
from router.workers.pace import DecodePace
from router.workers.placement import MOST_COMPARED
from router.workers.placement_request import PlacementRequest
from router.workers.prefix_index import RoutedPrompt
from router.workers.report import statuses
from router.workers.watch import apply_report
from router.workers.worker import Worker, WorkerRole
from runtime.clock import ManualClock
from runtime.digests import block_names
from runtime.observe.metrics.router import RouterMetrics
from runtime.version import WIRE_VERSION
from tests.router.harness import FACTS, worker_info

PROMPT = RoutedPrompt([1, 2])


class Known:
    """A directory of one prefill worker and some decode workers, none of which has reported."""

    def __init__(self, num_decode: int = 1) -> None:
        self.registry = CollectorRegistry()
        decode = tuple(f"127.0.0.1:{port}" for port in range(2, 2 + num_decode))
        self.directory = Directory(
            DirectoryOptions(("127.0.0.1:1",), decode),
            FACTS,
            RouterMetrics.create(self.registry),
            random.Random(0),
        )

    @property
    def prefill(self) -> Worker:
        return self.directory.workers[0]

    @property
    def decode(self) -> tuple[Worker, ...]:
        return self.directory.workers[1:]

    def workers(self, role: WorkerRole, state: str) -> float | None:
        return self.registry.get_sample_value(
            "baton_router_workers", {"role": role.value, "state": state}
        )

    def chosen(self) -> float:
        return sum(
            self.registry.get_sample_value(
                "baton_router_decisions_total", {"policy": policy, "result": "chosen"}
            )
            or 0.0
            for policy in ("prefix_cache", "least_load")
        )


def keeps(
    worker: Worker, prompt: Sequence[int], *, salt: str = "", compatibility: str = ""
) -> None:
    """Report that the worker has the whole pages of this prompt."""
    names = block_names(prompt, 16, compatibility=compatibility or worker.compatibility, salt=salt)
    assert worker.caches.memory.report(
        worker.address, worker_pb2.CacheReport(whole=True, stored=b"".join(names))
    )


def serves(worker: Worker, **changes: object) -> None:
    worker.introduced(
        worker_info(worker.role, **{"incarnation": f"of {worker.address}", **changes}), FACTS
    )
    worker.reported(worker_pb2.WorkerLoad(serving=True, pages_free=10, slots_free=4))


@pytest.mark.parametrize("role", list(WorkerRole))
async def test_no_worker_found_is_a_number(role: WorkerRole) -> None:
    """The alert on a role without workers compares a series with 0: it must be there."""
    registry = CollectorRegistry()
    Directory(
        DirectoryOptions(("dns:///nobody:1",), ("dns:///nobody:2",)),
        FACTS,
        RouterMetrics.create(registry),
        random.Random(0),
    )
    for state in ("usable", "unusable"):
        assert (
            registry.get_sample_value("baton_router_workers", {"role": role.value, "state": state})
            == 0
        )


async def test_workers_are_counted_by_state() -> None:
    known = Known(num_decode=2)
    assert (
        known.workers(WorkerRole.DECODE, "usable"),
        known.workers(WorkerRole.DECODE, "unusable"),
    ) == (0, 2)
    serves(known.decode[0])
    assert (
        known.workers(WorkerRole.DECODE, "usable"),
        known.workers(WorkerRole.DECODE, "unusable"),
    ) == (1, 1)


def num_lines(work: Callable[[], object]) -> int:
    """Count the lines of Python that run, except those of a garbage collection."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401 (itself)
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


async def test_the_cost_of_a_report_is_independent_of_fleet_size() -> None:
    """And so does the question that follows each: whether there is a pair. With four reports of
    each worker a second, what grows with the fleet grows with its square."""

    def steps(num_decode: int) -> int:
        known = Known(num_decode)
        for worker in known.directory.workers:
            serves(worker)
        report = partial(
            known.decode[-1].reported,
            worker_pb2.WorkerLoad(serving=True, pages_free=9, slots_free=4),
        )
        return num_lines(lambda: (report(), known.directory.pair_problem()))

    assert steps(100) == steps(2)


async def test_a_report_takes_as_much_while_no_pair_is_there() -> None:
    """A router that starts gets one of each worker before it has a pair, and reckons after each how
    long to wait."""

    def steps(num_decode: int) -> int:
        known = Known(num_decode)
        for worker in known.decode:
            serves(worker)
        load = worker_pb2.WorkerLoad(serving=True, pages_free=9, slots_free=4, start_s=3.0)
        known.decode[0].reported(load)
        report = partial(known.decode[-1].reported, load)
        return num_lines(
            lambda: (report(), known.directory.is_paired, known.directory.restart_estimate_s)
        )

    assert steps(100) == steps(2)


async def test_the_index_cost_of_a_worker_is_independent_of_fleet_size() -> None:
    def reported(num_decode: int) -> None:
        for worker in Known(num_decode).decode:
            keeps(worker, range(40))

    assert num_lines(lambda: reported(400)) < 15 * num_lines(lambda: reported(40))


async def test_the_restart_estimate_is_the_slowest_of_the_last_starts() -> None:
    registry = CollectorRegistry()
    directory = Directory(
        DirectoryOptions(("h:1",), ("h:2", "h:3"), longest_restart_s=100.0),
        FACTS,
        RouterMetrics.create(registry),
        random.Random(0),
    )
    assert directory.restart_estimate_s == 0.0
    _, first, second = directory.workers
    for worker, start_s, slowest_s in (
        (first, 8.0, 8.0),
        (second, 20.0, 20.0),
        (second, 4.0, 8.0),
        (first, 0.0, 8.0),
        (first, 2.0, 4.0),
    ):
        serves(worker)
        worker.reported(worker_pb2.WorkerLoad(serving=True, start_s=start_s))
        assert directory.restart_estimate_s == START_MARGIN * slowest_s


async def test_the_start_cost_of_a_worker_is_independent_of_fleet_size() -> None:
    assert num_lines(lambda: Known(num_decode=400)) < 15 * num_lines(lambda: Known(num_decode=40))


async def test_the_cost_of_estimates_is_independent_of_fleet_size() -> None:
    """They are made several times for every request. In a fleet of equal workers some represent
    all."""
    clock = ManualClock()

    def fleet(num_decode: int) -> tuple[Sequence[Worker], Sequence[Worker]]:
        known = Known(num_decode)
        for worker in known.directory.workers:
            serves(worker)
            worker.decode_pace = DecodePace(clock)
            worker.decode_pace.observe(1, 100, 5.0)
            worker.book(100)
        return known.directory.usable(WorkerRole.PREFILL), known.directory.usable(WorkerRole.DECODE)

    small, large = fleet(MOST_ASKED), fleet(10 * MOST_ASKED)
    assert num_lines(lambda: Rates.of(*large, 1)) < 1.5 * num_lines(lambda: Rates.of(*small, 1))
    assert Rates.of(*large, 1).output_tokens_per_s == pytest.approx(
        10 * Rates.of(*small, 1).output_tokens_per_s
    )


async def test_the_cost_of_a_choice_is_independent_of_fleet_size() -> None:
    """Those that it looks at are some of many. The worker that has the prompt is among them, and so
    is the only one that has room."""

    def fleet(num_decode: int) -> Known:
        known = Known(num_decode)
        for worker in known.directory.workers:
            serves(worker, compatibility="m")
        keeps(known.decode[-1], range(40))
        known.directory.placement.place(
            PlacementRequest(RoutedPrompt([1]))
        )  # some things are reckoned once
        return known

    prompt = RoutedPrompt(list(range(40)))
    small, large = fleet(2 * MOST_COMPARED), fleet(8 * MOST_COMPARED)
    lines = [
        num_lines(partial(known.directory.placement.place, PlacementRequest(prompt)))
        for known in (small, large)
    ]
    assert lines[1] < 1.2 * lines[0]
    (booking,) = large.decode[-1]._bookings
    assert booking.num_cached == 32
    for worker in large.decode[:-2]:
        worker.reported(worker_pb2.WorkerLoad(serving=True, queued_requests=1))
    large.decode[-1].lost("gone")
    pair = large.directory.placement.place(PlacementRequest(prompt))
    assert pair is not None
    assert pair.decode.worker is large.decode[-2]


async def test_reports_do_not_wake_admission_with_an_empty_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, looks = Known(), []
    monkeypatch.setattr(Admission, "_pump", lambda admission: looks.append(admission))
    service_model = ServiceTimeModel(ManualClock())
    admission = Admission(
        known.directory, AdmissionLimits(), RouterMetrics.create(CollectorRegistry()), service_model
    )
    task = asyncio.create_task(admission.run())
    for worker in known.directory.workers:
        serves(worker)
        await asyncio.sleep(0.001)
    task.cancel()
    assert not looks


async def test_a_rejected_worker_limits_no_request() -> None:
    known = Known(num_decode=2)
    serves(known.prefill)
    serves(known.decode[0])
    assert known.directory.facts.max_context_tokens == 160
    serves(known.decode[1], vocab_size=7, max_context_tokens=8)
    assert "vocab_size" in known.decode[1].problem
    assert known.directory.facts.max_context_tokens == 160
    known.decode[1].lost("cannot be reached")
    assert known.directory.facts.max_context_tokens == 160, "what it said of itself still stands"
    serves(known.decode[1], incarnation="b", max_context_tokens=8)
    assert known.directory.facts.max_context_tokens == 160, (
        "the largest pair says what can be served"
    )
    known.decode[0].lost("cannot be reached")
    assert known.directory.facts.max_context_tokens == 160, "which may be back in a moment"


async def test_a_request_goes_to_workers_that_can_hold_it() -> None:
    known = Known(num_decode=2)
    serves(known.prefill)
    serves(known.decode[0], max_context_tokens=8, compatibility="m")
    serves(known.decode[1], compatibility="m")
    serves(known.prefill, compatibility="m")
    small, large = known.decode[0].address, known.decode[1].address
    for context_tokens, fitting in (
        (8, {small, large}),
        (9, {large}),
        (160, {large}),
        (161, set()),
    ):
        request = PlacementRequest(PROMPT, context_tokens, "m")
        book = partial(known.directory.placement.book_decode, request)
        found: set[str] = set()
        while (booking := book(frozenset(found))) is not None:
            found.add(booking.worker.address)
            booking.release()
        assert found == fitting
        assert known.directory.placement.can_hold(PlacementRequest(PROMPT, context_tokens)) == bool(
            fitting
        )
        assert known.directory.placement.has_pair(
            PlacementRequest(PROMPT, context_tokens, "m")
        ) == bool(fitting)
        assert known.directory.placement.has_decode(
            PlacementRequest(PROMPT, context_tokens, "m")
        ) == bool(fitting)
        pair = known.directory.placement.place(
            PlacementRequest(RoutedPrompt([1, 2]), context_tokens)
        )
        assert ({pair.decode.worker.address} <= fitting) if pair is not None else not fitting
        if pair is not None:
            pair.release()
    assert (
        known.directory.placement.place_again(PlacementRequest(RoutedPrompt([1]), 9, "m"), large)
        is not None
    ), "the same one, if no other can"
    known.decode[1].lost("gone")
    assert not known.directory.placement.can_hold(PlacementRequest(PROMPT, 9))
    assert (
        known.directory.placement.place_again(PlacementRequest(RoutedPrompt([1]), 9, "m"), large)
        is None
    )


async def test_the_largest_pair_counts_and_not_the_largest_workers() -> None:
    known = Known(num_decode=2)
    serves(known.prefill, compatibility="m")
    serves(known.decode[0], compatibility="m", max_context_tokens=64)
    serves(known.decode[1], compatibility="other")
    assert known.directory.facts.max_context_tokens == 64


@pytest.mark.parametrize(
    ("theirs", "ours", "accepted"),
    [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True)],
)
async def test_a_worker_with_another_tokenizer_is_refused_by_both_digests(
    theirs: str, ours: str, *, accepted: bool
) -> None:
    known = Known()
    facts = replace(FACTS, tokenizer_digest=ours)
    known.prefill.introduced(worker_info(WorkerRole.PREFILL, tokenizer_digest=theirs), facts)
    known.prefill.reported(worker_pb2.WorkerLoad(serving=True))
    assert known.prefill.is_usable == accepted
    if not accepted:
        assert known.prefill.problem == (
            "it has another tokenizer: the digest of its tokenizer.json is a, the router's b"
        )


async def test_waiters_for_a_pair_wake_when_one_appears_or_disappears() -> None:
    known = Known()
    serves(known.decode[0])
    waiting = asyncio.create_task(known.directory.until_paired(is_paired=True))
    await asyncio.sleep(0)
    serves(known.prefill)
    await asyncio.wait_for(waiting, 30)
    waiting = asyncio.create_task(known.directory.until_paired(is_paired=False))
    known.prefill.book(10).release()
    serves(known.prefill)
    await asyncio.sleep(0)
    assert not waiting.done()
    known.decode[0].lost("cannot be reached")
    await asyncio.wait_for(waiting, 30)
    await known.directory.until_paired(is_paired=False)


@pytest.mark.parametrize(
    ("version", "accepted"), [(0, False), (WIRE_VERSION, True), (WIRE_VERSION + 1, False)]
)
async def test_a_worker_with_another_wire_version_is_unusable(
    version: int, *, accepted: bool
) -> None:
    known = Known()
    known.prefill.introduced(worker_info(WorkerRole.PREFILL, wire_version=version), FACTS)
    known.prefill.reported(worker_pb2.WorkerLoad(serving=True))
    assert known.prefill.is_usable == accepted
    if not accepted:
        assert known.prefill.problem == (
            "it speaks another version of the worker protocol: its wire "
            f"version is {version}, the router's {WIRE_VERSION}"
        )


@pytest.mark.parametrize(
    ("theirs", "ours", "accepted"),
    [((1, 2), (2, 1), True), ((), (1,), True), ((1,), (), False), ((1, 2), (1,), False)],
)
async def test_a_worker_with_other_end_tokens_is_refused(
    theirs: tuple[int, ...], ours: tuple[int, ...], *, accepted: bool
) -> None:
    """Otherwise one of two routers with the same workers would let outputs run on."""
    known = Known()
    facts = replace(FACTS, eos_token_ids=ours)
    known.prefill.introduced(worker_info(WorkerRole.PREFILL, eos_token_ids=theirs), facts)
    known.prefill.reported(worker_pb2.WorkerLoad(serving=True))
    assert known.prefill.is_usable == accepted
    if not accepted:
        assert known.prefill.problem == (
            f"it ends responses elsewhere: its eos_token_id are {list(theirs)}, the "
            f"router's {list(ours)}"
        )


@pytest.mark.parametrize(("theirs", "accepted"), [((1,), True), ((1, 3), False)])
async def test_a_worker_without_a_tokenizer_need_not_know_the_tokenizers_end(
    theirs: tuple[int, ...], *, accepted: bool
) -> None:
    known = Known()
    facts = replace(FACTS, eos_token_ids=(1, 2), tokenizer_digest="abc")
    known.prefill.introduced(worker_info(WorkerRole.PREFILL, eos_token_ids=theirs), facts)
    known.prefill.reported(worker_pb2.WorkerLoad(serving=True))
    assert known.prefill.is_usable == accepted


async def test_a_worker_without_a_partner_reports_only_differences() -> None:
    known = Known(num_decode=2)
    described = {
        "p": "schema 6, page size 32, layers 0-7: kv",
        "d": "schema 6, page size 64, layers 0-7: kv",
    }

    def introduce(worker: Worker, text: str, *, serving: bool = True) -> None:
        worker.introduced(
            worker_info(
                worker.role,
                incarnation=worker.address,
                compatibility=text,
                compatibility_text=described[text],
            ),
            FACTS,
        )
        worker.reported(worker_pb2.WorkerLoad(serving=serving))

    introduce(known.prefill, "p")
    introduce(known.decode[1], "p", serving=False)
    assert statuses([known.prefill, *known.decode])[0].reason == "no decode worker is usable"
    introduce(known.decode[0], "d")
    reasons = [status.reason for status in statuses([known.prefill, *known.decode])[:2]]
    assert reasons == [
        "no usable decode worker fits it: they differ in page size (32 here, 64 there)",
        "no usable prefill worker fits it: they differ in page size (64 here, 32 there)",
    ]


async def test_a_worker_of_the_other_role_is_refused_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = Known()
    apply_report(
        known.prefill, FACTS, worker_pb2.WatchResponse(info=worker_info(WorkerRole.DECODE))
    )
    (record,) = (record for record in caplog.records if record.name.startswith("router."))
    assert (record.levelname, record.message) == ("WARNING", "worker refused")
    assert vars(record)["reason"] == "it is a decode worker, configured as prefill"


async def test_half_a_pair_is_never_booked() -> None:
    """Two requests that wait for a pool would wake each other with what they book and give back."""
    known = Known(num_decode=2)
    serves(known.prefill)
    serves(known.decode[1], compatibility="another")
    woken = asyncio.create_task(known.directory.changed())
    await asyncio.sleep(0)
    assert (
        known.directory.placement.place_again(
            PlacementRequest(RoutedPrompt([1, 2, 3])), known.decode[0].address
        )
        is None
    )
    assert known.directory.placement.place(PlacementRequest(RoutedPrompt([1, 2, 3]))) is None
    await asyncio.sleep(0)
    assert not woken.done()
    assert known.chosen() == 0

    serves(known.decode[0])
    async with asyncio.timeout(5):
        await woken
    again = known.directory.placement.place_again(
        PlacementRequest(RoutedPrompt([1, 2, 3])), known.decode[0].address
    )
    assert again is not None, "the pool that was lost is back, and there is no other"
    assert (again.prefill.worker, again.decode.worker) == (known.prefill, known.decode[0])
    assert known.chosen() == 2


async def test_the_pool_that_gave_a_request_up_gets_it_only_if_there_is_no_other() -> None:
    known = Known(num_decode=2)
    for worker in known.directory.workers:
        serves(worker)
    for lost, other in (known.decode, reversed(known.decode)):
        pair = known.directory.placement.place_again(
            PlacementRequest(RoutedPrompt([1, 2, 3])), lost.address
        )
        assert pair is not None
        assert pair.decode.worker is other
        pair.release()


async def test_a_source_with_a_compatible_pool_is_chosen() -> None:
    """The idle prefill worker has a draft that no pool takes."""
    registry = CollectorRegistry()
    directory = Directory(
        DirectoryOptions(("h:1", "h:2"), ("h:3",)),
        FACTS,
        RouterMetrics.create(registry),
        random.Random(0),
    )
    serves(directory.workers[0], compatibility="m+e")
    serves(directory.workers[1], compatibility="m+d")
    serves(directory.workers[2], compatibility="m+d")
    directory.workers[1].book(1000)
    pair = directory.placement.place_again(PlacementRequest(RoutedPrompt([1, 2, 3]), 0, "m"), "h:9")
    assert pair is not None
    assert pair.prefill.worker is directory.workers[1]


async def test_the_limit_of_a_request_takes_one_look_at_each_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every request asks for it, refused ones too."""
    known, looks = Known(30), []

    def max_context_tokens(worker: Worker) -> int:
        looks.append(worker.address)
        return 100

    for worker in known.directory.workers:
        serves(worker)
    monkeypatch.setattr(Worker, "max_context_tokens", property(max_context_tokens))
    assert known.directory.facts.max_context_tokens == 100
    assert len(looks) == len(known.directory.workers)


async def test_a_prompt_goes_to_its_cached_prefix_and_the_rest_counts_as_load() -> None:
    """40 tokens, of which two pages of 16 are there; the last token is always computed."""
    directory = Directory(
        DirectoryOptions(("h:1", "h:2"), ("h:3",)),
        FACTS,
        RouterMetrics.create(CollectorRegistry()),
        random.Random(0),
    )
    for worker in directory.workers:
        serves(worker, compatibility="m")
    _, second, _ = directory.workers
    keeps(second, range(40))
    for token_ids, salt, uses_cache, num_cached in (
        (range(40), "", True, 32),
        (range(32), "", True, 16),
        (range(1, 41), "", True, 0),
        (range(40), "other", True, 0),
        (range(40), "", False, 0),
    ):
        pair = directory.placement.place(
            PlacementRequest(RoutedPrompt(list(token_ids), salt, uses_cache), 50)
        )
        assert pair is not None
        assert pair.prefill.worker is second or not num_cached
        assert pair.prefill.num_cached == num_cached
        assert pair.prefill.num_tokens == len(token_ids) - num_cached
        assert (
            directory.placement.num_missing(RoutedPrompt(list(token_ids), salt, uses_cache))
            == pair.prefill.num_tokens
        )
        assert pair.decode.num_tokens == len(token_ids)
        pair.release()
    serves(second, compatibility="m", incarnation="after a restart")
    pair = directory.placement.place(PlacementRequest(RoutedPrompt(list(range(40))), 50))
    assert pair is not None
    assert pair.prefill.num_cached == 0


@pytest.mark.parametrize(
    ("source", "pool", "kept_as", "num_cached"),
    [
        ("m", "m", "m", 32),
        ("m", "m+d", "m", 32),
        ("m+d", "m+d", "m+d", 32),
        ("m+d", "m+d", "m", 0),
        ("m", "m+d", "m+d", 0),
    ],
)
async def test_the_pool_with_the_cached_prompt_wins_between_equal_loads(
    source: str, pool: str, kept_as: str, num_cached: int
) -> None:
    """The cache counts as it was received: with the draft only if both have it."""
    directory = Directory(
        DirectoryOptions(("h:1",), ("h:2", "h:3")),
        FACTS,
        RouterMetrics.create(CollectorRegistry()),
        random.Random(0),
    )
    prefill, *pools = directory.workers
    serves(prefill, compatibility=source)
    for worker in pools:
        serves(worker, compatibility=pool)
    keeps(pools[1], range(40), compatibility=kept_as)
    pair = directory.placement.place(PlacementRequest(RoutedPrompt(list(range(40))), 50))
    assert pair is not None
    assert pair.decode.worker is pools[1] or not num_cached
    assert pair.decode.num_cached == num_cached
    pair.release()
    pools[1].book(64)
    again = directory.placement.place(PlacementRequest(RoutedPrompt(list(range(40))), 50))
    assert again is not None
    assert again.decode.worker is pools[0], "load counts more than bytes"
    again.release()
    for worker in pools:
        lately = worker.book(1)
        lately.answered(10, 1.0)
        directory.placement.linked(again.prefill, lately, 100.0)
        lately.release()
    slow = directory.placement.place(PlacementRequest(RoutedPrompt(list(range(40))), 50))
    assert slow is not None
    assert slow.decode.worker is pools[1] or not num_cached, (
        "bytes on a slow link count more than load"
    )


async def test_a_request_with_an_adapter_goes_to_workers_that_have_it() -> None:
    known = Known(2)
    serves(known.prefill, adapters=["a", "b"])
    serves(known.decode[0], adapters=["b"])
    serves(known.decode[1])
    placement = known.directory.placement
    assert known.directory.facts.adapters.offered == {"b": "b"}
    addresses = [pool.address for pool in known.decode]
    for adapter, pools in (("", set(addresses)), ("b", {addresses[0]}), ("a", set())):
        request = PlacementRequest(RoutedPrompt([1, 2, 3], adapter=adapter), 8)
        assert placement.can_hold(request) is bool(pools)
        pairs = [placement.place(request) for _ in range(3)]
        found = {pair.decode.address for pair in pairs if pair is not None}
        assert found <= pools
        assert bool(found) is bool(pools)
        for pair in pairs:
            if pair is not None:
                pair.release()

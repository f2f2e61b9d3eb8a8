"""Data ranks of a running pool: random traffic in which no rank ever waits for one that does not
come (case S3-8)."""

import itertools
import random
import re
import threading
from dataclasses import dataclass, field
from functools import partial

import pytest

from decode.entry import DecodeEntryEvent, DecodeLimits
from decode.request_memory import Reservation
from decode.scheduler import DecodeScheduler
from engine import loop as loop_module
from engine.core.request import Request, SamplingParams
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.ranks import StageRanks
from engine.pipeline.step_plan import RankBatches, plan_step
from models.loader import ModelDescription
from pool.request.entry import DataRanks
from runtime.clock import ManualClock
from runtime.errors import CapacityError, InvalidRequestError, PeerLostError, UnavailableError
from tests.support.drafts.drafters import OracleDrafter, Shape
from tests.support.models.tiny_models import QWEN3, tiny
from tests.support.pool.local_pool import Answer, LocalPool, Speculation, call, local_pool

CHAIN = Shape(1, 2, 2)


def small() -> ModelDescription:
    return tiny({**QWEN3, "num_hidden_layers": 1})


def random_request(rng: random.Random, number: int) -> Request:
    prompt = tuple(rng.randrange(3, 250) for _ in range(rng.choice((1, 3, 9, 30))))
    return Request(f"r{number}", prompt, rng.randrange(1, 24), SamplingParams(temperature=0.0))


@dataclass
class Traffic:
    """A constant number of requests on a pool, which end or are cancelled; counts its steps."""

    pool: LocalPool
    rng: random.Random
    num_steps: int
    steps: int = 0
    modes: set[str] = field(default_factory=set)
    answers: list[tuple[Request, Answer]] = field(default_factory=list)
    given_up: set[str] = field(default_factory=set)
    preemptions: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.done.wait(0.02):
            assert self.pool.loop.failure is None
            if not self._num_open:
                call(self.pool.loop, self._arrive)
        for _, answer in self.answers:
            assert answer.done.wait(60), "a rank waits"

    def planned(self, step: RankBatches) -> RankBatches:
        """Record a plan, in the loop, once per step."""
        self.steps += any(each is not None for each in step)
        self.modes |= {each.mode for each in step if each is not None}
        if self.steps >= self.num_steps:
            self.done.set()
        return step

    def _arrive(self) -> None:
        """Submit requests on the loop's thread; each one that ends submits the next."""
        if self.done.is_set():
            return
        answer, scheduler = Answer(), self.rng.choice(self.pool.schedulers)
        request = random_request(self.rng, len(self.answers))
        self.answers.append((request, answer))

        def emit(event: DecodeEntryEvent) -> None:
            answer.emit(event)
            if answer.done.is_set():
                if answer.finished is not None:
                    self.preemptions += answer.finished.num_preemptions
                for _ in range(self.rng.choice((0, 1, 1, 1, 2)) if self._num_open else 2):
                    self.pool.loop.post(self._arrive)
            elif self.rng.random() < 0.02:
                self._give_up(request, answer, key)

        try:
            key = scheduler.submit_local(request, emit)
        except (CapacityError, InvalidRequestError):  # no room now, or never: it does not come
            self.answers.pop()

    def _give_up(self, request: Request, answer: Answer, key: int) -> None:
        self.given_up.add(request.request_id)
        for scheduler in self.pool.schedulers:
            self.pool.loop.post(
                partial(scheduler.release, key)
            )  # keys are of the pool: others do not know it
        answer.done.set()
        self.pool.loop.post(self._arrive)

    @property
    def _num_open(self) -> int:
        return sum(not answer.done.is_set() for _, answer in self.answers[-32:])


def fuzzed(
    num_steps: int, seed: int, monkeypatch: pytest.MonkeyPatch, *, num_stages: int = 1, tp: int = 2
) -> Traffic:
    speculation = Speculation(lambda num_pages: OracleDrafter(CHAIN), CHAIN.nodes)
    with local_pool(
        small(),
        num_stages,
        tp=tp,
        dp=2,
        page_size=4,
        num_pages=12,
        max_running=4,
        chunk_tokens=16,
        speculation=speculation,
    ) as pool:
        traffic = Traffic(pool, random.Random(seed), num_steps)
        monkeypatch.setattr(loop_module, "plan_step", lambda own: traffic.planned(plan_step(own)))
        traffic.run()
        for scheduler in pool.schedulers:
            call(pool.loop, scheduler.on_idle)
            assert scheduler.pages.num_free == scheduler.pages.num_total
    return traffic


def check(traffic: Traffic) -> None:
    """Check that requests which were not cancelled have their reference tokens."""
    whole = [
        (request, answer)
        for request, answer in traffic.answers
        if request.request_id not in traffic.given_up
    ]
    assert all(answer.finished is not None for _, answer in whole)
    with local_pool(small(), page_size=4, num_pages=300, max_running=16) as alone:
        sample = whole[:12]
        expected = [answer.tokens for answer in alone.generate([request for request, _ in sample])]
    assert [answer.tokens for _, answer in sample] == expected


def test_s3_8_random_traffic_leaves_no_rank_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = fuzzed(150, 1, monkeypatch)
    assert {"idle", "verify", "prefill"} <= traffic.modes
    check(traffic)


@pytest.mark.long
@pytest.mark.timeout(900)  # two minutes of a core
def test_s3_8_ten_thousand_steps_of_random_traffic_leave_no_rank_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traffic = fuzzed(10_000, 2, monkeypatch)
    assert {"idle", "verify", "prefill"} <= traffic.modes
    assert traffic.preemptions
    assert traffic.given_up
    check(traffic)


def test_s3_8_a_rank_that_waits_names_the_one_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader that forgets the idle batch: the way of the field to hang. Of the first part an idle
    rank has no rows."""
    monkeypatch.setattr(
        loop_module,
        "plan_step",
        lambda own: tuple(
            None if each is not None and each.mode == "idle" else each for each in plan_step(own)
        ),
    )
    monkeypatch.setattr(StageRanks, "_wait_s", 0.2)
    with local_pool(small(), tp=2, dp=2) as pool:
        (answer,) = pool.generate([Request("r", (5, 6, 7), 5)])
    assert answer.failed is not None
    assert isinstance(answer.failed.error, PeerLostError | UnavailableError)
    assert re.search(
        r"rank 0 of stage 0 has waited 0\.2 s for rank 1 of stage 0: part 2 of batch \d+ did not arrive",
        str(answer.failed.error),
    )


def schedulers(num_pages: int) -> DataRanks[DecodeScheduler]:
    keys = itertools.count(1)
    limits = DecodeLimits(
        page_size=4, grid=1, depth=1, max_running=4, max_context_tokens=64, growth_tokens=0
    )
    return DataRanks(
        tuple(
            DecodeScheduler(
                pages=PageAllocator(num_pages),
                slots=SlotAllocator(0),
                limits=limits,
                clock=ManualClock(),
                data_rank=rank,
                keys=keys,
            )
            for rank in range(2)
        )
    )


def reserve(ranks: DataRanks[DecodeScheduler], num_tokens: int) -> Reservation:
    request = Request("r", (7,) * num_tokens, 1)
    return ranks.place(
        request, (), lambda scheduler: scheduler.reserve(request, lambda event: None)
    )


def test_a_request_is_placed_on_the_data_rank_with_most_free_pages() -> None:
    ranks = schedulers(num_pages=7)  # six to use
    placed = [reserve(ranks, num_tokens) for num_tokens in (16, 4, 4, 8)]  # 4, 1, 1 and 2 pages
    assert [reservation.data_rank for reservation in placed] == [0, 1, 1, 1]
    assert [reservation.key for reservation in placed] == [1, 2, 3, 4], "keys are of the pool"
    assert ranks.load().pages_free == 2 + 2
    assert [load.pages_free for load in ranks.load().data_ranks] == [2, 2]
    with pytest.raises(CapacityError):
        reserve(ranks, 12)
    ranks.of(4).release(4)
    assert reserve(ranks, 12).data_rank == 1
    assert [load.pages_free for load in ranks.load().data_ranks] == [2, 1]
    ranks.of(99).release(99)  # of a request that is over


def test_a_data_rank_that_refuses_a_request_stops_no_other() -> None:
    """The first choice has most pages free, and holds as many requests as it may."""
    ranks = schedulers(num_pages=41)
    placed = [reserve(ranks, num_tokens).data_rank for num_tokens in (4, 60, 4, 4, 4)]
    assert placed == [0, 1, 0, 0, 0]
    assert [load.pages_free for load in ranks.load().data_ranks] == [36, 25]
    assert [reserve(ranks, 4).data_rank for _ in range(3)] == [1, 1, 1]
    with pytest.raises(CapacityError, match="4 requests hold memory, the limit is 4"):
        reserve(ranks, 4)


def test_of_several_refusals_that_of_the_first_choice_is_raised() -> None:
    """The first choice holds as many requests as it may, the other one has too few pages."""
    ranks = schedulers(num_pages=20)
    assert [reserve(ranks, num_tokens).data_rank for num_tokens in (4, 60, 4, 4, 4)] == [
        0,
        1,
        0,
        0,
        0,
    ]
    assert [load.pages_free for load in ranks.load().data_ranks] == [15, 4]
    with pytest.raises(CapacityError, match="4 requests hold memory, the limit is 4"):
        reserve(ranks, 40)

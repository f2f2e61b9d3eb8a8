"""Admission queue: ordering, bounds and expired requests, by hand and as properties of any sequence
of events."""

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.demand import MAX_RETRY_S, MIN_RETRY_S, Cause, Demand, Refusal, WaitingLimits
from router.request.service_times import (
    MIN_ERRORS,
    START_CAUTION,
    TRIAL_S,
    Rates,
    ServiceTimeModel,
    TokenWork,
)
from router.request.waiting_line import LEAST_SLACK_S, LOOK_AHEAD, Waiter, WaitingLine
from router.workers.pace import PromptsAhead
from runtime.clock import NO_DEADLINE, Deadline, ManualClock
from runtime.pace import MIN_TOKENS

# A hundred prompt tokens and twenty output tokens per second; alone, a prompt token takes 10 ms and
# an output token 50.
RATES = Rates(100.0, 20.0, 0.01, 0.05, ahead=PromptsAhead.of([50.0]), is_idle=False)
WORK = TokenWork(100.0, 10.0)


class Line:
    """A line whose services take exactly as long as is estimated."""

    def __init__(self, *, max_waiting: int = 100, max_wait_s: float = 60.0) -> None:
        self.clock = ManualClock(1000.0)
        self.service_model = ServiceTimeModel(self.clock)
        self.line: WaitingLine[str] = WaitingLine(
            WaitingLimits(max_waiting, max_wait_s), self.service_model
        )

    def exact(self, *services_s: float) -> "Line":
        """Use no safety margin for services of about this many seconds."""
        for service_s in services_s:
            for _ in range(MIN_ERRORS):
                self.service_model.habits.served("", service_s, service_s)
        return self

    def enter(
        self,
        name: str,
        within_s: float = math.inf,
        *,
        work: TokenWork = WORK,
        priority: int = 0,
        rates: Rates = RATES,
        client: str = "",
    ) -> Waiter[str] | Refusal:
        now = self.clock.now()
        return self.line.enter(
            Demand(work, Deadline.after(self.clock, within_s), priority, client=client),
            name,
            rates,
            now,
        )

    def serve(self) -> str:
        """Place the first request on workers."""
        first = self.line.first
        self.line.served(first)
        return first.item

    @property
    def names(self) -> list[str]:
        return [waiter.item for waiter in self.line]


def test_a_service_is_the_queue_at_workers_its_prompt_and_its_tokens() -> None:
    """(50 + 100) x 0.01 + 10 x 0.05 = 2 s, and a quarter more while the error of estimates is
    unknown."""
    assert RATES.service_s(WORK) == pytest.approx(2.0)
    line = Line()
    assert line.service_model.cautious_s(RATES, "", WORK) == pytest.approx(2.0 * START_CAUTION)
    assert line.exact(2.0).service_model.cautious_s(RATES, "", WORK) == pytest.approx(2.0)
    line.service_model.habits.served("", 2.0, 8.0)
    assert line.service_model.cautious_s(RATES, "", WORK) == pytest.approx(2.0), "once a second"
    line.clock.advance(1.0)
    assert line.service_model.cautious_s(RATES, "", WORK) == pytest.approx(8.0)


def test_a_prompt_waits_for_shorter_ones_and_a_share_of_longer_ones() -> None:
    """Of 100 tokens: two of 100 and 300 are before it, as is all of one of 400, but of longer ones
    three tokens for each of the short ones' and its own."""
    assert PromptsAhead.of([]).before(100) == 0
    assert PromptsAhead.of([300, 100, 400]).before(100) == 800
    assert PromptsAhead.of([60_000]).before(100) == 300
    assert PromptsAhead.of([60_000] * 4).before(100) == 300, (
        "they share three of four tokens, however many they are"
    )
    assert PromptsAhead.of([60_000, 300]).before(100) == 300 + 3 * 400
    assert PromptsAhead.of([401]).before(100) == 300
    assert PromptsAhead.of([60_000, 300], num_workers=2).before(100) == (300 + 3 * 400) / 2, (
        "either of them"
    )
    assert PromptsAhead.of([60_000]).before(20_000) == 60_000
    assert (
        Rates(prompt_token_s=0.01, ahead=PromptsAhead.of([100, 300])).placed_service_s(
            TokenWork(100)
        )
        == 4.0
    )
    assert (
        Rates(prompt_token_s=0.01, ahead=PromptsAhead.of([100])).placed_service_s(TokenWork(100))
        == 1.0
    )


def test_a_resumed_output_counts_as_prompt_and_only_the_rest_as_output() -> None:
    service_model = ServiceTimeModel(ManualClock())
    service_model.habits.answered("", 32, 32)
    assert service_model.work("", 100, 32) == TokenWork(100, 32)
    assert service_model.work("", 100, 32, 10) == TokenWork(110, 22)
    assert service_model.work("", 4, 32) == TokenWork(MIN_TOKENS, 32), "as its time is counted"


def test_a_wait_is_as_long_as_the_slower_half_takes() -> None:
    assert RATES.wait_s(TokenWork(200, 10)) == pytest.approx(2.0)
    assert RATES.wait_s(TokenWork(10, 200)) == pytest.approx(10.0)


def test_a_request_that_cannot_finish_in_time_is_refused_on_arrival() -> None:
    """Each takes 2 s and makes the next one wait for 1 s: the fourth would end after 5 s, at its
    deadline."""
    line = Line().exact(2.0)
    assert [isinstance(line.enter(str(i), 5.0), Waiter) for i in range(4)] == [True] * 4
    late = line.enter("late", 5.0)
    assert isinstance(late, Refusal)
    assert late.cause is Cause.DEADLINE
    assert (late.wait_s, late.service_s) == pytest.approx((4.0, 2.0))
    assert late.retry_after_s == pytest.approx(4.0), "as long as everybody before it waits"
    assert isinstance(line.enter("patient", 6.1), Waiter)


def test_a_queue_that_exceeds_the_wait_limit_refuses() -> None:
    line = Line(max_wait_s=2.5)
    assert [isinstance(line.enter(str(i)), Waiter) for i in range(3)] == [True] * 3
    refused = line.enter("too many")
    assert isinstance(refused, Refusal)
    assert refused.cause is Cause.WAIT
    assert refused.wait_s == pytest.approx(3.0)


def test_the_hard_limit_holds_for_short_waits_too() -> None:
    line = Line(max_waiting=2)
    for name in "ab":
        line.enter(name, rates=Rates())
    full = line.enter("c", rates=Rates())
    assert isinstance(full, Refusal)
    assert (full.cause, full.retry_after_s) == (Cause.QUEUE_FULL, None), "nothing was measured"


def test_nothing_is_refused_on_a_guess() -> None:
    """Either nothing was measured, or a pair of pools is idle, which overrides earlier
    measurements."""
    line = Line()
    assert isinstance(line.enter("unmeasured", 1e-3, rates=Rates(is_idle=False)), Waiter)
    line = Line()
    assert isinstance(
        line.enter("idle", 1e-3, rates=Rates(100.0, 20.0, 0.01, 0.05, is_idle=True)), Waiter
    )
    assert isinstance(
        line.enter("second", 1e-3, rates=Rates(100.0, 20.0, 0.01, 0.05, is_idle=True)), Refusal
    )


def test_order_is_priority_then_slack_then_arrival() -> None:
    line = Line().exact(2.0, 8.0)
    for name in "ab":
        line.enter(name)
    line.enter("hurry", 20.0)
    line.enter(
        "long", 22.0, work=TokenWork(100, 130)
    )  # 8 s of service: it has to begin before "hurry"
    line.enter("unimportant", 20.0, priority=1)
    line.enter("urgent", priority=-1)
    assert line.names == ["urgent", "long", "hurry", "a", "b", "unimportant"]


def test_time_brings_those_without_a_deadline_to_the_front() -> None:
    line = Line(max_wait_s=60.0).exact(2.0)
    line.enter("patient")
    line.clock.advance(55.0)
    line.enter("in a hurry", 8.0)
    line.enter("in less of a hurry", 9.9)
    assert line.names == ["patient", "in a hurry", "in less of a hurry"]


def test_a_waiter_that_cannot_meet_its_deadline_is_dropped() -> None:
    line = Line().exact(2.0)
    line.enter("short", 4.0)
    line.enter("long", 10.0)
    line.clock.advance(1.9)
    assert not line.line.drop_hopeless(RATES, line.clock.now())
    line.clock.advance(0.2)
    ((waiter, refusal),) = line.line.drop_hopeless(RATES, line.clock.now())
    assert (waiter.item, refusal.cause) == ("short", Cause.DEADLINE)
    assert refusal.wait_s == pytest.approx(1.0)
    assert line.names == ["long"]


def test_no_request_waits_longer_than_the_limit() -> None:
    line = Line(max_wait_s=10.0)
    line.enter("a")
    line.clock.advance(10.0)
    ((waiter, refusal),) = line.line.drop_hopeless(Rates(), line.clock.now())
    assert (waiter.item, refusal.cause) == ("a", Cause.WAIT)


def gain_of(gains: dict[str, int]) -> Callable[[str], int]:
    return lambda name: gains.get(name, 0)


def test_the_largest_cache_gain_goes_first_and_ties_by_arrival() -> None:
    line = Line()
    for name in "abcd":
        line.enter(name)
    line.enter("unimportant", priority=1)
    now_s = line.clock.now()
    assert line.line.best(gain_of({"b": 5, "c": 7, "d": 7, "unimportant": 9}), now_s).item == "c"
    assert line.line.best(gain_of({}), now_s).item == "a"
    assert line.line.best(gain_of({"a": -3, "b": -1}), now_s).item == "c"


def test_no_request_overtakes_one_that_cannot_wait_longer() -> None:
    line = Line(max_wait_s=60.0)
    line.enter("a")
    line.clock.advance(60.0 - LEAST_SLACK_S - 0.5)
    line.enter("b")
    gains = gain_of({"b": 5})
    assert line.line.best(gains, line.clock.now()).item == "b"
    line.clock.advance(1.0)
    assert line.line.best(gains, line.clock.now()).item == "a"


def test_overtaking_is_bounded() -> None:
    """This holds for any number of requests with cached prompts."""
    line = Line(max_waiting=2)
    line.enter("patient")
    for turn in range(LOOK_AHEAD + 1):
        line.enter("known")
        best = line.line.best(gain_of({"known": 5}), line.clock.now())
        line.line.passes(best)
        line.line.leave(best)
        assert best.item == ("patient" if turn == LOOK_AHEAD else "known")


DEMANDS = st.tuples(
    st.floats(0.1, 100.0) | st.just(math.inf),
    st.integers(-1, 1),
    st.integers(1, 300),
    st.integers(0, 50),
)
HAPPENINGS = st.lists(
    st.tuples(st.floats(0.0, 5.0), st.lists(DEMANDS, max_size=5), st.integers(0, 3)), max_size=30
)


@given(HAPPENINGS, st.integers(1, 8), st.floats(0.5, 30.0))
def test_admitted_requests_leave_in_order_when_placed_or_expired(
    happenings: Sequence[tuple[float, list[tuple[float, int, int, int]], int]],
    max_waiting: int,
    max_wait_s: float,
) -> None:
    line = Line(max_waiting=max_waiting, max_wait_s=max_wait_s)
    inside: set[int] = set()
    for passed_s, demands, num_places in happenings:
        line.clock.advance(passed_s)
        now = line.clock.now()
        for within_s, priority, prompt, output in demands:
            deadline = Deadline.after(line.clock, within_s)
            demand = Demand(TokenWork(prompt, output), deadline, priority)
            waiter = line.line.enter(demand, "", RATES, now)
            if isinstance(waiter, Waiter):
                inside.add(waiter.arrival)
                ahead = [
                    other
                    for other in line.line
                    if (other.demand.priority, other) < (priority, waiter)
                ]
                wait_s = RATES.wait_s(
                    TokenWork(
                        sum(other.demand.work.prompt_tokens for other in ahead),
                        sum(other.demand.work.output_tokens for other in ahead),
                    )
                )
                assert wait_s <= max_wait_s
                service_s = line.service_model.cautious_s(
                    RATES, "", waiter.demand.work
                )  # of a trial less than was asked
                assert now + (wait_s + service_s) <= deadline.at_s
        assert len(line.line) <= max_waiting
        order = list(line.line)
        assert order == sorted(
            order, key=lambda each: (each.demand.priority, each.begin_by_s, each.arrival)
        )
        for waiter, refusal in line.line.drop_hopeless(RATES, now):
            inside.remove(waiter.arrival)
            waited_out = now - waiter.since_s >= max_wait_s
            too_late = (
                now + line.service_model.cautious_s(RATES, "", waiter.demand.work)
                > waiter.demand.deadline.at_s
            )
            assert waited_out if refusal.cause is Cause.WAIT else too_late
        for waiter in list(line.line)[:num_places]:
            assert line.line.leave(waiter)
            assert not line.line.leave(waiter)
            inside.remove(waiter.arrival)
        assert {waiter.arrival for waiter in line.line} == inside, "no request leaves otherwise"
    assert {waiter.arrival for waiter in line.line.clear()} == inside
    assert not len(line.line)


def test_short_deadlines_buy_no_urgency_from_other_clients() -> None:
    """One client's requests have no deadline, another one's short ones: they are served in turn,
    the first of them first."""
    line = Line(max_wait_s=60.0)
    for number in range(3):
        line.enter(f"patient {number}", client="a")
    for number in range(6):
        line.enter(f"hurry {number}", 30.0 - number, client="b")
    assert line.names[:6] == [
        "patient 0",
        "hurry 5",
        "patient 1",
        "hurry 4",
        "patient 2",
        "hurry 3",
    ]
    served = []
    for number in range(
        6, 12
    ):  # "b" sends one for each that is served, more urgent than those before
        served.append(line.serve())
        line.enter(f"hurry {number}", 30.0 - number, client="b")
    assert served == ["patient 0", "hurry 6", "patient 1", "hurry 8", "patient 2", "hurry 10"]


def test_turns_count_tokens_and_unopposed_clients_owe_none() -> None:
    """Of one client's requests each has as many tokens as two of the other's."""
    line = Line(max_wait_s=600.0)
    for number in range(4):
        line.enter(f"long {number}", client="a", work=TokenWork(100, 100))
        line.enter(f"short {number}", client="b", work=TokenWork(100, 0))
    assert [line.serve() for _ in range(6)] == [
        "long 0",
        "short 0",
        "short 1",
        "long 1",
        "short 2",
        "short 3",
    ]
    line.enter("late", client="c")
    assert [line.serve() for _ in range(2)] == ["late", "long 2"], (
        "its turn begins with that of those being placed"
    )
    line.serve()
    line.enter("long again", client="a", work=TokenWork(100, 100))
    line.enter("new", client="d")
    assert line.names == ["long again", "new"], "the line was empty"


def test_priorities_go_before_turns() -> None:
    line = Line(max_wait_s=600.0)
    for name, client, priority in (("a", "a", 0), ("b", "a", -1), ("c", "b", 0), ("d", "a", -1)):
        line.enter(name, client=client, priority=priority)
    assert line.names == ["b", "d", "a", "c"]


def test_the_wait_for_other_clients_is_that_of_their_turns() -> None:
    """Behind a hundred requests of another client, of a second each, the first of a client waits
    for one, and each takes two seconds then."""
    line = Line(max_waiting=1000, max_wait_s=600.0)
    for number in range(100):
        line.service_model.habits.served("b", 2.0, 2.0)
        line.enter(str(number), client="a")
    for name in ("first", "second"):
        assert isinstance(line.enter(name, 6.0, client="b"), Waiter)
    refused = line.enter("third", 6.0, client="b")
    assert isinstance(refused, Refusal)
    assert refused.wait_s == pytest.approx(5.0), (
        "two of its own are before it, and three of the other one's"
    )
    assert line.names[:4] == ["0", "first", "1", "second"]


def test_a_full_line_makes_room_for_a_client_that_has_fewer_in_it() -> None:
    line = Line(max_waiting=5, max_wait_s=600.0)
    for name, client, priority in (
        ("urgent", "a", -1),
        ("a", "a", 0),
        ("b", "a", 0),
        ("last", "a", 0),
        ("c", "b", 0),
    ):
        line.enter(name, client=client, priority=priority)
    entered = line.enter("d", client="b")
    assert isinstance(entered, Waiter)
    assert entered.displaced is not None
    assert entered.displaced.item == "last", "of the one that has most"
    assert len(line.line) == 5
    for client in ("a", "b"):
        refused = line.enter("e", client=client)
        assert isinstance(refused, Refusal)
        assert refused.cause is Cause.QUEUE_FULL
    third = line.enter("f", client="c", priority=1)
    assert isinstance(third, Refusal), "others are more urgent"


def test_a_client_refused_for_long_outputs_is_retried_at_times() -> None:
    line = Line(max_wait_s=60.0).exact(2.0, 7.0)
    line.clock.advance(1.0)
    line.enter("long", work=TokenWork(100, 1000), client="b")
    for _ in range(3):
        line.clock.advance(TRIAL_S)
        tried = line.enter("tried", 54.0, work=TokenWork(100, 1000), client="a")
        assert isinstance(tried, Waiter)
        assert tried.demand.work == TokenWork(100, 0), "it is not dropped for its answer either"
        line.line.leave(tried)
        assert isinstance(line.enter("again", 54.0, work=TokenWork(100, 1000), client="a"), Refusal)
    assert isinstance(line.enter("hopeless", 1.0, work=TokenWork(100, 1000), client="a"), Refusal)


def test_the_retry_delay_is_bounded() -> None:
    assert Refusal(Cause.DEADLINE, 0.0, 3.9e5).retry_after_s == MAX_RETRY_S
    assert Refusal(Cause.WAIT, 1e-4).retry_after_s == MIN_RETRY_S
    assert Refusal(Cause.WAIT, 0.0).retry_after_s is None


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60))
def test_those_without_a_deadline_are_not_starved(gaps: Sequence[float]) -> None:
    """Despite any number of urgent requests, one is placed per second and "patient" is placed
    within the wait limit."""
    line = Line(max_wait_s=20.0, max_waiting=1000)
    line.enter("patient", rates=Rates())
    began = line.clock.now()
    for gap in [*gaps, *[1.0] * 25]:
        line.enter("hurry", 4.0, rates=Rates())
        line.clock.advance(gap)
        first = next(iter(line.line), None)
        if first is not None:
            line.line.leave(first)
        if "patient" not in line.names:
            break
    else:
        raise AssertionError("it still waits")
    assert line.clock.now() - began <= 20.0 + 3.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "enter", "leave", "serve", "clear"]),
            st.integers(0, 9),
            st.integers(1, 40),
        )
    )
)
def test_work_and_shortest_prompt_are_those_of_the_queue(
    steps: list[tuple[str, int, int]],
) -> None:
    line = Line()
    there: list[Waiter[str]] = []
    for step, place, num_tokens in steps:
        now = line.clock.now()
        if step == "enter":
            demand = Demand(
                TokenWork(num_tokens, num_tokens / 8),
                NO_DEADLINE,
                place,
                num_tokens,
                f"{num_tokens % 3}",
            )
            waiter = line.line.enter(demand, "", RATES, now)
            assert isinstance(waiter, Waiter)
            there.append(waiter)
        elif step == "leave" and there:
            assert line.line.leave(there.pop(place % len(there)))
        elif step == "serve" and there:
            line.line.served(there.pop(place % len(there)))
        elif step == "clear":
            assert len(line.line.clear()) == len(there)
            there.clear()
        assert line.line.work.prompt_tokens == sum(
            waiter.demand.work.prompt_tokens for waiter in there
        )
        assert line.line.work.output_tokens == pytest.approx(
            sum(waiter.demand.work.output_tokens for waiter in there)
        )
        assert line.line.shortest == min(
            (waiter.demand.num_tokens for waiter in there), default=math.inf
        )


class Backlog(Line):
    """Clients that always wait with one more request; serves one after another."""

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__(max_waiting=1000, max_wait_s=1e9)
        self.weights = weights
        self.served = dict.fromkeys(weights, 0.0)

    def arrive(self, client: str, expected: float) -> None:
        work = TokenWork(0.0, expected)
        demand = Demand(work, client=client, weight=self.weights[client])
        assert isinstance(self.line.enter(demand, client, RATES, self.clock.now()), Waiter)

    def serve_next(self, actual: float) -> str:
        """Serve the next request, which takes `actual` tokens; return its client."""
        waiter = self.line.first
        self.line.served(waiter)
        client, weight = waiter.item, waiter.demand.weight
        self.served[client] += actual / weight
        self.line.charge(0, client, (actual - waiter.demand.work.num_tokens) / weight)
        return client


@given(
    weights=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    sizes=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=2, max_size=80),
)
def test_the_gap_between_two_backlogged_clients_is_bounded(
    weights: tuple[float, float], sizes: list[tuple[int, int]]
) -> None:
    """By the largest requests of both, for their weights: whatever was expected of them."""
    backlog = Backlog(dict(zip("ab", weights, strict=True)))
    largest = max(max(expected, actual) for expected, actual in sizes)
    bound = largest / weights[0] + largest / weights[1]
    for client in "ab":
        for expected, _ in sizes:
            backlog.arrive(client, expected)
    for _, actual in sizes:
        backlog.serve_next(actual)
        assert abs(backlog.served["a"] - backlog.served["b"]) <= bound * (1 + 1e-9)


def test_a_client_with_a_hundred_times_the_requests_gets_an_equal_share() -> None:
    """Jain's index of the tokens of five clients."""
    backlog = Backlog(dict.fromkeys("abcde", 1.0))
    for client in "abcde":
        for number in range(900 if client == "a" else 9):
            backlog.arrive(client, 50 + number % 7)
    for _ in range(40):
        backlog.serve_next(50.0)
    shares = list(backlog.served.values())
    assert sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)) >= 0.95


def test_twice_the_weight_is_twice_the_tokens() -> None:
    backlog = Backlog({"a": 2.0, "b": 1.0})
    for client in "ab":
        for _ in range(60):
            backlog.arrive(client, 100.0)
    order = [backlog.serve_next(100.0) for _ in range(60)]
    assert abs(order.count("a") - 2 * order.count("b")) <= 2


def test_exact_tokens_replace_expected_ones() -> None:
    """One client's requests generate ten times what is expected of them."""
    backlog = Backlog({"a": 1.0, "b": 1.0})
    for client in "ab":
        for _ in range(40):
            backlog.arrive(client, 10.0)
    order = [
        backlog.serve_next(100.0 if backlog.line.first.item == "a" else 10.0) for _ in range(33)
    ]
    assert order.count("b") >= 9 * order.count("a")


def test_what_a_client_did_not_use_is_not_saved_up() -> None:
    """A client returns from idle, or is given back tokens, and gets equal turns from then on."""
    backlog = Backlog({"a": 1.0, "b": 1.0})
    for _ in range(80):
        backlog.arrive("a", 10.0)
    for _ in range(30):
        backlog.serve_next(10.0)
    backlog.line.charge(0, "b", -1000.0)
    for _ in range(40):
        backlog.arrive("b", 10.0)
    order = [backlog.serve_next(10.0) for _ in range(20)]
    assert abs(order.count("a") - order.count("b")) <= 1

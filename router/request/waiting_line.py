"""Admission queue: ordering, bounds, and dropping requests that can no longer meet their deadline.

Pure; times are `Clock` seconds.

Order: priority, then clients in turn. Within a client, requests are ordered by their latest start:
the deadline less the service time, but no later than the wait limit allows. Requests of a client
without deadlines are therefore served in order of arrival. A deadline makes a request more urgent
than others of its client, but not than another client's: equal turns of two clients go by arrival.
Turns count tokens (start-time fair queueing, Goyal et al., SIGCOMM 1996): a client that sends more
or longer requests gets no more of the pools while others wait. If workers have parts of prompts
cached, a request with more cached may go before others (`WaitingLine.best`), as long as these can
wait.

A request is rejected on arrival if it could not be served in time after those queued before it. An
admitted request leaves in four cases: it is placed, it is cancelled, it can no longer meet its
deadline, or the queue is full and it makes room for a client with fewer requests.
"""

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Generic, TypeVar

from router.request.demand import Cause, Demand, Refusal, WaitingLimits
from router.request.service_times import MAX_CLIENTS, Rates, ServiceTimeModel, TokenWork

T = TypeVar("T")
ItemT = TypeVar("ItemT")

LOOK_AHEAD = 32  # requests from the front that may go first, and how often one may be passed
LEAST_SLACK_S = 5.0  # a request with a latest start within this time is not passed


@dataclass(order=True)
class Waiter(Generic[T]):
    """A queued request; sorts in the order of its client. `displaced`: the request it replaced."""

    begin_by_s: float
    arrival: int
    demand: Demand = field(compare=False)
    since_s: float = field(compare=False)
    item: T = field(compare=False)
    num_passed: int = field(default=0, compare=False)  # how often a later request went first
    displaced: "Waiter[T] | None" = field(default=None, compare=False)


@dataclass(eq=False)
class _Queue(Generic[T]):
    """Queued requests of one client at one priority, in order.

    `start` is the turn of the first request, and `length` that of all turns.
    """

    start: float
    waiters: list[Waiter[T]] = field(default_factory=list)
    work: TokenWork = field(default_factory=TokenWork)
    length: float = 0.0

    def turns(self) -> Iterator[tuple[float, int, Waiter[T]]]:
        """Yield the sort key among clients and the waiter, over a copy of the queue."""
        start = self.start
        for waiter in tuple(self.waiters):
            yield start, waiter.arrival, waiter
            start += waiter.demand.turn

    def before(self, turn: tuple[float, int]) -> TokenWork:
        """Return the work of the requests with an earlier turn."""
        if self.start + self.length < turn[0]:
            return self.work
        return _work_of(waiter for *key, waiter in self.turns() if tuple(key) < turn)


@dataclass
class WaitingLine(Generic[T]):
    """The queued requests. The caller passes current rates and time.

    `num_waiting` is their number and `work` their total. Both are maintained incrementally: every
    request and every report asks for them, and a queue may be long.
    """

    limits: WaitingLimits
    service_model: ServiceTimeModel
    num_arrived: int = 0
    num_waiting: int = 0
    work: TokenWork = field(default_factory=TokenWork)
    # By priority and client.
    _queues: dict[tuple[int, str], _Queue[T]] = field(default_factory=dict)
    # By priority: the turn of the request placed last.
    _turns: dict[int, float] = field(default_factory=dict)
    # By priority and client: where the client's next turn starts, if that is after `_turns`.
    _ends: dict[tuple[int, str], float] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)  # prompt lengths, ascending

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[Waiter[T]]:
        """Iterate lazily, in order, over the requests queued now."""
        by_priority: dict[int, list[_Queue[T]]] = {}
        for (priority, _), queue in self._queues.items():
            by_priority.setdefault(priority, []).append(queue)
        return chain.from_iterable(
            (turn[-1] for turn in heapq.merge(*(queue.turns() for queue in by_priority[priority])))
            for priority in sorted(by_priority)
        )

    def enter(self, demand: Demand, item: T, rates: Rates, now_s: float) -> Waiter[T] | Refusal:
        """Queue a request, or return why it is rejected.

        Now and then a request that is rejected for its expected length is queued as if it had none:
        its client's responses may have become shorter.
        """
        refusal = self._refusal(demand, rates, now_s)
        if refusal is not None and refusal.cause is Cause.DEADLINE and demand.work.output_tokens:
            short = replace(demand, work=replace(demand.work, output_tokens=0.0))
            if self._refusal(short, rates, now_s) is None and self.service_model.habits.may_try(
                demand.client
            ):
                demand = short
                refusal = None
        if refusal is not None:
            return refusal
        waiter = self._waiter(demand, item, rates, now_s)
        if (
            len(self) >= self.limits.max_waiting
            and (displaced := self._largest(demand)) is not None
        ):
            waiter.displaced = displaced
            self.leave(displaced)
        self.num_arrived += 1
        self.num_waiting += 1
        queue = self._queue_of(demand)
        bisect.insort(queue.waiters, waiter)
        self._queues[demand.priority, demand.client] = queue
        queue.work = queue.work.more(demand.work)
        queue.length += demand.turn
        bisect.insort(self._lengths, demand.num_tokens)
        self.work = self.work.more(demand.work)
        return waiter

    def _refusal(self, demand: Demand, rates: Rates, now_s: float) -> Refusal | None:
        service_s = self.service_model.cautious_s(rates, demand.client, demand.work)
        wait_s = rates.wait_s(self._before(self._waiter(demand, None, rates, now_s)))
        if len(self) >= self.limits.max_waiting and self._largest(demand) is None:
            return Refusal(Cause.QUEUE_FULL, wait_s, service_s)
        if wait_s > self.limits.max_wait_s:
            return Refusal(Cause.WAIT, wait_s, service_s)
        is_measured = len(self) > 0 or not rates.is_idle
        if is_measured and not demand.deadline.allows(wait_s + service_s):
            return Refusal(Cause.DEADLINE, wait_s, service_s)
        return None

    def _waiter(self, demand: Demand, item: ItemT, rates: Rates, now_s: float) -> Waiter[ItemT]:
        """Return a waiter that arrives now."""
        service_s = self.service_model.cautious_s(rates, demand.client, demand.work)
        # Both are times by the clock of the service model. An order by them needs exact sums.
        begin_by_s = min(demand.deadline.at_s - service_s, now_s + self.limits.max_wait_s)
        return Waiter(begin_by_s, self.num_arrived, demand, now_s, item)

    def _queue_of(self, demand: Demand) -> _Queue[T]:
        """Return the queue of the client, or a new one that starts at the current turn."""
        key = demand.priority, demand.client
        start = max(self._turns.get(demand.priority, 0.0), self._ends.get(key, 0.0))
        return self._queues.get(key) or _Queue(start)

    def _before(self, waiter: Waiter[None]) -> TokenWork:
        """Return the work of the requests before one that would enter now."""
        demand = waiter.demand
        own = self._queue_of(demand)
        place = bisect.bisect(
            own.waiters,
            (waiter.begin_by_s, waiter.arrival),
            key=lambda other: (other.begin_by_s, other.arrival),
        )
        later = own.waiters[place:]
        total = own.work.less(_work_of(later))
        length = max(0.0, own.length - sum(each.demand.turn for each in later))
        turn = own.start + length, waiter.arrival
        for (priority, _), queue in self._queues.items():
            if priority < demand.priority:
                total = total.more(queue.work)
            elif priority == demand.priority and queue is not own:
                total = total.more(queue.before(turn))
        return total

    def _largest(self, demand: Demand) -> Waiter[T] | None:
        """Return the last request of the client with most requests at `demand`'s priority or less
        urgent.

        Returns None if that client has no more requests than the new one's client would then have.
        """
        counts: dict[str, int] = {}
        for (priority, client), queue in self._queues.items():
            if priority >= demand.priority:
                counts[client] = counts.get(client, 0) + len(queue.waiters)
        largest = max(counts, key=lambda client: counts[client], default=demand.client)
        if counts.get(largest, 0) <= counts.get(demand.client, 0) + 1:
            return None
        last = max(priority for priority, client in self._queues if client == largest)
        return self._queues[last, largest].waiters[-1]

    @property
    def shortest(self) -> float:
        """Return the tokens of the shortest queued prompt; infinite if the queue is empty."""
        return self._lengths[0] if self._lengths else math.inf

    @property
    def first(self) -> Waiter[T]:
        """Return the first request; the queue must not be empty."""
        return next(iter(self))

    def first_priority(self) -> int | None:
        """Return the most urgent priority that is queued; None if the queue is empty."""
        return min((priority for priority, _ in self._queues), default=None)

    def best(self, gain: Callable[[T], float], now_s: float) -> Waiter[T]:
        """Return the request with the largest gain if it is served now, the first of equals.

        Candidates are the first `LOOK_AHEAD` requests of the first one's priority, up to the first
        one that cannot wait longer. The queue must not be empty.
        """
        first = best = self.first
        most = gain(first.item)
        for waiter in islice(self, LOOK_AHEAD):
            if waiter.demand.priority != first.demand.priority:
                break
            gained = gain(waiter.item)
            if gained > most:
                best = waiter
                most = gained
            if waiter.num_passed >= LOOK_AHEAD or waiter.begin_by_s < now_s + LEAST_SLACK_S:
                break
        return best

    def passes(self, waiter: Waiter[T]) -> None:
        """Count that `waiter` is served before those in front of it."""
        for passed in self:
            if passed is waiter:
                break
            passed.num_passed += 1

    def served(self, waiter: Waiter[T]) -> None:
        """Remove a placed request, and count it as a turn of its client."""
        key = waiter.demand.priority, waiter.demand.client
        queue = self._queues.get(key)
        if queue is None or not self.leave(waiter):
            return
        turn = max(self._turns.get(key[0], 0.0), queue.start)
        queue.start += waiter.demand.turn
        if self._queues:
            self._turns[key[0]] = turn
            self._ends = {
                other: end for other, end in self._ends.items() if other[0] != key[0] or end > turn
            }
            self._ends[key] = queue.start
        self._forget_a_client()

    def charge(self, priority: int, client: str, turn: float) -> None:
        """Correct the past turns of a client, whose tokens are known exactly once they end.

        Its next turn starts later by `turn`, or earlier if that is negative, but not before the turn
        of the request placed last: what it did not use it cannot save up.
        """
        if not self._queues:  # no client waits for another one
            return
        key = priority, client
        least = self._turns.get(priority, 0.0)
        if (queue := self._queues.get(key)) is not None:
            queue.start = max(least, queue.start + turn)
        elif (end := max(least, self._ends.get(key, 0.0)) + turn) > least:
            self._ends[key] = end
            self._forget_a_client()
        else:
            self._ends.pop(key, None)

    def _forget_a_client(self) -> None:
        if len(self._ends) > MAX_CLIENTS:
            del self._ends[min(self._ends, key=lambda each: self._ends[each])]

    def leave(self, waiter: Waiter[T]) -> bool:
        """Remove a request; return whether it was queued."""
        key = waiter.demand.priority, waiter.demand.client
        queue = self._queues.get(key)
        place = 0 if queue is None else bisect.bisect_left(queue.waiters, waiter)
        if queue is None or place == len(queue.waiters) or queue.waiters[place] is not waiter:
            return False
        del queue.waiters[place]
        self.num_waiting -= 1
        queue.work = queue.work.less(waiter.demand.work)
        queue.length = max(0.0, queue.length - waiter.demand.turn)
        if not queue.waiters:
            del self._queues[key]
        del self._lengths[bisect.bisect_left(self._lengths, waiter.demand.num_tokens)]
        self.work = self.work.less(waiter.demand.work)
        if not self._queues:  # no client waits for another one: reset the turns
            self.work = TokenWork()
            self._turns.clear()
            self._ends.clear()
        return True

    def drop_hopeless(self, rates: Rates, now_s: float) -> list[tuple[Waiter[T], Refusal]]:
        """Remove and return the requests that could not meet their limits even if served now."""
        dropped = []
        for waiter in self:
            if (cause := self._hopeless(waiter, rates, now_s)) is not None:
                self.leave(waiter)
                dropped.append((waiter, cause))
        wait_s = rates.wait_s(self.work)
        return [(waiter, Refusal(cause, wait_s)) for waiter, cause in dropped]

    def drop_if_hopeless(self, waiter: Waiter[T], rates: Rates, now_s: float) -> Refusal | None:
        """Remove one queued request under the rule of `drop_hopeless`; return the reason, else
        None.
        """
        cause = self._hopeless(waiter, rates, now_s)
        if cause is None:
            return None
        self.leave(waiter)
        return Refusal(cause, rates.wait_s(self.work))

    def oldest_s(self, now_s: float) -> float:
        """Return how long the oldest request has been queued, in seconds. Safe from any thread."""
        waiters = chain.from_iterable(
            tuple(queue.waiters) for queue in tuple(self._queues.values())
        )
        return max((now_s - waiter.since_s for waiter in waiters), default=0.0)

    def clear(self) -> list[Waiter[T]]:
        """Remove and return all requests."""
        waiters = list(self)
        for waiter in waiters:
            self.leave(waiter)
        return waiters

    def _hopeless(self, waiter: Waiter[T], rates: Rates, now_s: float) -> Cause | None:
        if now_s - waiter.since_s >= self.limits.max_wait_s:
            return Cause.WAIT
        if rates.is_idle and not waiter.demand.deadline.is_over:
            return None  # pools are idle: try it
        service_s = self.service_model.cautious_s(rates, waiter.demand.client, waiter.demand.work)
        is_late = not waiter.demand.deadline.allows(service_s)
        return Cause.DEADLINE if is_late else None


def _work_of(waiters: Iterable[Waiter[T]]) -> TokenWork:
    prompt_tokens = output_tokens = 0.0
    for waiter in waiters:
        work = waiter.demand.work
        prompt_tokens += work.prompt_tokens
        output_tokens += work.output_tokens
    return TokenWork(prompt_tokens, output_tokens)

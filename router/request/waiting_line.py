"""Who waits for a pair of workers, in which order, who may wait at all, and who waits in vain. Pure; `Clock` seconds.

Order: priority, then by when a request must begin: its deadline less what serving it takes, but not later than the
limit of waiting allows. So those without a deadline stand in order of arrival, and time brings each of them to the
front. Where workers have parts of prompts, who finds more there may go before those who would find less
(`WaitingLine.best`), as long as these can wait.

Who comes is refused if it could not be served in time behind those who go before it; who was let in leaves only by
being placed, by going away, or when its time does not suffice any more.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Generic, TypeVar

from router.request.service_times import Outlook, Rates, TokenWork

T = TypeVar("T")

MIN_RETRY_S = 0.05
LOOK_AHEAD = 32  # so many from the front may go first, and so often may one be passed
LEAST_SLACK_S = 5.0  # who has to begin within this is not passed


class Cause(StrEnum):
    """Why a request is not served, as metrics name it."""

    QUEUE_FULL = "queue_full"  # as many wait as may
    WAIT = "wait"  # its turn would come after the limit of waiting
    DEADLINE = "deadline"  # it would end after its deadline
    WORKERS = "workers"  # there is no pair of workers


@dataclass(frozen=True)
class WaitingLimits:
    """`max_waiting` requests at once, each for at most `max_wait_s`."""

    max_waiting: int
    max_wait_s: float


@dataclass(frozen=True)
class Demand:
    """What a request wants: `ends_at_s` is its deadline, `num_tokens` those of its prompt, wherever they are."""

    work: TokenWork
    ends_at_s: float = math.inf
    priority: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class Refusal:
    """`wait_s`: how long it would have to wait; `service_s`: how long it would then take."""

    cause: Cause
    wait_s: float
    service_s: float = 0.0

    @property
    def retry_after_s(self) -> float | None:
        """The wait; where no request waits and those that run are all that slows it down, until they have ended. None
        while nothing was measured."""
        estimate_s = self.wait_s or self.service_s
        return max(estimate_s, MIN_RETRY_S) if estimate_s else None


@dataclass(order=True)
class Waiter(Generic[T]):
    """One that waits; ordered as it will be served."""

    priority: int
    begin_by_s: float
    arrival: int
    demand: Demand = field(compare=False)
    since_s: float = field(compare=False)
    item: T = field(compare=False)
    num_passed: int = field(default=0, compare=False)  # how often another one went before it


@dataclass
class WaitingLine(Generic[T]):
    """The requests that wait, `waiters` in their order. The caller gives the present rates and time. `work` is that of
    all of them: what is asked with every request and every report is kept, as a line may be long."""

    limits: WaitingLimits
    outlook: Outlook
    num_arrived: int = 0
    work: TokenWork = field(default_factory=TokenWork)
    waiters: list[Waiter[T]] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)  # of their prompts, ascending

    def __len__(self) -> int:
        return len(self.waiters)

    def __iter__(self) -> Iterator[Waiter[T]]:
        """A copy, in order."""
        return iter(tuple(self.waiters))

    def enter(self, demand: Demand, item: T, rates: Rates, now_s: float) -> Waiter[T] | Refusal:
        """A place for a request, or why it gets none."""
        service_s = self.outlook.cautious_s(rates, demand.work)
        begin_by_s = min(demand.ends_at_s - service_s, now_s + self.limits.max_wait_s)
        waiter = Waiter(demand.priority, begin_by_s, self.num_arrived, demand, now_s, item)
        place = bisect.bisect(self.waiters, waiter)
        wait_s = rates.wait_s(self.work.less(_work_of(islice(self.waiters, place, None))))
        if len(self.waiters) >= self.limits.max_waiting:
            return Refusal(Cause.QUEUE_FULL, wait_s, service_s)
        if wait_s > self.limits.max_wait_s:
            return Refusal(Cause.WAIT, wait_s, service_s)
        is_measured = bool(self.waiters) or not rates.is_idle
        if is_measured and now_s + wait_s + service_s > demand.ends_at_s:
            return Refusal(Cause.DEADLINE, wait_s, service_s)
        self.num_arrived += 1
        self.waiters.insert(place, waiter)
        bisect.insort(self._lengths, demand.num_tokens)
        self.work = self.work.more(demand.work)
        return waiter

    @property
    def shortest(self) -> float:
        """Tokens of the shortest prompt that waits; infinite where none does."""
        return self._lengths[0] if self._lengths else math.inf

    @property
    def first(self) -> Waiter[T]:
        """Of a line that is not empty."""
        return self.waiters[0]

    def best(self, gain: Callable[[T], float], now_s: float) -> Waiter[T]:
        """Who gains most if it is served now, the first of equals: of the first `LOOK_AHEAD`, as urgent as the first,
        and behind nobody who cannot wait longer. The line must not be empty."""
        best, most = self.first, gain(self.first.item)
        for waiter in islice(self.waiters, LOOK_AHEAD):
            if waiter.priority != self.first.priority:
                break
            gained = gain(waiter.item)
            if gained > most:
                best, most = waiter, gained
            if waiter.num_passed >= LOOK_AHEAD or waiter.begin_by_s < now_s + LEAST_SLACK_S:
                break
        return best

    def passes(self, waiter: Waiter[T]) -> None:
        """It is about to be served before those in front of it."""
        for passed in islice(self.waiters, bisect.bisect_left(self.waiters, waiter)):
            passed.num_passed += 1

    def leave(self, waiter: Waiter[T]) -> bool:
        """Whether it was there."""
        place = bisect.bisect_left(self.waiters, waiter)
        if place < len(self.waiters) and self.waiters[place] is waiter:
            del self.waiters[place]
            del self._lengths[bisect.bisect_left(self._lengths, waiter.demand.num_tokens)]
            self.work = self.work.less(waiter.demand.work) if self.waiters else TokenWork()
            return True
        return False

    def drop_hopeless(self, rates: Rates, now_s: float) -> list[tuple[Waiter[T], Refusal]]:
        """Those whose time does not suffice any more, even if their turn came now; they have left."""
        dropped = []
        for waiter in tuple(self.waiters):
            if (cause := self._hopeless(waiter, rates, now_s)) is not None:
                self.leave(waiter)
                dropped.append((waiter, cause))
        wait_s = rates.wait_s(self.work)
        return [(waiter, Refusal(cause, wait_s)) for waiter, cause in dropped]

    def drop_if_hopeless(self, waiter: Waiter[T], rates: Rates, now_s: float) -> Refusal | None:
        """As `drop_hopeless`, of one that is there."""
        cause = self._hopeless(waiter, rates, now_s)
        if cause is None:
            return None
        self.leave(waiter)
        return Refusal(cause, rates.wait_s(self.work))

    def oldest_s(self, now_s: float) -> float:
        """How long the one that came first has waited. Any thread."""
        return max((now_s - waiter.since_s for waiter in self), default=0.0)

    def clear(self) -> list[Waiter[T]]:
        """All of them; they have left."""
        waiters, self.waiters, self._lengths, self.work = self.waiters, [], [], TokenWork()
        return waiters

    def _hopeless(self, waiter: Waiter[T], rates: Rates, now_s: float) -> Cause | None:
        if now_s - waiter.since_s >= self.limits.max_wait_s:
            return Cause.WAIT
        if rates.is_idle and now_s < waiter.demand.ends_at_s:
            return None  # nothing keeps it from being tried
        is_late = now_s + self.outlook.cautious_s(rates, waiter.demand.work) > waiter.demand.ends_at_s
        return Cause.DEADLINE if is_late else None


def _work_of(waiters: Iterable[Waiter[T]]) -> TokenWork:
    prompt_tokens = output_tokens = 0.0
    for waiter in waiters:
        work = waiter.demand.work
        prompt_tokens += work.prompt_tokens
        output_tokens += work.output_tokens
    return TokenWork(prompt_tokens, output_tokens)

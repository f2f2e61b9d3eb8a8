"""Holds requests back until a pair of workers could take them soon, the most urgent ones first.

The queue is bounded and ordered by priority, then arrival; its head waits for everybody behind it, so nobody starves.
A request for which no worker that is alive is large enough is passed over. When no pair is left at all, waiting has a
short grace (a worker that restarts is back within it), then requests are refused at once.

`PriorityLimits` bounds the priority that a client may ask for. `PrefillRateEstimate` finds requests whose time cannot
suffice: they are refused before they take anybody else's.
"""

import asyncio
import bisect
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import AfterValidator

from router.request.validate import MAX_PRIORITY, AdmissibleRequest
from router.workers.directory import Directory, WorkerPair
from runtime.clock import Clock
from runtime.errors import CapacityError, ConfigError, UnavailableError
from runtime.metrics import RouterMetrics
from runtime.security import Caller

EVERYBODY = "*"
DEFAULT_LIMITS = ("*=0",)

MIN_TOKENS = 64  # shorter prompts measure overheads rather than prefill
MIN_PROMPTS = 3  # one alone may have met a cold start
MEMORY_S = 60.0
REMEMBERED = 64


@dataclass(frozen=True)
class AdmissionLimits:
    """`max_waiting` requests at once, each for at most `max_wait_s`; `pairless_grace_s` while no pair is usable."""

    max_waiting: int = 1024
    max_wait_s: float = 60.0
    pairless_grace_s: float = 4.0


@dataclass(order=True)
class _Waiter:
    priority: int
    arrival: int
    since_s: float = field(compare=False)
    request: AdmissibleRequest = field(compare=False)
    placed: asyncio.Future[WorkerPair] = field(compare=False)


class Admission:
    """The router's only queue. `run` must run beside it."""

    def __init__(self, directory: Directory, limits: AdmissionLimits, metrics: RouterMetrics, clock: Clock) -> None:
        self._directory = directory
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._waiting: list[_Waiter] = []
        self._arrivals = 0
        self._pairless_since_s = clock.now()

    @property
    def _grace_s(self) -> float:
        return max(self._limits.pairless_grace_s, self._directory.comeback_s)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def run(self) -> None:
        """Place waiters whenever something changed; fail them when there has been no pair for too long."""
        while True:
            self._pump()
            timeout_s = None
            if self._directory.pair_problem():
                timeout_s = max(0.0, self._pairless_since_s + self._grace_s - self._clock.now())
                if timeout_s == 0:
                    self._fail_all()
                    timeout_s = self._grace_s
            else:
                self._pairless_since_s = self._clock.now()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._directory.changed()

    @asynccontextmanager
    async def pair_for(self, request: AdmissibleRequest) -> AsyncIterator[WorkerPair]:
        """A pair of workers, booked until the block ends.

        Raises:
            CapacityError: the queue is full, or the wait was too long.
            UnavailableError: there is no pair, and there was none for a while.
        """
        pair = await self._wait(request)
        try:
            yield pair
        finally:
            pair.release()

    async def _wait(self, request: AdmissibleRequest) -> WorkerPair:
        waiter = self._enter(request)
        self._pump()
        pair: WorkerPair | None = None
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                pair = await waiter.placed
            return pair
        except TimeoutError:
            if not self._directory.can_hold(request.context_tokens):
                raise UnavailableError(f"no workers that hold {request.context_tokens} tokens are usable") from None
            raise CapacityError(f"no pair of workers had room for {self._limits.max_wait_s:g} s",
                                resource="workers") from None
        finally:
            if pair is None:
                self._abandon(waiter)
            self._note_depth()

    def _abandon(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        # Placed in the very moment it gave up: nobody else would release that.
        placed = waiter.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            placed.result().release()

    def _enter(self, request: AdmissibleRequest) -> _Waiter:
        problem = self._directory.refusal()
        if problem and self._clock.now() - self._pairless_since_s >= self._grace_s:
            raise UnavailableError(problem)
        if len(self._waiting) >= self._limits.max_waiting:
            raise CapacityError(f"{self._limits.max_waiting} requests are waiting, which is the limit",
                                resource="router queue")
        self._arrivals += 1
        waiter = _Waiter(request.engine.priority, self._arrivals, self._clock.now(), request,
                         asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, waiter)
        return waiter

    def _pump(self) -> None:
        for waiter in tuple(self._waiting):
            request = waiter.request
            pair = self._directory.place(request.engine.prompt_token_ids, request.context_tokens)
            if pair is None and not self._directory.can_hold(request.context_tokens):
                continue  # the workers that are large enough are away: nobody behind it waits for them
            if pair is None:
                break
            self._waiting.remove(waiter)
            if waiter.placed.done():  # cancelled, and has not run since
                pair.release()
            else:
                waiter.placed.set_result(pair)
        self._note_depth()

    def _fail_all(self) -> None:
        problem = self._directory.refusal()
        for waiter in self._waiting:
            if not waiter.placed.done():
                waiter.placed.set_exception(UnavailableError(problem))
        self._waiting.clear()

    def _note_depth(self) -> None:
        self._metrics.queue_depth.set(len(self._waiting))
        now = self._clock.now()
        self._metrics.queue_oldest_s.set(max((now - waiter.since_s for waiter in self._waiting), default=0.0))


class PrefillRateEstimate:
    """Seconds per prompt token, as prefills that ended within the last `MEMORY_S` showed it.

    Only the best rate seen lately counts: what even that cannot do in time is refused, everything else is tried. A
    refused request shows no rate, so rates expire after `MEMORY_S`, and a refusal needs `MIN_PROMPTS` of them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # when, seconds per token

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A prompt was computed."""
        if num_tokens >= MIN_TOKENS:
            self._seen.append((self._clock.now(), seconds / num_tokens))

    def least_s(self, num_tokens: int) -> float:
        """The time that many tokens take at best; 0 while too few prompts are known, or for too few tokens."""
        oldest_s = self._clock.now() - MEMORY_S
        rates = [prefill_rate for at_s, prefill_rate in self._seen if at_s >= oldest_s]
        return num_tokens * min(rates) if num_tokens >= MIN_TOKENS and len(rates) >= MIN_PROMPTS else 0.0


@dataclass(frozen=True)
class PriorityLimits:
    """The most urgent priority of each client, by the name its token or certificate gives it: `lowest`; the smaller a
    priority, the more urgent. `*` is for clients that have no entry of their own."""

    lowest: Mapping[str, int] = field(default_factory=lambda: {EVERYBODY: 0})

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """From "NAME=PRIORITY". Raises ConfigError naming an entry that is none."""
        return cls({EVERYBODY: 0} | dict(map(_parsed, entries)))

    def most_urgent(self, caller: Caller) -> int:
        """The smallest priority `caller` may give a request."""
        own = [self.lowest[name] for name in caller.names if name in self.lowest]
        return min(own, default=self.lowest[EVERYBODY])


def _parsed(entry: str) -> tuple[str, int]:
    name, equals, text = entry.rpartition("=")
    try:
        priority = int(text)
    except ValueError:
        equals = ""
        priority = 0
    if not equals or not name or abs(priority) > MAX_PRIORITY:
        raise ConfigError(f"priority_limits must be NAME=PRIORITY with a priority from {-MAX_PRIORITY} to "
                          f"{MAX_PRIORITY}, got {entry!r}", field="priority_limits")
    return name, priority


def _checked(entry: str) -> str:
    try:
        _parsed(entry)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return entry


PriorityLimitField = Annotated[str, AfterValidator(_checked)]

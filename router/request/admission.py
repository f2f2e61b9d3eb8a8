"""Queue requests until a worker pair has capacity; reject those that cannot meet their deadline.

`WaitingLine` holds the queue and its order. The first request waits for capacity, which may go to
another one with more of its prompt cached there. A request too large for every live worker is
passed over. If no pair is left at all, requests wait for a short grace period (a worker that
restarts is back within it) and are then rejected at once. Prompts with logprobs of one client get
only a share of the places (`router.request.scoring`).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from router.request.scoring import ScoringPlaces
from router.request.service_times import Rates, ServiceTimeModel, TokenWork
from router.request.validate import AdmissibleRequest
from router.request.waiting_line import (
    MAX_RETRY_S,
    Cause,
    Demand,
    Refusal,
    Waiter,
    WaitingLimits,
    WaitingLine,
)
from router.workers.candidate import SHORT_RATIO
from router.workers.directory import Directory, WorkerPair
from router.workers.worker import WorkerRole
from runtime.clock import Deadline
from runtime.errors import BatonError, CapacityError, DeadlineError, UnavailableError
from runtime.observe.metrics import RouterMetrics

LOOK_S = 1.0  # between two lookups of the workers that have a queued prompt cached
SWEEP_S = 0.25  # between two sweeps for requests that can no longer meet their deadline
MAX_AWAY_S = 30.0


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of the admission queue.

    At most `max_waiting` requests are queued, each for at most `max_wait_s`; `pairless_grace_s`
    applies while no pair is usable.
    """

    max_waiting: int = 1024
    max_wait_s: float = 60.0
    pairless_grace_s: float = 4.0


@dataclass
class _QueuedRequest:
    """A queued request, and the future that its task awaits.

    `num_cached` maps the address of a prefill worker to the number of prompt tokens cached there, as
    of `looked_s`.
    """

    request: AdmissibleRequest
    placed: "asyncio.Future[WorkerPair]"
    num_cached: Mapping[str, int] = field(default_factory=dict)
    most_cached: int = 0
    looked_s: float = -math.inf

    def gain(self, sources: Iterable[str]) -> int:
        """Return the tokens cached on the best of `sources`, less those that only other workers
        have.

        The latter would be computed once more on `sources`.
        """
        here = max((self.num_cached.get(address, 0) for address in sources), default=0)
        return here - (self.most_cached - here)


class Admission:
    """The router's only queue. `run` must be running."""

    def __init__(
        self,
        directory: Directory,
        limits: AdmissionLimits,
        metrics: RouterMetrics,
        service_model: ServiceTimeModel,
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._metrics = metrics
        self._service_model = service_model
        self._clock = service_model.clock
        self._scoring = ScoringPlaces(self._num_prefill_places, limits.max_wait_s)
        self._line: WaitingLine[_QueuedRequest] = WaitingLine(
            WaitingLimits(limits.max_waiting, limits.max_wait_s), service_model
        )
        self._entered = asyncio.Event()  # set when a request is queued
        self._swept_s = self._clock.now()
        for cause in Cause:  # exported as 0 before the first event
            metrics.refused.labels(cause)
            metrics.dropped.labels(cause)
        metrics.queue_depth.set_function(lambda: len(self._line))
        metrics.queue_oldest_s.set_function(lambda: self._line.oldest_s(self._clock.now()))

    @property
    def _grace_s(self) -> float:
        return max(self._limits.pairless_grace_s, self._directory.restart_estimate_s)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_let_in(self) -> int:
        """Return the number of requests admitted to the queue since the start."""
        return self._line.num_arrived

    def wait_s(self) -> float:
        """Return how long a new request would wait at the end of the queue, from measured rates; 0
        if nothing was measured.
        """
        return self._rates().wait_s(self._line.work)

    def service_s(self, request: AdmissibleRequest, num_tokens: int) -> float:
        """Return how long serving a request takes that was just placed, from measured rates.

        `num_tokens`: prompt tokens that have to be computed.
        """
        return self._rates().placed_service_s(self._work_of(request, num_tokens))

    def retry_after_s(
        self, error: CapacityError | UnavailableError, request: AdmissibleRequest
    ) -> float | None:
        """Return the retry delay for a request the workers rejected, or None if unknown.

        The workers know neither the requests queued here nor when a lost worker will be back.
        """
        if not self._directory.is_paired:
            return self._away_s()
        if isinstance(error, CapacityError):
            service_s = self.service_s(request, self._directory.num_missing(request.prompt))
            refusal = Refusal(Cause.WORKERS, self.wait_s(), service_s)
            return refusal.retry_after_s or error.retry_after_s
        return None if error.retry_after_s is None else min(error.retry_after_s, MAX_RETRY_S)

    async def run(self) -> None:
        """Place queued requests when something changed; fail them if no pair was usable for too
        long.

        Reports are frequent and the queue is mostly empty: then no report matters here.
        """
        while True:
            self._entered.clear()
            if not len(self._line):
                await self._entered.wait()
            self._pump()
            timeout_s = None
            if not self._directory.is_paired:
                timeout_s = self._grace_s - self._directory.pairless_s
                if timeout_s <= 0:
                    self._fail_all()
                    continue
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._directory.changed()

    @asynccontextmanager
    async def pair_for(
        self, request: AdmissibleRequest, deadline: Deadline
    ) -> AsyncIterator[WorkerPair]:
        """Hold a pair of workers, booked until the block ends, for a request with this deadline.

        Raises:
            CapacityError: the request would wait too long, or end too late after those queued
                before it.
            DeadlineError: it could not end in time even without a queue.
            UnavailableError: no pair is usable, and none was for a while.
        """
        is_scored = request.engine.HasField("num_prompt_logprobs")
        async with self._scoring.taken(request.client) if is_scored else nullcontext():
            pair = await self._wait(request, deadline)
            try:
                yield pair
            finally:
                pair.release()

    def _num_prefill_places(self) -> int:
        return sum(
            worker.info.max_running_requests
            for worker in self._directory.usable(WorkerRole.PREFILL)
            if worker.info is not None
        )

    async def _wait(self, request: AdmissibleRequest, deadline: Deadline) -> WorkerPair:
        demand = self._demand(request, deadline)
        if not self._line.num_waiting and self._limits.max_waiting:
            at_once = self._place_at_once(request, demand)
            if at_once is not None:
                return at_once
        waiter = self._enter(request, demand)
        placed = waiter.item.placed
        self._pump()
        if placed.done():
            return placed.result()
        self._entered.set()  # from here on `run` places it
        pair: WorkerPair | None = None
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                pair = await placed
            return pair
        except TimeoutError:
            raise self._dropped(request, Refusal(Cause.WAIT, self.wait_s())) from None
        finally:
            if pair is None:
                self._abandon(waiter)

    def _abandon(self, waiter: Waiter[_QueuedRequest]) -> None:
        self._line.leave(waiter)
        # If it was placed just as it gave up, nothing else would release the pair.
        placed = waiter.item.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            placed.result().release()

    def _place_at_once(self, request: AdmissibleRequest, demand: Demand) -> WorkerPair | None:
        """Place a request without queueing, as `_enter` and `_pump` would with an empty queue.

        Returns None if no pair has capacity or the request might be rejected.
        """
        rates = self._rates(request.prompt.num_tokens)
        service_s = (
            0.0
            if rates.is_idle
            else self._service_model.cautious_s(rates, request.client, demand.work)
        )
        if not demand.deadline.allows(service_s):
            return None
        pair = self._directory.place(request.prompt, request.context_tokens, request.compatibility)
        if pair is not None:
            self._line.num_arrived += 1
        return pair

    def _demand(self, request: AdmissibleRequest, deadline: Deadline) -> Demand:
        """Return the demand of a request.

        Raises:
            UnavailableError: no workers can serve it.
            DeadlineError: even the fastest worker could not end in time.
        """
        problem = self._directory.refusal()
        if problem and self._directory.pairless_s >= self._grace_s:
            self._metrics.refused.labels(Cause.WORKERS).inc()
            raise UnavailableError(problem, retry_after_s=self._away_s())
        if self._lacks_compatible_workers(request):
            self._metrics.refused.labels(Cause.WORKERS).inc()
            raise self._no_compatible_workers()
        num_tokens = self._directory.num_missing(request.prompt)
        least_s = self._service_model.best_prefill.least_s(num_tokens)
        if not deadline.allows(least_s):
            self._metrics.refused.labels(Cause.DEADLINE).inc()
            raise DeadlineError(
                f"prefill of {num_tokens} tokens takes at least {least_s:.2g} s; the deadline "
                f"leaves {deadline.remaining_s():.2g} s"
            )
        return Demand(
            self._work_of(request, num_tokens),
            deadline,
            request.engine.priority,
            request.prompt.num_tokens,
            request.client,
        )

    def _enter(self, request: AdmissibleRequest, demand: Demand) -> Waiter[_QueuedRequest]:
        queued = _QueuedRequest(request, asyncio.get_running_loop().create_future())
        waiter = self._line.enter(
            demand, queued, self._rates(request.prompt.num_tokens), self._clock.now()
        )
        if isinstance(waiter, Refusal):
            raise self._refused(waiter)
        if waiter.displaced is not None:
            refusal = Refusal(Cause.QUEUE_FULL, self.wait_s())
            self._fail(waiter.displaced, self._dropped(waiter.displaced.item.request, refusal))
        return waiter

    def _work_of(self, request: AdmissibleRequest, num_tokens: int) -> TokenWork:
        return self._service_model.work(
            request.client, num_tokens, request.engine.max_tokens, len(request.resumed_of(0))
        )

    def _rates(self, num_tokens: int = 1) -> Rates:
        return Rates.of(
            self._directory.usable(WorkerRole.PREFILL),
            self._directory.usable(WorkerRole.DECODE),
            self._line.num_waiting,
            num_tokens,
        )

    def _refused(self, refusal: Refusal) -> CapacityError:
        """Count and return the error of a request rejected on arrival."""
        self._metrics.refused.labels(refusal.cause).inc()
        wait = f"requests wait for {refusal.wait_s:.2g} s"
        takes = f"this one would take {refusal.service_s:.2g} s"
        texts = {
            Cause.QUEUE_FULL: f"{self._limits.max_waiting} requests are waiting, which is the limit",
            Cause.WAIT: f"{wait}, the limit is {self._limits.max_wait_s:g} s",
            Cause.DEADLINE: f"{wait} and {takes}, more than its deadline leaves",
        }
        return CapacityError(
            texts[refusal.cause], resource="router queue", retry_after_s=refusal.retry_after_s
        )

    def _dropped(
        self, request: AdmissibleRequest, refusal: Refusal
    ) -> CapacityError | UnavailableError:
        """Count and return the error of a request that was queued."""
        if refusal.cause is Cause.WAIT and not self._directory.can_hold(request.context_tokens):
            self._metrics.dropped.labels(Cause.WORKERS).inc()
            return UnavailableError(
                f"no workers that hold {request.context_tokens} tokens are usable"
            )
        self._metrics.dropped.labels(refusal.cause).inc()
        texts = {
            Cause.DEADLINE: "no pair of workers had room before its deadline",
            Cause.QUEUE_FULL: f"{self._limits.max_waiting} requests are waiting, which is the limit, and this "
            "client had most of them",
        }
        text = texts.get(
            refusal.cause, f"no pair of workers had room for {self._limits.max_wait_s:g} s"
        )
        return CapacityError(text, resource="workers", retry_after_s=refusal.retry_after_s)

    def _lacks_compatible_workers(self, request: AdmissibleRequest) -> bool:
        """Return whether a request resumes a response whose kind of worker is not usable, while
        others are.
        """
        return (
            bool(request.compatibility)
            and self._directory.is_paired
            and not self._directory.has_pair(request.compatibility)
        )

    def _no_compatible_workers(self) -> UnavailableError:
        return UnavailableError(
            "no available worker matches the weights and numerics this response started with"
        )

    def _away_s(self) -> float:
        """Return the estimated time in seconds until workers may be usable again.

        That is the rest of a usual start time. Workers away for longer may stay away for as long
        again.
        """
        away_s = self._directory.pairless_s
        expected_s = self._directory.restart_estimate_s - away_s
        return min(expected_s if expected_s > 0 else away_s, MAX_AWAY_S)

    def _pump(self) -> None:
        if not len(self._line):
            return
        self._sweep()
        self._place_by_caches()
        rates: Rates | None = None  # computed again after each placement
        # `passed_by`: prompt tokens of a request for which prefill has no capacity; only much
        # shorter prompts may pass it. `too_large`: context tokens of a request whose workers are
        # away; only smaller requests may pass it.
        passed_by = math.inf
        too_large = math.inf
        for waiter in self._line:
            if self._line.shortest * SHORT_RATIO > passed_by:
                break  # the usual case: no shorter prompt is queued that could pass
            request = waiter.item.request
            num_tokens = waiter.demand.num_tokens
            if (
                num_tokens * SHORT_RATIO > passed_by
                or request.context_tokens >= too_large
                or self._lacks_compatible_workers(request)
            ):
                continue
            rates = rates or self._rates()
            if self._drop_if_hopeless(waiter, rates):
                continue
            pair = self._directory.place(
                request.prompt, request.context_tokens, request.compatibility
            )
            if pair is not None:
                self._place(waiter, pair)
                rates = None
            elif not self._directory.can_hold(request.context_tokens):
                too_large = request.context_tokens
            elif passed_by == math.inf and self._directory.awaits_prefill(
                num_tokens, request.context_tokens
            ):
                passed_by = num_tokens
            else:
                break

    def _place_by_caches(self) -> None:
        """Give free capacity to the queued request with most of its prompt cached there.

        Otherwise each prompt would go where capacity is free at its turn, and be computed again
        there.
        """
        while len(self._line) > 1:
            request = self._line.first.item.request
            sources = self._directory.caches_with_room(
                request.prompt.num_tokens, request.context_tokens
            )
            if not sources:
                return
            waiter = self._line.best(
                lambda queued: self._looked(queued).gain(sources),  # noqa: B023
                self._clock.now(),
            )
            request = waiter.item.request
            if self._lacks_compatible_workers(request):
                return
            if self._drop_if_hopeless(waiter, self._rates()):
                continue
            pair = self._directory.place(
                request.prompt, request.context_tokens, request.compatibility
            )
            if pair is None:
                return
            self._line.passes(waiter)
            self._place(waiter, pair)

    def _looked(self, queued: _QueuedRequest) -> _QueuedRequest:
        """Refresh which workers have the prompt cached, at most once per `LOOK_S`."""
        now_s = self._clock.now()
        if now_s - queued.looked_s >= LOOK_S:
            queued.num_cached = self._directory.num_cached(queued.request.prompt)
            queued.most_cached = max(queued.num_cached.values(), default=0)
            queued.looked_s = now_s
        return queued

    def _place(self, waiter: Waiter[_QueuedRequest], pair: WorkerPair) -> None:
        self._line.served(waiter)
        if waiter.item.placed.done():  # cancelled, but its task has not run since
            pair.release()
        else:
            waiter.item.placed.set_result(pair)

    def _sweep(self) -> None:
        """Fail queued requests that can no longer meet their deadline, and those whose workers are
        lost.

        Neither has cost any computation yet.
        """
        now_s = self._clock.now()
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        for waiter, refusal in self._line.drop_hopeless(self._rates(), now_s):
            self._fail(waiter, self._dropped(waiter.item.request, refusal))
        for waiter in self._line:
            if self._lacks_compatible_workers(waiter.item.request):
                self._line.leave(waiter)
                self._metrics.dropped.labels(Cause.WORKERS).inc()
                self._fail(waiter, self._no_compatible_workers())

    def _drop_if_hopeless(self, waiter: Waiter[_QueuedRequest], rates: Rates) -> bool:
        """Fail the waiter if it cannot meet its limits; return whether it did."""
        refusal = self._line.drop_if_hopeless(waiter, rates, self._clock.now())
        if refusal is not None:
            self._fail(waiter, self._dropped(waiter.item.request, refusal))
        return refusal is not None

    def _fail_all(self) -> None:
        for waiter in self._line.clear():
            self._metrics.dropped.labels(Cause.WORKERS).inc()
            self._fail(
                waiter, UnavailableError(self._directory.refusal(), retry_after_s=self._away_s())
            )

    @staticmethod
    def _fail(waiter: Waiter[_QueuedRequest], error: BatonError) -> None:
        if not waiter.item.placed.done():
            waiter.item.placed.set_exception(error)

"""Queue requests until a worker pair has capacity; reject those that cannot meet their deadline.

`WaitingLine` holds the queue and its order. The first request waits for capacity, which may go to
another one with more of its prompt cached there. A request too large for every live worker is
passed over. If no pair is left at all, requests wait for a short grace period (a worker that
restarts is back within it) and are then rejected at once. Prompts with logprobs of one client get
only a share of the places (`router.request.scoring`).
"""

import asyncio
import math
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace

from router.request.demand import MAX_RETRY_S, Cause, Demand, Refusal, WaitingLimits
from router.request.preemption import Preemption
from router.request.rejections import AdmissionLimits, Rejections
from router.request.scoring import ScoringPlaces
from router.request.service_times import Rates, ServiceTimeModel, TokenWork
from router.request.tickets import AdmissionTicket, Placed, QueuedRequest
from router.request.validate import AdmissibleRequest
from router.request.waiting_line import Waiter, WaitingLine
from router.workers.candidate import SHORT_RATIO
from router.workers.directory import Directory
from router.workers.placement_request import WorkerPair
from router.workers.worker import WorkerRole
from runtime.clock import Deadline
from runtime.errors import BatonError, CapacityError, DeadlineError, UnavailableError
from runtime.observe.metrics.router import RouterMetrics

LOOK_S = 1.0  # between two lookups of the workers that have a queued prompt cached
MIN_TIMEOUT_S = 1e-6  # a shorter one may end before the clock has moved
SWEEP_S = 0.25  # between two sweeps for requests that can no longer meet their deadline


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
        self._placement = directory.placement
        self._limits = limits
        self._metrics = metrics
        self._service_model = service_model
        self._clock = service_model.clock
        self._scoring = ScoringPlaces(directory.num_prefill_places, limits.max_wait_s)
        self._line: WaitingLine[QueuedRequest] = WaitingLine(
            WaitingLimits(limits.max_waiting, limits.max_wait_s), service_model
        )
        self.preemption = Preemption(
            directory.placement, self._clock, limits.preempt_from, self._line.first_priority
        )
        self._entered = asyncio.Event()  # set when a request is queued
        self._swept_s = self._clock.now()
        self._rejections = Rejections(directory, limits, metrics, self._clock)
        metrics.queue_depth.set_function(lambda: len(self._line))
        metrics.paused.set_function(lambda: self.preemption.num_paused)
        metrics.queue_oldest_s.set_function(lambda: self._line.oldest_s(self._clock.now()))

    @property
    def _grace_s(self) -> float:
        return max(self._limits.pairless_grace_s, self._directory.restart_estimate_s)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def waiting_tokens(self) -> float:
        """Return the prompt tokens that queued requests have yet to be computed."""
        return self._line.work.prompt_tokens

    @property
    def num_let_in(self) -> int:
        """Return the number of requests admitted to the queue since the start."""
        return self._line.num_arrived

    def wait_s(self) -> float:
        """Return the queueing time of a new request by measured rates; 0 if nothing was measured."""
        return self._rates().wait_s(self._line.work)

    def retry_after_s(
        self, error: CapacityError | UnavailableError, request: AdmissibleRequest
    ) -> float | None:
        """Return the retry delay for a request the workers rejected, or None if unknown.

        The workers know neither the requests queued here nor when a lost worker will be back.
        """
        if not self._directory.is_paired:
            return self._rejections.away_s()
        if isinstance(error, CapacityError):
            num_missing = self._placement.num_missing(request.prompt)
            service_s = self._rates().placed_service_s(self._work_of(request, num_missing))
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
                if timeout_s < MIN_TIMEOUT_S:
                    self._fail_all()
                    continue
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._directory.changed()

    def arrive(self, request: AdmissibleRequest, deadline: Deadline) -> AdmissionTicket:
        """Return the request with its estimates, which later decisions go by.

        Raises:
            DeadlineError: it could not end in time even without a queue.
            UnavailableError: no workers can serve it, and none could for a while.
        """
        demand = self._demand(request, deadline)
        return AdmissionTicket(request, demand, self._rates(request.prompt.num_tokens))

    def place_at_once(self, ticket: AdmissionTicket) -> Placed | None:
        """Place a request without queueing, as `wait` would with an empty queue.

        Returns None if others wait, no pair has capacity, or the request might be rejected.
        """
        if self._line.num_waiting or not self._limits.max_waiting:
            return None
        request, demand, rates = ticket.request, ticket.demand, ticket.rates
        service_s = (
            0.0
            if rates.is_idle
            else self._service_model.cautious_s(rates, request.client, demand.work)
        )
        if not demand.deadline.allows(service_s) or self._is_held_back(request):
            return None
        pair = self._placement.place(request.placement)
        if pair is None:
            return None
        self._line.num_arrived += 1
        return self._placed(request, pair, rates, demand)

    async def wait(self, ticket: AdmissionTicket) -> Placed:
        """Queue a request until a pair is booked for it.

        Raises:
            CapacityError: the request would wait too long, or end too late after those queued
                before it.
            UnavailableError: no pair is usable, and none was for a while.
        """
        waiter = self._enter(ticket)
        placed = waiter.item.placed
        self._pump()
        if placed.done():
            return placed.result()
        self._entered.set()  # from here on `run` places it
        result: Placed | None = None
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                result = await placed
            return result
        except TimeoutError:
            raise self._rejections.dropped(
                ticket.request, Refusal(Cause.WAIT, self.wait_s())
            ) from None
        finally:
            if result is None:
                self._abandon(waiter)

    def settle(self, request: AdmissibleRequest, charged: TokenWork, actual: TokenWork) -> None:
        """Replace the charge of a request that ended by its actual tokens."""
        if self._line.num_waiting:
            difference = actual.num_tokens - charged.num_tokens
            self._line.charge(request.engine.priority, request.client, difference / request.weight)

    def scoring_place(self, request: AdmissibleRequest) -> AbstractAsyncContextManager[None]:
        """Return a context that holds one of the client's places for prompts with logprobs."""
        return self._scoring.taken(request.client)

    def _abandon(self, waiter: Waiter[QueuedRequest]) -> None:
        self._line.leave(waiter)
        # If it was placed just as it gave up, nothing else would release the pair.
        placed = waiter.item.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            placed.result().pair.release()

    def _placed(
        self, request: AdmissibleRequest, pair: WorkerPair, rates: Rates, demand: Demand
    ) -> Placed:
        """Return the pair with the service time by `rates`, from before it was booked."""
        service_s = rates.service_s(self._work_of(request, pair.prefill.num_tokens))
        return Placed(pair, service_s, demand.work)

    def _demand(self, request: AdmissibleRequest, deadline: Deadline) -> Demand:
        """Return the demand of a request.

        Raises:
            UnavailableError: no workers can serve it.
            DeadlineError: even the fastest worker could not end in time.
        """
        if self._directory.refusal() and self._directory.pairless_s >= self._grace_s:
            self._metrics.refused.labels(Cause.WORKERS).inc()
            raise self._rejections.no_pair()
        if self._lacks_compatible_workers(request):
            self._metrics.refused.labels(Cause.WORKERS).inc()
            raise self._rejections.no_compatible_workers(request)
        num_tokens = self._placement.num_missing(request.prompt)
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
            request.weight,
        )

    def _enter(self, ticket: AdmissionTicket) -> Waiter[QueuedRequest]:
        queued = QueuedRequest(ticket.request, asyncio.get_running_loop().create_future())
        waiter = self._line.enter(ticket.demand, queued, ticket.rates, self._clock.now())
        if isinstance(waiter, Refusal):
            raise self._rejections.refused(waiter, ticket.request.client)
        if waiter.displaced is not None:
            refusal = Refusal(Cause.QUEUE_FULL, self.wait_s())
            self._fail(
                waiter.displaced, self._rejections.dropped(waiter.displaced.item.request, refusal)
            )
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

    def _lacks_compatible_workers(self, request: AdmissibleRequest) -> bool:
        """Return whether a request needs a kind of worker that is not usable, while others are: it
        resumes a response, or has an adapter.
        """
        return (
            bool(request.compatibility or request.placement.prompt.adapter)
            and self._directory.is_paired
            and not self._placement.has_pair(replace(request.placement, context_tokens=0))
        )

    def _is_held_back(self, request: AdmissibleRequest) -> bool:
        priority, holdback = request.engine.priority, self._limits.holdback
        return self.preemption.holds_back(priority) or (
            bool(holdback.ceilings)
            and holdback.is_held(priority, self._directory.usable(WorkerRole.DECODE))
        )

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
                or request.placement.context_tokens >= too_large
                or self._lacks_compatible_workers(request)
            ):
                continue
            rates = rates or self._rates()
            if self._drop_if_hopeless(waiter, rates):
                continue
            if self._is_held_back(request):
                break  # and so are the less urgent ones after it
            pair = self._placement.place(request.placement)
            if pair is not None:
                self._place(waiter, pair, rates)
                rates = None
            elif (tokens := self._placement.passing(request.placement, too_large)) is not None:
                too_large = tokens
            elif passed_by == math.inf and self._placement.awaits_prefill(request.placement):
                passed_by = num_tokens
            else:
                self.preemption.make_room(request.placement, waiter.demand.priority)
                break

    def _place_by_caches(self) -> None:
        """Give free capacity to the queued request with most of its prompt cached there.

        Otherwise each prompt would go where capacity is free at its turn, and be computed again
        there.
        """
        while len(self._line) > 1:
            request = self._line.first.item.request
            sources = self._placement.caches_with_room(request.placement)
            if not sources:
                return
            waiter = self._line.best(
                lambda queued: self._looked(queued).gain(sources),  # noqa: B023
                self._clock.now(),
            )
            request = waiter.item.request
            if self._lacks_compatible_workers(request) or self._is_held_back(request):
                return
            rates = self._rates()
            if self._drop_if_hopeless(waiter, rates):
                continue
            pair = self._placement.place(request.placement)
            if pair is None:
                return
            self._line.passes(waiter)
            self._place(waiter, pair, rates)

    def _looked(self, queued: QueuedRequest) -> QueuedRequest:
        """Refresh which workers have the prompt cached, at most once per `LOOK_S`."""
        now_s = self._clock.now()
        if now_s - queued.looked_s >= LOOK_S:
            queued.num_cached = self._placement.num_cached(queued.request.prompt)
            queued.most_cached = max(queued.num_cached.values(), default=0)
            queued.looked_s = now_s
        return queued

    def _place(self, waiter: Waiter[QueuedRequest], pair: WorkerPair, rates: Rates) -> None:
        self._line.served(waiter)
        if waiter.item.placed.done():  # cancelled, but its task has not run since
            pair.release()
        else:
            request = waiter.item.request
            waiter.item.placed.set_result(self._placed(request, pair, rates, waiter.demand))

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
            self._fail(waiter, self._rejections.dropped(waiter.item.request, refusal))
        for waiter in self._line:
            if self._lacks_compatible_workers(waiter.item.request):
                self._line.leave(waiter)
                self._metrics.dropped.labels(Cause.WORKERS).inc()
                request = waiter.item.request
                self._fail(waiter, self._rejections.no_compatible_workers(request))

    def _drop_if_hopeless(self, waiter: Waiter[QueuedRequest], rates: Rates) -> bool:
        """Fail the waiter if it cannot meet its limits; return whether it did."""
        refusal = self._line.drop_if_hopeless(waiter, rates, self._clock.now())
        if refusal is not None:
            self._fail(waiter, self._rejections.dropped(waiter.item.request, refusal))
        return refusal is not None

    def _fail_all(self) -> None:
        for waiter in self._line.clear():
            self._metrics.dropped.labels(Cause.WORKERS).inc()
            self._fail(waiter, self._rejections.no_pair())

    @staticmethod
    def _fail(waiter: Waiter[QueuedRequest], error: BatonError) -> None:
        if not waiter.item.placed.done():
            waiter.item.placed.set_exception(error)

"""The errors of requests that admission rejects, and how long to wait before a retry."""

from dataclasses import dataclass

from router.request.demand import Cause, Refusal
from router.request.holdback import NO_HOLDBACK, Holdback
from router.request.return_times import ReturnTimes
from router.request.validate import AdmissibleRequest
from router.workers.directory import Directory
from runtime.clock import Clock
from runtime.errors import CapacityError, UnavailableError
from runtime.model_files.adapter_folders import adapter_name
from runtime.observe.metrics.router import RouterMetrics

MAX_AWAY_S = 30.0


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of the admission queue.

    At most `max_waiting` requests are queued, each for at most `max_wait_s`; `pairless_grace_s`
    applies while no pair is usable. `holdback` keeps capacity for urgent requests. Requests of the
    priority `preempt_from` and less urgent ones may be preempted.
    """

    max_waiting: int = 1024
    max_wait_s: float = 60.0
    pairless_grace_s: float = 4.0
    holdback: Holdback = NO_HOLDBACK
    preempt_from: int = 1


class Rejections:
    """Rejections of requests, counted by cause."""

    def __init__(
        self, directory: Directory, limits: AdmissionLimits, metrics: RouterMetrics, clock: Clock
    ) -> None:
        self._directory = directory
        self._returns = ReturnTimes(clock)
        self._limits = limits
        self._metrics = metrics
        for cause in Cause:  # exported as 0 before the first event
            metrics.refused.labels(cause)
            metrics.dropped.labels(cause)

    def refused(self, refusal: Refusal, client: str) -> CapacityError:
        """Count and return the error of a client's request rejected on arrival."""
        self._metrics.refused.labels(refusal.cause).inc()
        wait = f"requests wait for {refusal.wait_s:.2g} s"
        takes = f"this one would take {refusal.service_s:.2g} s"
        texts = {
            Cause.QUEUE_FULL: f"{self._limits.max_waiting} requests are waiting, which is the limit",
            Cause.WAIT: f"{wait}, the limit is {self._limits.max_wait_s:g} s",
            Cause.DEADLINE: f"{wait} and {takes}, more than its deadline leaves",
        }
        return CapacityError(
            texts[refusal.cause],
            resource="router queue",
            retry_after_s=self._retry_after_s(refusal, client),
        )

    def dropped(
        self, request: AdmissibleRequest, refusal: Refusal
    ) -> CapacityError | UnavailableError:
        """Count and return the error of a request that was queued."""
        if refusal.cause is Cause.WAIT and not self._directory.placement.can_hold(
            request.placement
        ):
            self._metrics.dropped.labels(Cause.WORKERS).inc()
            return UnavailableError(
                f"no workers that hold {request.placement.context_tokens} tokens are usable"
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
        retry_after_s = self._retry_after_s(refusal, request.client)
        return CapacityError(text, resource="workers", retry_after_s=retry_after_s)

    def _retry_after_s(self, refusal: Refusal, client: str) -> float | None:
        delay_s = refusal.retry_after_s
        if delay_s is None or refusal.cause is not Cause.QUEUE_FULL:
            return delay_s
        place_s = refusal.wait_s / max(self._limits.max_waiting, 1)
        return self._returns.delay_s(client, delay_s, place_s)

    def no_compatible_workers(self, request: AdmissibleRequest) -> UnavailableError:
        if adapter := request.placement.prompt.adapter:
            return UnavailableError(
                f"no available worker has the adapter {adapter_name(adapter)!r} in this version"
            )
        return UnavailableError(
            "no available worker matches the weights and numerics this response started with"
        )

    def no_pair(self) -> UnavailableError:
        """Return the error of a request while no pair of workers is usable."""
        return UnavailableError(self._directory.refusal(), retry_after_s=self.away_s())

    def away_s(self) -> float:
        """Return the estimated time in seconds until workers may be usable again.

        That is the rest of a usual start time. Workers away for longer may stay away for as long
        again.
        """
        away_s = self._directory.pairless_s
        expected_s = self._directory.restart_estimate_s - away_s
        return min(expected_s if expected_s > 0 else away_s, MAX_AWAY_S)

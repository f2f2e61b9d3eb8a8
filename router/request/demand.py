"""What a request asks of the workers, the limits of the queue, and the reasons to reject it."""

from dataclasses import dataclass
from enum import StrEnum

from router.request.service_times import TokenWork
from runtime.clock import NO_DEADLINE, Deadline

# The upper bound is low because the cause of a delay may end long before it was estimated to.
MIN_RETRY_S = 0.05
MAX_RETRY_S = 10.0


class Cause(StrEnum):
    """Reason why a request is not served; a metric label."""

    QUEUE_FULL = "queue_full"  # `max_waiting` requests are queued
    WAIT = "wait"  # its turn would come after the wait limit
    DEADLINE = "deadline"  # it would end after its deadline
    WORKERS = "workers"  # no pair of workers is usable


@dataclass(frozen=True)
class WaitingLimits:
    """At most `max_waiting` requests are queued, each for at most `max_wait_s`."""

    max_waiting: int
    max_wait_s: float


@dataclass(frozen=True)
class Demand:
    """Demand of a request of `client`.

    `num_tokens` counts its prompt, cached or not. A client of twice the `weight` gets twice the
    tokens of others while they wait.
    """

    work: TokenWork
    deadline: Deadline = NO_DEADLINE
    priority: int = 0
    num_tokens: int = 0
    client: str = ""
    weight: float = 1.0

    @property
    def turn(self) -> float:
        """Return the length of its turn: its tokens, for its weight."""
        return self.work.num_tokens / self.weight


@dataclass(frozen=True)
class Refusal:
    """Rejection of a request, with estimates in seconds.

    `wait_s` is the time that it would be queued, `service_s` the time to serve it after that.
    """

    cause: Cause
    wait_s: float
    service_s: float = 0.0

    @property
    def retry_after_s(self) -> float | None:
        """Return the retry delay in seconds; None without a measurement.

        That is the queueing time. If no request is queued, it is the service time, because only
        running requests delay this one.
        """
        estimate_s = self.wait_s or self.service_s
        return min(max(estimate_s, MIN_RETRY_S), MAX_RETRY_S) if estimate_s else None

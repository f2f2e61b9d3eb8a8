"""The stages of one request as the router saw them, with durations from the workers' reports."""

import logging
from dataclasses import dataclass, field

from protos import types_pb2
from router.request.events import NoteRetry
from router.workers.worker import Booking
from runtime.clock import Clock
from runtime.observe.metrics.router import RouterMetrics

logger = logging.getLogger(__name__)

# The stages of a request by metric label.
STAGES = {
    "admit": "router_queue_s",
    "prefill_queue": "prefill_queue_s",
    "prefill_exec": "prefill_s",
    "handoff_wait": "reserve_s",
    "transfer": "transfer_exposed_s",
    "decode_queue": "decode_queue_s",
    "decode": "decode_s",
}


@dataclass
class Timeline:
    """Times of one request. Created when it arrives.

    Marks are `Clock` seconds; `timings` is filled as stages end.
    """

    clock: Clock
    metrics: RouterMetrics
    timings: types_pb2.Timings = field(default_factory=types_pb2.Timings)
    num_tokens: int = 0
    outcome: str = ""  # once it has ended
    workers: tuple[Booking, Booking] | None = None  # the last prefill worker and decode pool
    num_retries: int = 0
    num_migrations: int = 0
    _first_token_at_s: float | None = None
    _last_tokens_at_s: float = 0.0
    _committed_at_s: float | None = None
    _decoded_at_s: float | None = None

    def __post_init__(self) -> None:
        self._received_at_s = self.clock.now()
        self._reserving_at_s = self._received_at_s

    @property
    def age_s(self) -> float:
        return self.clock.now() - self._received_at_s

    @property
    def ttft_s(self) -> float | None:
        """Return the time to the first token; None before it."""
        first_at_s = self._first_token_at_s
        return None if first_at_s is None else first_at_s - self._received_at_s

    def sibling(self) -> "Timeline":
        """Return a timeline for another choice of the same request, with the same arrival time."""
        other = Timeline(self.clock, self.metrics)
        other._received_at_s = other._reserving_at_s = self._received_at_s
        return other

    def resumed(self) -> None:
        """Record that the client already has the first tokens, and the next ones follow them."""
        self._first_token_at_s = self._last_tokens_at_s = self._received_at_s
        self.metrics.resumptions.inc()

    def placed(self) -> None:
        self.timings.router_queue_s = self.clock.now() - self._received_at_s

    def reserving(self) -> None:
        """Mark the opening of a decode stream."""
        self._reserving_at_s = self.clock.now()

    def reserved(self) -> None:
        self.timings.reserve_s = self.clock.now() - self._reserving_at_s

    def committed(self) -> None:
        """Mark that the decode pool has the whole prompt; called again after a migration."""
        self._committed_at_s = self.clock.now()
        self._decoded_at_s = None

    def decoded(self) -> None:
        """Mark the first tokens of the decode pool; only the first call counts."""
        if self._decoded_at_s is None:
            self._decoded_at_s = self.clock.now()

    def tokens(self, count: int) -> None:
        """Record `count` tokens that go to the client now."""
        now_s = self.clock.now()
        if self._first_token_at_s is None:
            self._first_token_at_s = now_s
            self.metrics.ttft_s.observe(now_s - self._received_at_s)
        else:
            self.metrics.itl_s.observe(now_s - self._last_tokens_at_s)
        self._last_tokens_at_s = now_s
        self.num_tokens += count
        self.metrics.completion_tokens.inc(count)

    def migrated(self, reason: str, outcome: str) -> None:
        self.num_migrations += 1
        self.metrics.migrations.labels(reason, outcome).inc()

    def retried(self, retry: NoteRetry) -> None:
        self.num_retries += 1
        self.metrics.retries.labels(retry.role.value, retry.reason).inc()
        logger.info("retried", extra={"role": retry.role.value, "reason": retry.error})

    def ended(self, outcome: str) -> None:
        """Record the end of the request, with its outcome; only the first call counts."""
        if self.timings.HasField("total_s"):
            return
        self.outcome = outcome
        self.timings.total_s = self.clock.now() - self._received_at_s
        self.metrics.e2e_s.labels(outcome).observe(self.timings.total_s)
        if self._first_token_at_s is not None and self.num_tokens > 1:
            self.metrics.tpot_s.observe(
                (self._last_tokens_at_s - self._first_token_at_s) / (self.num_tokens - 1)
            )
        for stage, name in STAGES.items():
            if self.timings.HasField(name):
                self.metrics.stage_s.labels(stage).observe(getattr(self.timings, name))
        if self._committed_at_s is not None and self._decoded_at_s is not None:
            first_step_s = self._decoded_at_s - self._committed_at_s - self.timings.decode_queue_s
            self.metrics.stage_s.labels("first_step").observe(max(0.0, first_step_s))

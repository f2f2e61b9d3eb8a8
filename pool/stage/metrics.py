"""Metrics of a pool, from the figures of its loop and scheduler.

Any thread may use them, because the instruments lock themselves.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, Self

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram
from torch import Tensor

from engine.contracts.model import ExpertTokens
from engine.core.batch import ForwardBatch, ForwardMode
from engine.memory.layout import PoolGeometry, travelling
from engine.pipeline.stage_executor import StageExecutor
from engine.speculative.contracts.drafter import PoolDrafter
from protos import worker_pb2 as pb
from runtime.clock import Clock
from runtime.errors import BatonError
from runtime.observe.metrics.handoffs import HandoffMetrics
from runtime.observe.metrics.pools import LeaderMetrics, PoolMetrics
from runtime.observe.metrics.stages import StageMetrics

BUBBLE_WINDOW_S = 1.0
EXPERTS_PERIOD_S = 1.0


@dataclass(frozen=True)
class SchedulerLoad:
    """The work and the free memory of a scheduler.

    `queued_tokens` counts prompt tokens that are not computed yet. `data_ranks` splits the load by
    data rank, if there are several. `local_rest_tokens` is the longest uncached rest of a prompt
    that a decode pool prefills by itself.
    """

    queued_requests: int
    running_requests: int
    pages_free: int
    slots_free: int
    queued_tokens: int = 0
    data_ranks: "tuple[SchedulerLoad, ...]" = ()
    local_rest_tokens: int = 0


@dataclass(frozen=True)
class PoolOccupancy:
    """The requests that hold memory, by purpose.

    `num_pages_held` counts the pages of requests in handoff. `oldest_s` is the age of the request
    that has waited longest, in seconds.
    """

    leases: Mapping[str, int]
    num_pages_held: int
    oldest_s: float


class ReportingScheduler(Protocol):
    """The figures that a pool publishes of its scheduler. Called on the engine thread."""

    def load(self) -> SchedulerLoad: ...

    def occupancy(self) -> PoolOccupancy: ...


@dataclass(frozen=True)
class _SchedulerSnapshot:
    load: SchedulerLoad
    views: Mapping[str, SchedulerLoad]
    occupancy: PoolOccupancy
    taken_s: float


class LoadBoard:
    """The latest state of a scheduler.

    The engine thread publishes it between two steps, so readers never wait for a step.
    """

    def __init__(
        self,
        scheduler: ReportingScheduler,
        clock: Clock,
        views: Mapping[str, ReportingScheduler] | None = None,
    ) -> None:
        """Publish the first state; call before the engine thread starts.

        `views` are the parts of the scheduler that do the work of a role.
        """
        self._scheduler = scheduler
        self._views = views or {}
        self._clock = clock
        self._latest = self._take()

    def publish(self) -> None:
        """Publish the current state; called on the engine thread."""
        self._latest = self._take()

    def load_of(self, role: str = "") -> SchedulerLoad:
        """Return the latest load of a role, or of the whole pool. Any thread."""
        latest = self._latest
        return latest.views.get(role, latest.load)

    @property
    def occupancy(self) -> PoolOccupancy:
        """Return the latest occupancy, with its age extended to now. Any thread."""
        latest = self._latest
        oldest_s = latest.occupancy.oldest_s
        if oldest_s:
            oldest_s += self._clock.now() - latest.taken_s
        return replace(latest.occupancy, oldest_s=oldest_s)

    def _take(self) -> _SchedulerSnapshot:
        return _SchedulerSnapshot(
            self._scheduler.load(),
            {role: view.load() for role, view in self._views.items()},
            self._scheduler.occupancy(),
            self._clock.now(),
        )


@dataclass(frozen=True)
class StageCounts:
    """The counts of a stage since its start.

    Plans are counted by path, forwards by kind, and expert tokens by layer.
    """

    plans: Callable[[], Mapping[str, int]] = dict
    forwards: Callable[[], Mapping[str, int]] = dict
    experts: Callable[[], Mapping[int, ExpertTokens]] = dict


def stage_counts(executor: StageExecutor, drafter: PoolDrafter | None) -> StageCounts:
    """Return the counts of an executor, and of a drafter if there is one."""
    return StageCounts(
        lambda: {
            "target": executor.num_plans,
            **(drafter.num_plans if drafter is not None else {}),
        },
        lambda: executor.num_forwards,
        lambda: executor.model.expert_tokens,
    )


@dataclass
class ExpertBalance:
    """The balance of tokens over the experts of a stage's layers, reported once per second."""

    metrics: StageMetrics
    tokens: Callable[[], Mapping[int, ExpertTokens]]
    clock: Callable[[], float] = time.monotonic
    _reported: Tensor | None = None  # [layers, experts]
    _reported_s: float = -math.inf

    def on_forward(self) -> None:
        """Report the counts if the period is over. Engine thread."""
        now = self.clock()
        if now - self._reported_s < EXPERTS_PERIOD_S or not (
            layers := list(self.tokens().values())
        ):
            return
        counts = torch.stack([layer.counts for layer in layers])
        new = counts if self._reported is None else counts - self._reported
        self._reported = counts
        self._reported_s = now
        own = layers[0].own
        for expert, count in zip(
            range(own.start, own.stop), new.sum(0)[own.start : own.stop].tolist(), strict=True
        ):
            self.metrics.expert_tokens.labels(str(expert)).inc(count)
        if (used := new[new.any(1)].double()).numel():
            self.metrics.expert_busiest.set((used.amax(1) / used.mean(1)).max().item())


@dataclass(frozen=True)
class StageMeters:
    """The metrics of one stage's forwards and of the frames it sends."""

    metrics: StageMetrics
    rank: int
    counts: StageCounts = field(default_factory=StageCounts)
    _counted: dict[tuple[str, str], int] = field(default_factory=dict)

    @cached_property
    def _experts(self) -> ExpertBalance:
        return ExpertBalance(self.metrics, self.counts.experts)

    @cached_property
    def _step_s(self) -> Histogram:
        """Return the histogram of this stage.

        It is cached, because looking up a label costs more than an observation.
        """
        return self.metrics.step_s.labels(str(self.rank))

    @cached_property
    def _link_bytes(self) -> Counter:
        return self.metrics.link_bytes.labels(str(self.rank))

    def on_forward(self, seconds: float, batch: ForwardBatch) -> None:
        """Record that the stage ran its layers on one batch."""
        self._add_new(self.metrics.plans, "plans", self.counts.plans())
        self._add_new(self.metrics.forwards, "forwards", self.counts.forwards())
        self._experts.on_forward()
        self._step_s.observe(seconds)
        self.metrics.batch_rows.observe(batch.num_rows)
        self.metrics.batch_tokens.observe(batch.num_tokens)

    def on_frame(self, num_bytes: int) -> None:
        """Record a frame sent to the next stage."""
        self._link_bytes.inc(num_bytes)

    def _add_new(self, counter: Counter, name: str, counts: Mapping[str, int]) -> None:
        """Add the increase since the last call, by label. The first call also shows zeros."""
        for label, count in counts.items():
            counted = self._counted.get((name, label))
            if count != counted:
                counter.labels(label).inc(count - (counted or 0))
                self._counted[name, label] = count


@dataclass
class LeaderMeters:
    """The metrics of a leader and their updates."""

    stage: StageMeters
    work: LeaderMetrics
    pool: PoolMetrics
    handoff: HandoffMetrics
    geometry: PoolGeometry  # geometry of each data rank
    num_data_ranks: int = 1
    num_prompt_tokens: int = 0  # since the start
    num_output_tokens: int = 0
    _waited_s: float = 0.0
    _window_began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def create(
        cls,
        registry: CollectorRegistry,
        geometry: PoolGeometry,
        counts: StageCounts | None = None,
        *,
        num_data_ranks: int = 1,
    ) -> Self:
        stage = StageMeters(StageMetrics.create(registry), 0, counts or StageCounts())
        meters = cls(
            stage,
            LeaderMetrics.create(registry),
            PoolMetrics.create(registry),
            HandoffMetrics.create(registry),
            geometry,
            num_data_ranks,
        )
        num_pages = meters.num_pages
        num_slots = meters.num_slots
        meters.pool.pages_total.set(num_pages)
        meters.pool.slots_total.set(num_slots)
        meters.pool.cache_config.info(
            {
                "page_size": str(geometry.page_size),
                "num_pages": str(num_pages),
                "num_slots": str(num_slots),
            }
        )
        return meters

    @property
    def num_pages(self) -> int:
        """Return the pages of all data ranks, without the null records."""
        return self.num_data_ranks * (self.geometry.num_pages - 1)

    @property
    def num_slots(self) -> int:
        return self.num_data_ranks * max(0, self.geometry.num_slots - 1)

    def on_launch(self, seconds: float, batch: ForwardBatch) -> None:
        """Record that stage 0 ran its layers on one batch and sent it on."""
        self.stage.on_forward(seconds, batch)

    def on_frame(self, num_bytes: int) -> None:
        self.stage.on_frame(num_bytes)

    def on_step(self, seconds: float, batch: ForwardBatch) -> None:
        """Record that a batch returned to stage 0, `seconds` after its launch."""
        self.work.step_s.observe(seconds)
        if batch.mode is ForwardMode.PREFILL:
            self.num_prompt_tokens += batch.num_tokens
            self.work.prompt_tokens.inc(batch.num_tokens)
        self.on_generated(sum(row is not None for row in batch.sampling))

    def on_generated(self, count: int) -> None:
        """Count output tokens. Engine thread."""
        self.num_output_tokens += count
        self.work.output_tokens.inc(count)

    def on_wait(self, seconds: float) -> None:
        """Record that stage 0 had batches in flight and none to launch for this time."""
        self._waited_s += seconds
        now = time.monotonic()
        if now - self._window_began_s >= BUBBLE_WINDOW_S:
            self.work.idle_ratio.set(min(1.0, self._waited_s / (now - self._window_began_s)))
            self._waited_s = 0.0
            self._window_began_s = now

    def on_load(self, load: pb.WorkerLoad) -> None:
        self.work.queue_depth.set(load.queued_requests)
        self.work.running.set(load.running_requests)
        if not load.running_requests:
            self.work.idle_ratio.set(0)  # without requests there is no batch to wait for
        self.pool.pages_used.set(self.num_pages - load.pages_free)
        self.pool.usage_ratio.set(1 - load.pages_free / self.num_pages)
        self.pool.slots_used.set(self.num_slots - load.slots_free)
        self.handoff.sessions.set(load.open_sessions)

    def on_occupancy(self, occupancy: PoolOccupancy, *, num_draining: int) -> None:
        for state, count in occupancy.leases.items():
            self.pool.leases.labels(state).set(count)
        self.pool.leases.labels("draining").set(num_draining)
        self.pool.pages_held.set(occupancy.num_pages_held)
        self.work.queue_oldest_s.set(occupancy.oldest_s)

    def handshake_failed(self, error: BatonError) -> None:
        """Count a session that failed before every stage was ready for it."""
        self.handoff.handshake_failures.labels(error.reason.lower()).inc()

    def on_handoff(
        self, num_tokens: int, seconds: float, *, held_tokens: int = 0, with_draft: bool = False
    ) -> None:
        """Record the handoff of a prompt: its duration, and its bytes by kind over all stages.

        `held_tokens` were cached at the destination and not sent. `with_draft` includes the draft
        model's state.
        """
        self.handoff.transfer_s.observe(seconds)
        num_pages = (
            -(-num_tokens // self.geometry.page_size) - held_tokens // self.geometry.page_size
        )
        for kind, num_bytes in self._bytes_by_kind(num_pages, with_draft=with_draft):
            self.handoff.bytes_moved.labels(kind).inc(num_bytes)

    def _bytes_by_kind(self, num_pages: int, *, with_draft: bool) -> Iterable[tuple[str, int]]:
        for spec in travelling(self.geometry.specs, with_draft=with_draft):
            yield spec.kind.value, spec.record_bytes * (num_pages if spec.kind.is_paged else 1)

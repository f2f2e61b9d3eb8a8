"""What a pool measures, from the loop's and the scheduler's figures. Any thread; instruments lock themselves."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from prometheus_client import CollectorRegistry

from engine.batch import ForwardBatch, ForwardMode
from engine.memory.layout import PoolGeometry, travelling
from protos import worker_pb2 as pb
from runtime.metrics import HandoffMetrics, LeaderMetrics, PoolMetrics, StageMetrics

BUBBLE_WINDOW_S = 1.0


def observe_forward(metrics: StageMetrics, seconds: float, batch: ForwardBatch) -> None:
    """A stage ran its layers on one batch."""
    metrics.step_s.observe(seconds)
    metrics.batch_rows.observe(batch.num_rows)
    metrics.batch_tokens.observe(batch.num_tokens)


@dataclass
class LeaderMeters:
    """The instrument sets of a leader and how they move."""

    stage: StageMetrics
    work: LeaderMetrics
    pool: PoolMetrics
    handoff: HandoffMetrics
    geometry: PoolGeometry
    _waited_s: float = 0.0
    _window_began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def create(cls, registry: CollectorRegistry, geometry: PoolGeometry) -> Self:
        meters = cls(StageMetrics.create(registry), LeaderMetrics.create(registry), PoolMetrics.create(registry),
                     HandoffMetrics.create(registry), geometry)
        meters.pool.pages_total.set(geometry.num_pages - 1)
        meters.pool.slots_total.set(max(0, geometry.num_slots - 1))
        return meters

    def on_step(self, seconds: float, batch: ForwardBatch) -> None:
        """One batch came back to stage 0."""
        observe_forward(self.stage, seconds, batch)
        if batch.mode is ForwardMode.PREFILL:
            self.work.prompt_tokens.inc(batch.num_tokens)
        self.work.output_tokens.inc(sum(row is not None for row in batch.sampling))

    def on_wait(self, seconds: float) -> None:
        """Stage 0 had batches in flight and nothing to launch for this long."""
        self._waited_s += seconds
        now = time.monotonic()
        if now - self._window_began_s >= BUBBLE_WINDOW_S:
            self.work.idle_ratio.set(min(1.0, self._waited_s / (now - self._window_began_s)))
            self._waited_s, self._window_began_s = 0.0, now

    def on_load(self, load: pb.WorkerLoad) -> None:
        self.work.queue_depth.set(load.queued_requests)
        self.work.running.set(load.running_requests)
        self.pool.pages_used.set(self.geometry.num_pages - 1 - load.pages_free)
        self.pool.slots_used.set(max(0, self.geometry.num_slots - 1 - load.slots_free))
        self.handoff.sessions.set(load.open_sessions)

    def on_handoff(self, num_tokens: int, seconds: float) -> None:
        """A prompt of this length has crossed: count its bytes by kind, over all stages."""
        self.handoff.transfer_s.observe(seconds)
        for kind, num_bytes in self._bytes_by_kind(num_tokens):
            self.handoff.bytes_moved.labels(kind).inc(num_bytes)

    def _bytes_by_kind(self, num_tokens: int) -> Iterable[tuple[str, int]]:
        num_pages = -(-num_tokens // self.geometry.page_size)
        for spec in travelling(self.geometry.specs):
            yield spec.kind.value, spec.record_bytes * (num_pages if spec.kind.is_paged else 1)

"""What one stage measures, from the loop's and the scheduler's figures. Any thread; instruments lock themselves."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from prometheus_client import CollectorRegistry

from engine.batch import ForwardBatch, ForwardMode
from engine.memory.layout import PoolGeometry
from protos import worker_pb2 as pb
from runtime.metrics import PoolMetrics, SpeculationMetrics, TransferMetrics, WorkerMetrics

BUBBLE_WINDOW_S = 5.0


@dataclass
class StageMeters:
    """The instrument sets of a stage and how they move."""

    work: WorkerMetrics
    pool: PoolMetrics
    transfer: TransferMetrics
    speculation: SpeculationMetrics
    geometry: PoolGeometry
    _waited_s: float = 0.0
    _window_began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def create(cls, registry: CollectorRegistry, geometry: PoolGeometry) -> Self:
        meters = cls(WorkerMetrics.create(registry), PoolMetrics.create(registry), TransferMetrics.create(registry),
                     SpeculationMetrics.create(registry), geometry)
        meters.pool.pages_total.set(geometry.num_pages - 1)
        meters.pool.slots_total.set(max(0, geometry.num_slots - 1))
        return meters

    def on_step(self, seconds: float, batch: ForwardBatch) -> None:
        """One batch came back to stage 0."""
        self.on_forward(seconds, batch)
        if batch.mode is ForwardMode.PREFILL:
            self.work.prompt_tokens.inc(batch.num_tokens)
        self.work.output_tokens.inc(sum(row is not None for row in batch.sampling))

    def on_verified(self, num_drafted: int, accepted: Sequence[int], seconds: float) -> None:
        """One verification came back to stage 0; `accepted` drafted tokens per row."""
        self.work.output_tokens.inc(sum(accepted))  # `on_step` counts the one that every row draws
        self.speculation.drafted.inc(num_drafted)
        for count in accepted:
            self.speculation.accept_length.observe(count + 1)
            for depth in range(1, count + 1):
                self.speculation.accepted.labels(str(depth)).inc()
        self.speculation.step_s.labels("yes" if num_drafted else "no").observe(seconds)

    def on_forward(self, seconds: float, batch: ForwardBatch) -> None:
        """This stage ran its layers on one batch."""
        self.work.step_s.observe(seconds)
        self.work.batch_rows.observe(batch.num_rows)
        self.work.batch_tokens.observe(batch.num_tokens)

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
        self.transfer.sessions.set(load.open_sessions)

    def on_handoff(self, num_tokens: int) -> None:
        """A prompt of this length has crossed: count its bytes by kind, over all stages."""
        num_pages = -(-num_tokens // self.geometry.page_size)
        for spec in self.geometry.specs:
            count = num_pages if spec.kind.is_paged else 1
            self.transfer.bytes_moved.labels(spec.kind.value).inc(spec.record_bytes * count)

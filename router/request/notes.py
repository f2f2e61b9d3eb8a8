"""The measurements of a request: its timings, metrics, and what later estimates learn from it."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from protos import decode_pb2, prefill_pb2, types_pb2
from router.request.answer import Answer
from router.request.events import End, Milestone, Note
from router.request.service_times import ServiceRecord
from router.request.validate import AdmissibleRequest
from router.workers.placement import WorkerPlacement
from router.workers.worker import Booking
from runtime.observe.metrics.router import RouterMetrics


def booking_of(worker: object) -> Booking:
    """Return the booking that a machine passes on without looking into it."""
    assert isinstance(worker, Booking)
    return worker


class RequestNotes:
    """The measurements of one request since its first pair of workers was booked."""

    def __init__(
        self,
        request: AdmissibleRequest,
        answer: Answer,
        record: ServiceRecord,
        placement: WorkerPlacement,
        metrics: RouterMetrics,
    ) -> None:
        self.record = record
        self._request = request
        self._answer = answer
        self._timeline = answer.timeline
        self._placement = placement
        self._metrics = metrics
        self._num_cached = 0  # prompt tokens that the prefill worker had cached
        self.num_computed = 0  # the others, once a worker began to compute them

    def reached(self, note: Note) -> None:
        """Record a milestone."""
        source, pool = booking_of(note.source), booking_of(note.pool)
        self._timeline.workers = source, pool
        self._MILESTONES[note.milestone](self, source, pool, note.message)

    def _placed(self, _: Booking, pool: Booking, __: None) -> None:
        self._answer.sampled_by = self._request.sampled_by(pool.compatibility)

    def _started(self, source: Booking, _: Booking, event: prefill_pb2.PrefillEvent) -> None:
        self._timeline.timings.prefill_queue_s = event.started.queue_s
        self._num_cached = self._read(event.started)
        surplus = self._num_cached - source.num_cached
        outcome = "equal" if surplus == 0 else "more" if surplus > 0 else "fewer"
        self._metrics.cache_predictions.labels(outcome).inc()
        self._timeline.reserving()

    def _computed(self, _: Booking, __: Booking, event: prefill_pb2.PrefillEvent) -> None:
        prefill_s = self._timeline.timings.prefill_s = event.first_token.prefill_s
        num_computed = len(self._request.engine.prompt_token_ids) - self._num_cached
        self.record.prefilled(num_computed, prefill_s)

    def _reserved(self, _: Booking, pool: Booking, __: None) -> None:
        pool.reserved()

    def _destination(self, _: Booking, __: Booking, ___: None) -> None:
        self._timeline.reserved()

    def _committed(self, source: Booking, pool: Booking, event: decode_pb2.DecodeEvent) -> None:
        exposed_s = event.committed.transfer_exposed_s
        self._timeline.timings.transfer_exposed_s = exposed_s
        self._placement.linked(source, pool, exposed_s)
        self._joined(pool)

    def _local(self, _: Booking, pool: Booking, event: decode_pb2.DecodeEvent) -> None:
        pool.reserved()
        self._read(event.local)
        self._joined(pool)

    def _read(self, report: prefill_pb2.PrefillStarted | decode_pb2.DecodeLocal) -> int:
        """Record where the prompt's tokens come from; return how many were cached."""
        num_tokens = len(self._request.engine.prompt_token_ids)
        # Of a resumed response more than the prompt may be cached.
        cached = self._answer.cached(report, at_most=num_tokens)
        self.num_computed = num_tokens - cached.total
        for tier, count in (
            ("computed", self.num_computed),
            ("memory", cached.total - cached.copied),
            ("worker", cached.pulled),
            ("host", cached.host),
            ("disk", cached.disk),
            ("server", cached.server),
        ):
            if count:
                self._metrics.tier_tokens.labels(tier).inc(count)
        return cached.total

    def ended(self, end: End, num_tokens: int, *, is_late: bool) -> None:
        """Record what the end says of the service time. `is_late`: its deadline has passed."""
        if end.finish is None:
            if is_late:
                self.record.cut_off()
        elif end.finish.reason != types_pb2.FINISH_REASON_ABORTED:
            self.record.ended(num_tokens)

    def _joined(self, pool: Booking) -> None:
        self.record.committed(pool)
        self._timeline.committed()

    def _finished(self, _: Booking, __: Booking, event: decode_pb2.DecodeEvent) -> None:
        self._timeline.timings.decode_queue_s = event.finished.queue_s
        self._timeline.timings.decode_s = event.finished.decode_s
        self.record.finished(event.finished.decode_s)

    def _moved(self, _: Booking, __: Booking, ___: None) -> None:
        self.record.moved()

    _MILESTONES: ClassVar[Mapping[Milestone, Callable[[Any, Booking, Booking, Any], None]]] = {
        Milestone.PLACED: _placed,
        Milestone.STARTED: _started,
        Milestone.COMPUTED: _computed,
        Milestone.RESERVED: _reserved,
        Milestone.DESTINATION: _destination,
        Milestone.COMMITTED: _committed,
        Milestone.LOCAL: _local,
        Milestone.FINISHED: _finished,
        Milestone.MOVED: _moved,
    }

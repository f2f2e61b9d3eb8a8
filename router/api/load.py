"""Load of a router and its workers, as figures and as ORCA load reports."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import generation_pb2, orca_load_report_pb2, orca_service_pb2, orca_service_pb2_grpc
from router.workers.worker import Worker, WorkerRole

Context = grpc.aio.ServicerContext[Any, Any]
ORCA_SERVICE = "xds.service.orca.v3.OpenRcaService"
ORCA_METHODS = frozenset({f"/{ORCA_SERVICE}/StreamCoreMetrics"})
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 3600.0


def load_of(workers: Iterable[Worker], num_waiting: int) -> generation_pb2.GetLoadResponse:
    """Return sums over the usable workers; `num_waiting` requests are queued in the router."""
    usable = [worker for worker in workers if worker.is_usable and worker.info is not None]
    pools = [worker for worker in usable if worker.role is WorkerRole.DECODE]
    infos = [worker.info for worker in pools if worker.info is not None]
    places = sum(info.max_running_requests for info in infos)
    running = sum(worker.load.running_requests for worker in pools)
    total = sum(info.pages_total * info.page_size for info in infos)
    free = sum(
        worker.load.pages_free * info.page_size for worker, info in zip(pools, infos, strict=True)
    )
    queued = sum(worker.load.queued_requests for worker in usable)
    kv_utilization = (total - free) / total if total else 0.0
    return generation_pb2.GetLoadResponse(
        waiting_requests=num_waiting,
        queued_requests=queued,
        queued_tokens=sum(worker.load.queued_tokens for worker in usable),
        running_requests=running,
        max_running_requests=places,
        page_size=infos[0].page_size if infos else 0,
        kv_tokens_used=total - free,
        kv_tokens_total=total,
        kv_utilization=kv_utilization,
        utilization=max(
            kv_utilization, (running + queued + num_waiting) / places if places else 0.0
        ),
        prefill_workers=len(usable) - len(pools),
        decode_workers=len(pools),
    )


@dataclass
class RequestCounts:
    """Requests since the start, by the outcomes that load reports distinguish."""

    accepted: int = 0
    failed: int = 0


@dataclass
class _StreamCounters:
    """Counters at the last report of one stream."""

    counts: RequestCounts
    at_s: float = field(default_factory=time.monotonic)
    cpu_s: float = field(default_factory=time.process_time)
    accepted: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        self.accepted = self.counts.accepted
        self.failed = self.counts.failed

    def fill_in(self, report: orca_load_report_pb2.OrcaLoadReport) -> None:
        """Fill in the rates per second since the last report."""
        now_s = time.monotonic()
        cpu_s = time.process_time()
        accepted = self.counts.accepted
        failed = self.counts.failed
        elapsed_s = max(now_s - self.at_s, 1e-3)
        report.cpu_utilization = (cpu_s - self.cpu_s) / elapsed_s / (os.cpu_count() or 1)
        report.rps_fractional = (accepted - self.accepted) / elapsed_s
        report.eps = (failed - self.failed) / elapsed_s
        self.at_s = now_s
        self.cpu_s = cpu_s
        self.accepted = accepted
        self.failed = failed


class OpenRcaService(orca_service_pb2_grpc.OpenRcaServiceServicer):
    """Stream of `load()` at the requested interval, but at most every `MIN_INTERVAL_S`."""

    def __init__(
        self, load: Callable[[], generation_pb2.GetLoadResponse], counts: RequestCounts
    ) -> None:
        self._load = load
        self._counts = counts

    async def StreamCoreMetrics(
        self, request: orca_service_pb2.OrcaLoadReportRequest, context: Context
    ) -> AsyncIterator[orca_load_report_pb2.OrcaLoadReport]:
        wanted_s = request.report_interval.ToNanoseconds() / 1e9
        rates = _StreamCounters(self._counts)
        while True:
            report = _report(self._load())
            rates.fill_in(report)
            yield report
            await asyncio.sleep(min(max(wanted_s, MIN_INTERVAL_S), MAX_INTERVAL_S))


def _report(load: generation_pb2.GetLoadResponse) -> orca_load_report_pb2.OrcaLoadReport:
    places = load.max_running_requests
    return orca_load_report_pb2.OrcaLoadReport(
        application_utilization=load.utilization,
        utilization={
            "kv_cache": load.kv_utilization,
            "running_requests": min(1.0, load.running_requests / places) if places else 0.0,
        },
        named_metrics={
            name: getattr(load, name)
            for name in ("waiting_requests", "queued_requests", "queued_tokens", "running_requests")
        },
    )

"""A router process: the objects that `router.app` builds, over the simulated network."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from protos import generation_pb2
from router.request.admission import Admission
from router.request.answer import Answer, Output, ResponseQueue
from router.request.flow import RequestFlow, Services
from router.request.rejections import AdmissionLimits
from router.request.retries import FlowLimits
from router.request.service_times import ServiceTimeModel
from router.request.timeline import Timeline
from router.request.validate import AdmissibleRequest
from router.text.model_facts import ModelLimits
from router.workers.directory import Directory, DirectoryOptions
from router.workers.policy import Policy
from router.workers.worker import WorkerRole
from runtime.clock import Clock
from runtime.errors import UnavailableError
from runtime.observe.metrics.router import ClientMetrics, RouterMetrics
from sim.network import Channel
from sim.reports import Reports
from sim.worker import SimulatedWorker


@dataclass(frozen=True)
class RouterOptions:
    """Options with the meaning of the `router.config` settings of the same names."""

    policy: Policy = Policy.PREFIX_CACHE
    watch_interval_s: float = 0.25
    max_waiting: int = 1024
    max_wait_s: float = 60.0
    max_request_s: float = 3600.0
    pull_tokens: int = 512


@dataclass(eq=False)
class RouterProcess:
    """One router process. Build inside a running event loop. It dies at most once."""

    options: RouterOptions
    registry: CollectorRegistry
    metrics: RouterMetrics
    services: Services
    clock: Clock
    _tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)  # oldest first
    is_up: bool = True

    @classmethod
    def build(
        cls,
        options: RouterOptions,
        workers: Mapping[tuple[str, str], SimulatedWorker],
        latency_s: float,
        clock: Clock,
        rng: random.Random,
        facts: ModelLimits,
    ) -> "RouterProcess":
        """Build a router for `workers`, which are given by role and address."""
        registry = CollectorRegistry()
        metrics = RouterMetrics.create(registry)
        prefill, decode = (
            tuple(address for its, address in workers if its == role) for role in WorkerRole
        )
        directory = Directory(
            DirectoryOptions(
                prefill,
                decode,
                options.policy,
                options.watch_interval_s,
                longest_restart_s=options.max_wait_s,
                pull_tokens=options.pull_tokens,
            ),
            facts,
            metrics,
            rng,
            clock,
            lambda role, address: Channel(workers[role, address].server, latency_s),
            Reports(workers, latency_s, rng).follow,
        )
        service_model = ServiceTimeModel(clock)
        flow_limits = FlowLimits(capacity_wait_s=options.max_wait_s)
        limits = AdmissionLimits(options.max_waiting, options.max_wait_s, flow_limits.peer_wait_s)
        services = Services(
            Admission(directory, limits, metrics, service_model),
            directory,
            flow_limits,
            metrics,
            service_model,
            ClientMetrics.create(registry),
        )
        return cls(options, registry, metrics, services, clock)

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the background tasks; an error in one ends the group."""
        for work in (self.services.directory.run(), self.services.admission.run()):
            self._note(group.create_task(work))

    async def answer(
        self, request: AdmissibleRequest
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Yield the responses to a request, to its end.

        Raises:
            UnavailableError: this process died first.
            BatonError: as `RequestFlow.run`.
        """
        if not self.is_up:
            raise UnavailableError("the router is gone")
        responses = ResponseQueue(self.options.max_request_s)
        answer = Answer(
            request.engine.request_id,
            0,
            Output(request.engine, (), None),
            responses,
            Timeline(self.clock, self.metrics),
        )
        flow = RequestFlow(request, answer, self.services, self.options.max_request_s)
        task = self._note(asyncio.get_running_loop().create_task(flow.run()))
        task.add_done_callback(lambda _: responses.close())
        try:
            async for response in responses:
                yield response
            await task
        except asyncio.CancelledError:
            raise UnavailableError("the router was lost") from None

    def die(self) -> None:
        """End the process at once, with all its requests."""
        self.is_up = False
        for task in tuple(self._tasks):
            task.cancel()

    @property
    def num_running(self) -> int:
        """Return the number of placed requests that have not ended."""
        return round(self.registry.get_sample_value("baton_router_running") or 0)

    def picks(self) -> tuple[int, float]:
        """Return the number of choices of a worker, and the real time in seconds that they took."""
        count, seconds = (
            self.registry.get_sample_value(f"baton_router_pick_seconds_{part}") or 0
            for part in ("count", "sum")
        )
        return round(count), seconds

    def _note(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

"""The prefill role: what `pool.process` needs to know to run it."""

import asyncio

from engine.loop import Scheduler
from engine.memory.pages import PageAllocator
from engine.memory.slots import SlotAllocator
from engine.pipeline.executor import LayerObserver
from engine.request import Request, SamplingParams
from pool.config import WorkerConfig
from pool.layers import layer_observer
from pool.process import LeaderParts
from pool.stage import Stage
from prefill.scheduler import Event, Failed, FirstToken, PrefillLimits, PrefillScheduler
from prefill.service import PrefillParts, PrefillService
from protos import prefill_pb2_grpc
from protos import worker_pb2 as pb
from runtime.clock import SystemClock
from runtime.errors import ConfigError, InternalError
from runtime.server import GrpcServer
from transfer.agent import TransferAgent

WARM_UP_TIMEOUT_S = 60.0


class PrefillRole:
    """One object per process. Satisfies `pool.process.Role`."""

    name = "prefill"
    service = "baton.v1.Prefill"
    speculates = False

    def __init__(self) -> None:
        self._scheduler: PrefillScheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        return self._prepared

    @property
    def _prepared(self) -> PrefillScheduler:
        if self._scheduler is None:
            raise InternalError("the prefill role was used before prepare()")
        return self._scheduler

    def prepare(self, config: WorkerConfig, stage: Stage) -> None:
        geometry, grid = stage.plan.geometry, stage.plan.description.facts.chunk_grid
        if config.chunk_tokens % grid:
            raise ConfigError(f"chunk_tokens must be a multiple of {grid} for this model, got {config.chunk_tokens}",
                              field="chunk_tokens")
        self._scheduler = PrefillScheduler(
            pages=PageAllocator(geometry.num_pages), slots=SlotAllocator(geometry.num_slots),
            limits=PrefillLimits(page_size=config.page_size, chunk_tokens=config.chunk_tokens, grid=grid,
                                 max_running=config.max_running, max_queued=config.max_queued),
            clock=SystemClock())

    def observe_layers(self, agent: TransferAgent) -> LayerObserver:
        return layer_observer(agent)

    def add_service(self, server: GrpcServer, parts: LeaderParts) -> None:
        service = PrefillService(PrefillParts(parts.leader, self._prepared, parts.stage.plan, parts.janitor,
                                              parts.meters, parts.config.chunk_tokens))
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.grpc)

    async def load(self, parts: LeaderParts) -> pb.WorkerLoad:
        load = await parts.leader.loop.submit(self._prepared.load)
        return pb.WorkerLoad(serving=parts.leader.serving, reason=parts.leader.reason,
                             queued_requests=load.queued_requests, queued_tokens=load.queued_tokens,
                             running_requests=load.running_requests, pages_free=load.pages_free,
                             slots_free=load.slots_free, open_sessions=parts.leader.group.open_sessions)

    async def warm_up(self, parts: LeaderParts) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(event: Event) -> None:
            if done.done():
                return
            if isinstance(event, Failed):
                done.set_exception(event.error)
            elif isinstance(event, FirstToken):
                done.set_result(None)

        request = Request("warm-up", (0,), 1, SamplingParams(temperature=0))
        key = await parts.leader.loop.submit(
            lambda: self._prepared.submit(request, lambda event: loop.call_soon_threadsafe(settle, event)))
        try:
            await asyncio.wait_for(done, WARM_UP_TIMEOUT_S)
        finally:
            parts.janitor.end(lambda: self._prepared.release(key),
                              close=lambda: parts.leader.group.close_request(key, ""))

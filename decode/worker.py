"""The decode role: what `pool.process` needs to know to run it."""

import asyncio

from decode.scheduler import DecodeLimits, DecodeScheduler, Event, Failed, Finished
from decode.service import DecodeParts, DecodeService
from engine.loop import Scheduler
from engine.memory.pages import PageAllocator
from engine.memory.slots import SlotAllocator
from engine.pipeline.executor import LayerObserver
from engine.request import Request, SamplingParams
from pool.config import WorkerConfig
from pool.process import LeaderParts
from pool.stage import Stage
from protos import decode_pb2_grpc
from protos import worker_pb2 as pb
from runtime.clock import SystemClock
from runtime.errors import InternalError
from runtime.server import GrpcServer
from transfer.agent import TransferAgent

WARM_UP_TIMEOUT_S = 60.0


class DecodeRole:
    """One object per process. Satisfies `pool.process.Role`."""

    name = "decode"
    service = "baton.v1.Decode"
    speculates = True

    def __init__(self) -> None:
        self._scheduler: DecodeScheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        return self._prepared

    @property
    def _prepared(self) -> DecodeScheduler:
        if self._scheduler is None:
            raise InternalError("the decode role was used before prepare()")
        return self._scheduler

    def prepare(self, config: WorkerConfig, stage: Stage) -> None:
        geometry, grid = stage.plan.geometry, stage.plan.description.facts.chunk_grid
        self._scheduler = DecodeScheduler(
            pages=PageAllocator(geometry.num_pages), slots=SlotAllocator(geometry.num_slots),
            limits=DecodeLimits(page_size=config.page_size, grid=grid, depth=config.world_size,
                                max_running=config.max_running, max_context_tokens=stage.plan.max_context_tokens,
                                chunk_tokens=max(config.chunk_tokens, grid), growth_tokens=config.page_size,
                                num_draft_tokens=stage.plan.num_draft_tokens),
            clock=SystemClock())

    def observe_layers(self, agent: TransferAgent) -> LayerObserver | None:
        return None

    def add_service(self, server: GrpcServer, parts: LeaderParts) -> None:
        service = DecodeService(DecodeParts(parts.leader, self._prepared, parts.stage.plan, parts.janitor,
                                            parts.meters))
        decode_pb2_grpc.add_DecodeServicer_to_server(service, server.grpc)

    async def load(self, parts: LeaderParts) -> pb.WorkerLoad:
        load = await parts.leader.loop.submit(self._prepared.load)
        return pb.WorkerLoad(serving=parts.leader.serving, reason=parts.leader.reason,
                             queued_requests=load.waiting_requests, running_requests=load.running_requests,
                             pages_free=load.pages_free, slots_free=load.slots_free,
                             open_sessions=parts.leader.group.open_sessions)

    async def warm_up(self, parts: LeaderParts) -> None:
        """Two tokens: a prefill and a decode step."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(event: Event) -> None:
            if done.done():
                return
            if isinstance(event, Failed):
                done.set_exception(event.error)
            elif isinstance(event, Finished):
                done.set_result(None)

        request = Request("warm-up", (0,), 2, SamplingParams(temperature=0))
        key = await parts.leader.loop.submit(
            lambda: self._prepared.submit_local(request, lambda event: loop.call_soon_threadsafe(settle, event)))
        try:
            await asyncio.wait_for(done, WARM_UP_TIMEOUT_S)
        finally:
            parts.leader.loop.post(lambda: self._prepared.release(key))

"""The Worker service of a leader: facts once, then load at the asked interval, for routers and people."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from pool.stage.config import WorkerConfig
from pool.stage.stage import StagePlan
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from runtime.errors import FieldViolation, InvalidRequestError
from runtime.tokenizer_files import tokenizer_digest

Context = grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse]
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 60.0


def worker_info(config: WorkerConfig, plan: StagePlan, *, role: str, incarnation: str) -> pb.WorkerInfo:
    facts = plan.description.facts
    return pb.WorkerInfo(
        role=role, incarnation=incarnation, model=config.model_name or config.model.resolve().name,
        architecture=facts.architecture, revision=facts.revision, compatibility=plan.compatibility.digest,
        compatibility_text=plan.compatibility.text, vocab_size=facts.vocab_size,
        max_context_tokens=plan.max_context_tokens, num_layers=facts.num_layers, page_size=config.page_size,
        pages_total=plan.geometry.num_pages - 1, slots_total=max(0, plan.geometry.num_slots - 1),
        max_running_requests=plan.max_held, max_queued_requests=config.max_queued,
        stages=[str(layers) for layers in plan.ranges], tokenizer_digest=tokenizer_digest(config.model))


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Streams `load()` until the caller or the process is gone; sooner than asked when `changed` is called."""

    def __init__(self, info: pb.WorkerInfo, load: Callable[[], Awaitable[pb.WorkerLoad]]) -> None:
        self._info = info
        self._load = load
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Readiness changed: watchers hear of it without waiting for their interval. Event loop's thread."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def Watch(self, request: pb.WatchRequest,
                    context: Context) -> AsyncIterator[pb.WatchResponse]:
        interval = request.interval_s
        if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
            raise InvalidRequestError(FieldViolation(
                "interval_s", f"must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S}, got {interval}"))
        yield pb.WatchResponse(info=self._info)
        while True:
            changed = self._changed
            yield pb.WatchResponse(load=await self._load())
            try:
                async with asyncio.timeout(interval):
                    await changed.wait()
            except TimeoutError:
                continue

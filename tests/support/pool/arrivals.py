"""A decode service over real transfer agents and a real scheduler, without gRPC and without a
model.

Nothing computes: tests check what the scheduler would run, and which memory is free.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import cast

from prometheus_client import CollectorRegistry

from decode.entry import DecodeLimits
from decode.handler import DecodeParts
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from engine.core.batch import ForwardBatch
from engine.core.layer_range import LayerRange, get_pp_indices
from engine.loop import EngineLoop, LoopObserver
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from engine.memory.leases import PageAllocator, SlotAllocator
from pool.pipeline.leader import Leader
from pool.pipeline.reclaimer import MemoryReclaimer
from pool.pipeline.session_reports import SessionReports
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import DataRanks
from pool.request.handler import EventPost
from pool.request.role_switch import RoleSwitch
from pool.stage.metrics import LeaderMeters
from pool.stage.plan import StagePlan
from pool.stage.pool_size import PoolSize
from protos import decode_pb2 as pb
from protos import types_pb2
from runtime.clock import SystemClock
from runtime.digests import Compatibility, prompt_digest
from runtime.observe.metrics.caches import CacheMetrics
from runtime.observe.metrics.handoffs import ArrivalMetrics
from testing.memory_transport import MemoryNetwork
from tests.support.models.tiny_models import HYBRID, tiny
from tests.support.pool.adapters import no_adapters
from tests.support.pool.local_pool import call
from tests.support.pool.streams import SharedCall, Stream, call_tracker, decode_call
from tests.support.transfer.handoff import Pool
from transfer.plan import codec
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
    StageSessionEvent,
)
from transfer.session import ReceiveSession

PAGE_SIZE, NUM_PAGES, NUM_SLOTS, NUM_LAYERS = 4, 32, 8, 6
PROMPT = list(range(1, 19))
SOURCE_PAGES = (3, 4, 5, 9, 10)


def specs() -> tuple[CacheSpec, ...]:
    """Return pages and a slot on every layer; no two layers have states of the same size, so a
    message identifies its layer."""
    return tuple(
        spec
        for layer_id in range(NUM_LAYERS)
        for spec in (
            CacheSpec(layer_id, CacheKind.KV, (2, 2, PAGE_SIZE, 8), "bfloat16", 2),
            CacheSpec(layer_id, CacheKind.STATE, (3, 7, 8 + layer_id), "float32", 4),
        )
    )


def state_bytes(layer_id: int) -> int:
    return next(
        spec.record_bytes
        for spec in specs()
        if (spec.layer_id, spec.kind) == (layer_id, CacheKind.STATE)
    )


class _Group:
    """The used part of `pool.pipeline.group.StageGroup`, with every stage in this process."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self._loop = asyncio.get_running_loop()
        self.reports = SessionReports(self._loop)

    def on_report(self, rank: int, event: StageSessionEvent) -> None:
        """Handle a report, on the agents' threads."""
        self._loop.call_soon_threadsafe(self.reports.deliver, rank, event)

    @property
    def session_size(self) -> int:
        return len(self.endpoints())

    def endpoints(self, data_rank: int = 0) -> tuple[StageEndpoint, ...]:
        assert self.pool is not None
        return tuple(stage.agent.endpoint for stage in self.pool.stages)

    def includes(self, stages: Iterable[StageEndpoint]) -> bool:
        here = {stage.incarnation for stage in self.endpoints()}
        return any(stage.incarnation in here for stage in stages)

    def open_receive(
        self,
        source: SourceTerms,
        destination: DestinationTerms,
        session: ReceiveSession,
        on_change: Callable[[], object],
        data_rank: int = 0,
    ) -> None:
        assert self.pool is not None
        self.reports.watch(session, on_change)
        for stage in self.pool.stages:
            stage.agent.open_receive(source, destination)

    def close_session(self, session_id: str) -> None:
        assert self.pool is not None
        self.pool.close(session_id)


@dataclass
class _Leader:
    loop: EngineLoop
    group: _Group
    serving: bool = True
    reason: str = ""
    compatibility: Compatibility = field(default_factory=lambda: Compatibility("c", "text"))


DecodeStream = Stream[pb.DecodeInput, pb.DecodeEvent]


@dataclass
class Arrivals:
    """Two source stages, three destination stages, and the service of the latter."""

    source: Pool
    dest: Pool
    network: MemoryNetwork
    scheduler: DecodeScheduler
    service: DecodeService
    loop: EngineLoop
    complaints: list[str]
    registry: CollectorRegistry
    terms: SourceTerms = field(init=False)
    router: SharedCall[pb.DecodeInput, pb.DecodeEvent] = field(init=False)

    def __post_init__(self) -> None:
        terms = self.source.terms(SOURCE_PAGES, len(PROMPT))
        self.terms = replace(terms, content=prompt_digest(PROMPT))
        self.router = decode_call(self.service.Serve)

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample; 0 if it was never changed."""
        return self.registry.get_sample_value(name, labels) or 0.0

    async def open(
        self,
        *,
        max_tokens: int = 8,
        stop_token_ids: Sequence[int] = (),
        remaining_s: float | None = None,
    ) -> tuple[DecodeStream, DestinationTerms]:
        """Open a request and return it with its destination terms."""
        stream = self.begin(
            max_tokens=max_tokens, stop_token_ids=stop_token_ids, remaining_s=remaining_s
        )
        event = await stream.next()
        return stream, codec.destination_from_proto(event.destination)

    def begin(
        self,
        *,
        max_tokens: int = 8,
        stop_token_ids: Sequence[int] = (),
        remaining_s: float | None = None,
        has_source: bool = True,
    ) -> DecodeStream:
        """Open a request with a reservation; without a source the pool computes the rest itself."""
        request = types_pb2.EngineRequest(
            request_id="r",
            prompt_token_ids=PROMPT,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
        )
        source = codec.source_to_proto(self.terms) if has_source else None
        return self.router.open(
            pb.DecodeInput(
                open=pb.DecodeOpen(
                    request=request,
                    source=source,
                    context=types_pb2.RequestContext(time_left_s=remaining_s),
                )
            )
        )

    def deliver(
        self,
        destination: DestinationTerms,
        *,
        layers: Callable[[int], bool] = lambda layer_id: True,
        request_key: int = 1,
    ) -> None:
        """Compute and send these layers at the source."""
        self.source.open_send(self.terms, destination, request_key=request_key)
        self.finish_layers(layers, request_key=request_key)

    def finish_layers(self, layers: Callable[[int], bool], *, request_key: int = 1) -> None:
        for stage in self.source.stages:
            for layer_id in filter(layers, stage.memory.geometry.layers):
                stage.agent.layer_done(request_key, layer_id, len(PROMPT))

    def next_batch(self) -> ForwardBatch | None:
        """Return the batch that the engine would run now."""
        batches: list[ForwardBatch | None] = []
        call(self.loop, lambda: batches.append(self.scheduler.next_batch()))
        return batches[0]

    @property
    def is_free(self) -> bool:
        pages, slots = self.scheduler.pages, self.scheduler.slots
        return (pages.num_available, slots.num_available) == (pages.num_total, slots.num_total)

    async def until(self, holds: Callable[[], bool], timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not holds():  # noqa: ASYNC110 - allocators have no event to wait for
                await asyncio.sleep(0.005)


def cancelled() -> pb.DecodeInput:
    """Return the router's cancellation of a request."""
    return pb.DecodeInput(cancelled=types_pb2.RequestCancelled())


def first_token(token: int = 7) -> pb.DecodeInput:
    return pb.DecodeInput(first_token=types_pb2.TokenChunk(token_ids=[token]))


@asynccontextmanager
async def arrivals(*, caches: bool = False) -> AsyncIterator[Arrivals]:
    """Run the service; `caches` keeps received prompts."""
    network, group, complaints = MemoryNetwork(), _Group(), list[str]()
    source = Pool("prefill", [network.transport(SystemClock()) for _ in range(2)], specs())
    dest = Pool(
        "decode",
        [network.transport(SystemClock()) for _ in range(3)],
        specs(),
        listener=group.on_report,
    )
    group.pool = dest
    for rank, stage in enumerate(source.stages):
        stage.memory.randomize(rank)
    scheduler = DecodeScheduler(
        pages=PageAllocator(NUM_PAGES),
        slots=SlotAllocator(NUM_SLOTS),
        limits=DecodeLimits(
            page_size=PAGE_SIZE,
            grid=1,
            depth=1,
            max_running=4,
            max_context_tokens=64,
            growth_tokens=PAGE_SIZE,
            local_rest_tokens=PAGE_SIZE,
        ),
        clock=SystemClock(),
        cache_rule=ResumeRule(PAGE_SIZE) if caches else None,
    )
    post = EventPost(asyncio.get_running_loop())
    loop = EngineLoop(scheduler, observer=LoopObserver(settled=post.flush))
    loop.start()
    registry, ranges = (
        CollectorRegistry(),
        [get_pp_indices(NUM_LAYERS, rank, 3) for rank in range(3)],
    )
    geometry = PoolGeometry(PAGE_SIZE, NUM_PAGES, NUM_SLOTS, LayerRange(0, 2), specs())
    parts = DecodeParts(
        leader=cast(Leader, _Leader(loop, group)),
        ranks=DataRanks((scheduler,)),
        plan=StagePlan(
            tiny(HYBRID),
            ranges,
            geometry,
            {},
            PoolSize(geometry.num_pages, geometry.num_slots, 64),
            max_held=8,
        ),
        reclaimer=MemoryReclaimer(group.reports, loop, complaints.append),
        meters=LeaderMeters.create(registry, geometry),
        post=post,
        switch=RoleSwitch(("decode",), ("decode",)),
        adapters=no_adapters(),
        arrivals=ArrivalMetrics.create(registry),
        caches=caches,
    )
    scheduler.cache.metrics = CacheMetrics.create(registry)
    made = Arrivals(
        source,
        dest,
        network,
        scheduler,
        DecodeService(parts, call_tracker()),
        loop,
        complaints,
        registry,
    )
    try:
        yield made
    finally:
        await made.router.drop()
        await asyncio.to_thread(source.shutdown)
        await asyncio.to_thread(dest.shutdown)
        loop.stop()

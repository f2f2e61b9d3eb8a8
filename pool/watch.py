"""The Worker service of a leader: worker info once, then load reports at the requested interval,
and the flush of its prefix cache.

A report never waits for a step of the engine. It shows the values that the engine thread published
last.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from pool.pipeline.leader import Leader
from pool.prefix.journal import PointJournal
from pool.request.adapters import PoolAdapters
from pool.request.role_switch import RoleSwitch
from pool.stage.config import WorkerConfig
from pool.stage.metrics import LeaderMeters, SchedulerLoad
from pool.stage.plan import StagePlan
from protos import types_pb2, worker_pb2_grpc
from protos import worker_pb2 as pb
from runtime.errors import FieldViolation, InvalidRequestError
from runtime.model_files.tokenizer_files import tokenizer_digest
from runtime.version import WIRE_VERSION

logger = logging.getLogger(__name__)

WatchContext = grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse]
MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 60.0
# Intervals between two reports of an idle pool; a router suspects a worker after more of them.
_IDLE_INTERVALS = 2


def worker_info(
    config: WorkerConfig, plan: StagePlan, *, roles: Sequence[str], incarnation: str
) -> pb.WorkerInfo:
    """Return the facts known before the pool has formed.

    Reads the tokenizer's file, so call it once and not per report.
    """
    facts = plan.description.facts
    num_ranks = config.dp_attention
    return pb.WorkerInfo(
        role=roles[0],
        roles=roles,
        incarnation=incarnation,
        model=config.model_name or config.model.resolve().name,
        architecture=facts.architecture,
        vocab_size=facts.vocab_size,
        max_context_tokens=plan.max_context_tokens,
        num_layers=facts.num_layers,
        page_size=config.page_size,
        pages_total=num_ranks * (plan.geometry.num_pages - 1),
        slots_total=num_ranks * max(0, plan.geometry.num_slots - 1),
        max_running_requests=num_ranks * plan.max_held,
        max_batch_requests=num_ranks * config.max_running,
        max_queued_requests=num_ranks * config.max_queued,
        stages=[str(layers) for layers in plan.ranges],
        tensor_size=config.tp,
        data_size=num_ranks,
        tokenizer_digest=tokenizer_digest(config.model),
        eos_token_ids=facts.eos_token_ids,
        wire_version=WIRE_VERSION,
    )


def current_info(
    info: pb.WorkerInfo, leader: Leader, plan: StagePlan, adapters: PoolAdapters
) -> pb.WorkerInfo:
    """Return `info` with the adapters, and the digests that other pools compare.

    There are no digests before the pool has formed.
    """
    formed = pb.WorkerInfo(
        adapters=adapters.accepted,
        retired_adapters=adapters.retired,
        loaded_adapters=adapters.loaded,
    )
    formed.MergeFrom(info)
    if leader.weights is None:
        return formed
    known = leader.compatibility
    formed.revision = leader.weights.revision(plan.description.facts.revision)
    formed.compatibility = known.digest
    formed.compatibility_text = known.text
    return formed


def worker_load(
    leader: Leader, load: SchedulerLoad, meters: LeaderMeters, start_s: float = 0.0
) -> pb.WorkerLoad:
    """Return a load report; `start_s` is the seconds the pool took until it served, 0 before."""
    busy_since_s = leader.loop.busy_since_s
    return pb.WorkerLoad(
        serving=leader.serving,
        reason=leader.reason,
        queued_requests=load.queued_requests,
        queued_tokens=load.queued_tokens,
        running_requests=load.running_requests,
        pages_free=load.pages_free,
        slots_free=load.slots_free,
        open_sessions=leader.group.open_sessions,
        busy_s=0.0 if busy_since_s is None else time.monotonic() - busy_since_s,
        prompt_tokens=meters.num_prompt_tokens,
        output_tokens=meters.num_output_tokens,
        start_s=start_s,
        data_ranks=[
            types_pb2.DataRankLoad(
                queued_requests=each.queued_requests,
                pages_free=each.pages_free,
                running_requests=each.running_requests,
                slots_free=each.slots_free,
            )
            for each in load.data_ranks
        ],
        local_rest_tokens=load.local_rest_tokens,
    )


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The gRPC servicer of the Worker service.

    It streams `load(role)`, the load of the role that the caller names, until the caller or the
    process ends: sooner than requested when `changed` is called, and less often while nothing runs
    and nothing changes. `info()` is sent before the first load, and again when the pool has formed.
    Changes in the journal of the prefix cache, and in that of `copies` in its tiers, are sent before
    each load. `flush` empties that cache and returns the number of its pages. `switch` has the roles
    that the pool serves.
    """

    def __init__(
        self,
        info: Callable[[], pb.WorkerInfo],
        load: Callable[[str], pb.WorkerLoad],
        journal: PointJournal,
        flush: Callable[[], Awaitable[int]],
        switch: RoleSwitch,
        copies: PointJournal | None = None,
    ) -> None:
        self._info = info
        self._load = load
        self._journal = journal
        self._flush = flush
        self._switch = switch
        self._copies = copies or PointJournal()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Send watchers a report at once, because readiness changed. Event loop's thread."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def Watch(
        self, request: pb.WatchRequest, context: WatchContext
    ) -> AsyncIterator[pb.WatchResponse]:
        interval = request.interval_s
        if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
            raise InvalidRequestError(
                FieldViolation(
                    "interval_s",
                    f"must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S}, got {interval}",
                )
            )
        shown: pb.WorkerInfo | None = None
        sent = pb.WorkerLoad()
        num_unsent = 0
        # A decode pool reads copies to receive less, which matters little for its choice.
        own = PointJournal() if request.role == "decode" else self._copies
        with self._journal.watch() as cache, own.watch() as copies:
            while True:
                changed = self._changed
                if shown != (info := self._info()):
                    yield pb.WatchResponse(info=info)
                    # the load follows at once
                    shown = info
                    num_unsent = _IDLE_INTERVALS
                for report in cache.take():
                    yield pb.WatchResponse(cache=report)
                for report in copies.take():
                    yield pb.WatchResponse(copies=report)
                load = self._load(request.role)
                load.cache_reports, load.copy_reports = cache.num_reports, copies.num_reports
                if load != sent or not _is_idle(load) or num_unsent + 1 >= _IDLE_INTERVALS:
                    sent = load
                    num_unsent = 0
                    yield pb.WatchResponse(load=load)
                else:
                    num_unsent += 1
                try:
                    async with asyncio.timeout(interval):
                        await changed.wait()
                except TimeoutError:
                    continue

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.FlushCacheResponse:
        pages = await self._flush()
        logger.info("the prefix cache was flushed", extra={"pages": pages})
        self.changed()
        return pb.FlushCacheResponse(pages=pages)

    async def SetRoles(
        self, request: pb.SetRolesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SetRolesResponse:
        self._switch.set(request.epoch, request.roles)
        return pb.SetRolesResponse(epoch=self._switch.epoch, roles=self._switch.active)


def _is_idle(load: pb.WorkerLoad) -> bool:
    return not load.queued_requests and not load.running_requests and not load.open_sessions

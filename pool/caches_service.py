"""The Caches service of a leader: how much its prefix caches hold, and how long it was not used."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from engine.loop import EngineLoop
from pool.prefix.cache import PrefixCache
from pool.tiers.block_tier import BlockTier
from protos import caches_pb2 as pb
from protos import caches_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
IDLE_S = (60.0, 600.0, 3600.0, inf)  # upper bounds of the rows


class PoolCachesService(caches_pb2_grpc.CachesServicer):
    """The gRPC servicer of the Caches service of one pool, whose data ranks have a cache each."""

    def __init__(
        self,
        caches: Sequence[PrefixCache],
        loop: EngineLoop,
        tiers: Iterable[BlockTier],
        registry: CollectorRegistry,
    ) -> None:
        """Create the servicer; `registry` has the counters of the caches."""
        self._caches = caches
        self._loop = loop
        self._tiers = tuple(tiers)
        self._registry = registry

    async def ListCaches(
        self, request: pb.ListCachesRequest, context: Context
    ) -> pb.ListCachesResponse:
        found = await self._loop.submit(self._contents)
        found.queried_tokens = self._count("queried")
        found.matched_tokens = self._count("matched")
        for tier in self._tiers:
            store = tier.own.store
            found.tiers.add(tier=tier.tier, used_bytes=store.num_bytes, max_bytes=store.max_bytes)
        return pb.ListCachesResponse(workers=[found])

    def _contents(self) -> pb.WorkerCache:
        """Return what the caches hold. For the engine thread."""
        caches = self._caches
        rows = Counter[float]()
        for idle_s, num_pages in (item for cache in caches for item in cache.idle_pages()):
            rows[next(limit for limit in IDLE_S if idle_s <= limit)] += num_pages
        idle = [
            pb.IdlePages(at_most_s=0 if limit == inf else limit, pages=rows[limit])
            for limit in IDLE_S
        ]
        return pb.WorkerCache(
            page_tokens=caches[0].rule.block_tokens if caches and caches[0].rule else 0,
            pages_total=sum(cache.pages.num_total for cache in caches),
            pages=sum(rows.values()),
            points=caches[0].journal.num_points if caches else 0,  # the data ranks share it
            snapshots=sum(len(cache.slots.ledger.kept_ids()) for cache in caches),
            idle_pages=idle if caches else (),
            sessions=sum(cache.num_sessions for cache in caches),
            retained_pages=sum(cache.num_retained for cache in caches),
        )

    def _count(self, what: str) -> int:
        return round(self._registry.get_sample_value(f"baton_cache_{what}_tokens_total") or 0)

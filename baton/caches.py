"""The prefix caches of all workers, as an operator looks at them."""

from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from protos import caches_pb2 as pb
from protos.caches_pb2_grpc import CachesStub
from runtime.process.host_memory import MIB
from runtime.rpc.client import open_channel
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ChannelSecurity

TIMEOUT_S = 10.0
_INDENT = "\n    "
_PLACES = {"host": "in host memory", "disk": "on disk", "server": "at the cache server"}


@dataclass(frozen=True)
class TierUse:
    """What a tier holds, as it was lately; `max_bytes` is 0 if the limit is not known."""

    name: str
    used_bytes: int
    max_bytes: int


@dataclass(frozen=True)
class CacheOnWorker:
    """The prefix cache of a worker, or why the worker did not answer.

    Attributes:
        pages_total: for cached tokens and for requests.
        points: after which a prompt can resume.
        snapshots: recurrent states at such points.
        idle_pages: cached pages by the most seconds since a prompt last went through them, each
            without those before; the last row, with 0, is of any time.
        queried_tokens: of prompts that may use the cache, since the worker's start.
        matched_tokens: of these, found in the cache.
        tiers: the cache's copies on the host, on disk and at a server.
        sessions: that have a point.
        retained_pages: kept longer for sessions.
    """

    role: str
    address: str
    page_tokens: int = 0
    pages_total: int = 0
    pages: int = 0
    points: int = 0
    snapshots: int = 0
    idle_pages: tuple[tuple[float, int], ...] = ()
    queried_tokens: int = 0
    matched_tokens: int = 0
    tiers: tuple[TierUse, ...] = ()
    error: str = ""
    sessions: int = 0
    retained_pages: int = 0


async def list_caches(target: str, security: ChannelSecurity) -> list[CacheOnWorker]:
    """Return the prefix cache of each worker of a router.

    Raises:
        BatonError: the router cannot be reached, or refuses.
    """
    async with open_channel(target, security=security) as channel:
        try:
            listed = await CachesStub(channel).ListCaches(pb.ListCachesRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
    return [_cache_of(worker) for worker in listed.workers]


def cache_text(cache: CacheOnWorker) -> str:
    """Return the cache of a worker as lines of text."""
    return f"{cache.role} {cache.address}: {_INDENT.join(_lines(cache))}"


def _lines(cache: CacheOnWorker) -> Iterable[str]:
    if cache.error:
        yield cache.error
        return
    if not cache.page_tokens:
        yield "no prefix cache"
        return
    yield (
        f"{cache.pages} of {cache.pages_total} pages of {cache.page_tokens} tokens are cached; "
        f"resume points: {cache.points}"
        + (f", states: {cache.snapshots}" if cache.snapshots else "")
    )
    if cache.queried_tokens:
        share = cache.matched_tokens / cache.queried_tokens
        yield f"found {share:.0%} of {cache.queried_tokens} prompt tokens since its start"
    if cache.pages:
        rows = ", ".join(f"{pages} {_within(s)}" for s, pages in cache.idle_pages if pages)
        yield f"last used: {rows}"
    if cache.sessions:
        yield f"sessions: {cache.sessions}, for which {cache.retained_pages} pages are kept longer"
    for tier in cache.tiers:
        limit = f"of {tier.max_bytes / MIB:.0f} MiB" if tier.max_bytes else "MiB, limit not known"
        yield f"{_PLACES.get(tier.name, tier.name)}: {tier.used_bytes / MIB:.1f} {limit}"


def _within(seconds: float) -> str:
    if not seconds:
        return "earlier"
    return f"within {seconds / 60:.0f} min" if seconds < 3600 else f"within {seconds / 3600:.0f} h"


def _cache_of(worker: pb.WorkerCache) -> CacheOnWorker:
    return CacheOnWorker(
        worker.role,
        worker.address,
        worker.page_tokens,
        worker.pages_total,
        worker.pages,
        worker.points,
        worker.snapshots,
        tuple((row.at_most_s, row.pages) for row in worker.idle_pages),
        worker.queried_tokens,
        worker.matched_tokens,
        tuple(TierUse(tier.tier, tier.used_bytes, tier.max_bytes) for tier in worker.tiers),
        worker.error,
        worker.sessions,
        worker.retained_pages,
    )

"""`baton cache`: what the prefix caches of all workers hold."""

from pathlib import Path

import torch

from baton.caches import CacheOnWorker, TierUse, cache_text, list_caches
from baton.client import AsyncBatonClient
from baton.values import Query, Sampling, Stop
from runtime.security.access import PLAIN_CHANNEL
from tests.support.cluster.one_process import cluster_in_process
from tests.support.models.checkpoints import make_checkpoint

PROMPT = tuple(range(5, 105))  # six full pages of 16 tokens, and four tokens


async def look(client: AsyncBatonClient) -> dict[str, CacheOnWorker]:
    return {cache.role: cache for cache in await list_caches(client.targets[0], PLAIN_CHANNEL)}


async def test_the_caches_of_all_workers_are_shown(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.float32)
    async with cluster_in_process(
        model, prefill_pp=2, page_size=16, num_pages=40, prefill={"disk_cache": tmp_path / "disk"}
    ) as client:
        await client.flush_caches()  # of what the router asked at its start
        before = await look(client)
        assert {role: cache.pages for role, cache in before.items()} == {"prefill": 0, "decode": 0}
        query = Query(PROMPT, Sampling(temperature=0), Stop(max_tokens=16, ignore_eos=True))
        for _ in range(2):
            await client.complete(query)
        after = await look(client)
        prefill, decode = after["prefill"], after["decode"]
        # The last generated token is in no page, because no token after it was computed.
        assert (prefill.pages, decode.pages) == (6, 7)
        assert (prefill.points, decode.points, prefill.snapshots) == (6, 7, 0)
        assert (prefill.page_tokens, prefill.pages_total) == (16, 39)
        assert prefill.idle_pages == ((60.0, 6), (600.0, 0), (3600.0, 0), (0.0, 0))
        assert prefill.queried_tokens - before["prefill"].queried_tokens == 200
        assert prefill.matched_tokens - before["prefill"].matched_tokens == 96
        assert [(tier.name, tier.max_bytes) for tier in prefill.tiers] == [("disk", 16384 << 20)]
        assert decode.tiers == ()
        await client.flush_caches()
        assert [cache.pages for cache in (await look(client)).values()] == [0, 0]


def test_a_cache_is_shown_in_a_few_lines() -> None:
    cache = CacheOnWorker(
        "prefill", "a:1", 64, 512, 40, 12, 3, ((60.0, 30), (600.0, 0), (3600.0, 8), (0.0, 2)),
        1000, 710, (TierUse("host", 1 << 20, 2 << 20), TierUse("disk", 3 << 20, 64 << 20),
        TierUse("server", 5 << 20, 0)), sessions=2, retained_pages=7,
    )  # fmt: skip
    assert cache_text(cache).splitlines() == [
        "prefill a:1: 40 of 512 pages of 64 tokens are cached; resume points: 12, states: 3",
        "    found 71% of 1000 prompt tokens since its start",
        "    last used: 30 within 1 min, 8 within 1 h, 2 earlier",
        "    sessions: 2, for which 7 pages are kept longer",
        "    in host memory: 1.0 of 2 MiB",
        "    on disk: 3.0 of 64 MiB",
        "    at the cache server: 5.0 MiB, limit not known",
    ]
    assert cache_text(CacheOnWorker("decode", "a:2")) == "decode a:2: no prefix cache"
    assert cache_text(CacheOnWorker("decode", "a:2", error="is away")) == "decode a:2: is away"

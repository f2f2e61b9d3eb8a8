"""Warm responses equal cold ones in every cell of families and drafts, over pools of one to three
stages on each side.

{dense, MoE, hybrid, latent with an indexer} x {no draft, chain, tree, the model's own layer} gives
14 cells (dense and hybrid models of ours bring no such layer along). The numbers of stages go
round, so that each of the nine pairs has some. Each cell asks 26 times: nothing is there of a
prompt, or all, or some, or some of it again after others took pages; several at once, and so many
that some are set back; after a flush of both sides, and of either.
"""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient
from engine.core.request import Request
from protos import worker_pb2, worker_pb2_grpc
from runtime.rpc.client import open_channel
from tests.one_process.test_prefix_cache import (
    AT_ONCE,
    CHUNK,
    OF_PAGES,
    OF_STATES,
    PAGE,
    QUESTIONS,
    ROOT,
    TURNS,
    announced_as,
    answers_of,
    ask,
    counter,
    question,
)
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, shown
from tests.support.drafts.eagle import save_draft
from tests.support.models.checkpoints import add_nextn, make_checkpoint

FAMILIES = {
    "dense": "llama",
    "moe": "glm4_moe",
    "hybrid": "qwen3_5_text",
    "latent": "glm_moe_dsa_short",
}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "chain": {"spec_steps": 3, "spec_draft_tokens": 3},
    "tree": {"spec_topk": 4, "spec_steps": 4, "spec_draft_tokens": 15},
    "own": {"spec_steps": 2, "spec_draft_tokens": 2},
}
KINDS = [
    (family, draft)
    for family in FAMILIES
    for draft in DRAFTS
    if draft != "own" or family in ("moe", "latent")
]
CELLS = [
    (family, draft, 1 + place % 3, 1 + (place // 3 + place) % 3)
    for place, (family, draft) in enumerate(KINDS)
]
# Enough of others to take pages from what the turns left, but not all of them.
FILLERS = [question(f"filler {i}", [*ROOT[7 * i :], *ROOT[: 7 * i]][:200]) for i in range(1, 4)]
EVICTED = question("partly evicted", ROOT[:300])
# Four of them are more than fit a pool at once: they draw for so long that four have come before
# the first one ends.
SET_BACK = [
    replace(
        question(f"set back {i}", [*ROOT[9 * i :], *ROOT[: 9 * i]][:200], is_sampled=bool(i % 2)),
        max_tokens=110,
    )
    for i in range(5)
]
FLUSHED, AFTER = question("flushed", ROOT[:200]), question("after the flush", ROOT[:250])
ASKED = [*QUESTIONS, *FILLERS, EVICTED, FLUSHED, AFTER]


def test_the_cells_have_every_pair_of_stages() -> None:
    assert {(prefill_pp, decode_pp) for _, _, prefill_pp, decode_pp in CELLS} == {
        (prefill_pp, decode_pp) for prefill_pp in (1, 2, 3) for decode_pp in (1, 2, 3)
    }
    assert len(CELLS) * len([*ASKED, *SET_BACK]) >= 200


def make(folder: Path, family: str, draft: str) -> tuple[Path, dict[str, Any]]:
    """Write a checkpoint and return its workers' settings."""
    checkpoint = make_checkpoint(folder, FAMILIES[family])
    if draft == "own":
        checkpoint = path = add_nextn(checkpoint, folder / "with its own")
    elif draft != "none":
        path = save_draft(folder / "draft", layers=(0, 1, 3))
    return checkpoint, {
        "draft": path,
        "spec_adaptive": False,
        **DRAFTS[draft],
    } if draft != "none" else {}


@dataclass(frozen=True)
class Cell:
    """A cluster whose sides are queried and flushed."""

    client: AsyncBatonClient
    announced: Path
    expected: dict[str, Shown]

    async def decode(self, family: str) -> float:
        """Return a counter of the decode pool."""
        return await counter(announced_as(self.announced, "decode-0").metrics_port, family)

    async def ask(self, request: Request) -> tuple[int, int]:
        """Check the output; return the tokens not computed and those not transferred."""
        before = await self.decode("baton_cache_reused_tokens")
        completion = await ask(self.client, request)
        assert shown(completion) == self.expected[request.request_id], request.request_id
        return completion.finish.usage.cached_tokens, int(
            await self.decode("baton_cache_reused_tokens") - before
        )

    async def flush(self, role: str) -> None:
        """Clear the cache of one side, as its restart does."""
        async with open_channel(announced_as(self.announced, f"{role}-0").address) as channel:
            flushed = await worker_pb2_grpc.WorkerStub(channel).FlushCache(
                worker_pb2.FlushCacheRequest()
            )
        assert flushed.pages > 0


@pytest.mark.long
@pytest.mark.parametrize(("family", "draft", "prefill_pp", "decode_pp"), CELLS)
async def test_warm_responses_equal_cold_ones(
    tmp_path: Path, family: str, draft: str, prefill_pp: int, decode_pp: int
) -> None:
    checkpoint, drafting = make(tmp_path, family, draft)
    kind = OF_STATES if family == "hybrid" else OF_PAGES
    async with cluster_in_process(
        checkpoint,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        page_size=PAGE,
        chunk_tokens=CHUNK,
        max_context=320,
        num_pages=72,
        max_running=5,
        announced=tmp_path,
        **drafting,
    ) as client:
        cell = Cell(client, tmp_path, answers_of(checkpoint, [*ASKED, *SET_BACK]))
        for turn, *there in TURNS:
            assert await cell.ask(turn) == (there[kind], there[OF_PAGES]), turn.request_id
        at_once = await asyncio.gather(*(cell.ask(request) for request in AT_ONCE))
        assert any(cached for cached, _ in at_once)
        for filler in FILLERS:
            await cell.ask(filler)
        assert max(await cell.ask(EVICTED)) < 288
        for _ in range(5):  # whether so many are in the pool at once is a matter of time
            await asyncio.gather(*(cell.ask(request) for request in SET_BACK))
            if await cell.decode("baton_preemptions"):
                break
        else:
            pytest.fail("no request was set back for pages")
        await client.flush_caches()
        assert await cell.ask(FLUSHED) == (0, 0)
        await cell.flush("decode")
        assert await cell.ask(FLUSHED) == (192, 0)
        await cell.flush("prefill")
        assert await cell.ask(FLUSHED) == (0, 192)
        assert await cell.ask(AFTER) == (192, 192)

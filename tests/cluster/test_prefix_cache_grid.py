"""Warm answers are cold answers in every cell of families and drafts, over pools of one to three stages on each side.

{dense, MoE, hybrid, latent with an indexer} x {no draft, chain, tree, the model's own layer} gives 14 cells (dense and
hybrid models of ours bring no such layer along). The numbers of stages go round, so that each of the nine pairs has
some. Each cell asks 18 times: nothing is there of a prompt, or all, or some, or some of it again after others took
pages; several at once; after a flush.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.core.request import Request
from tests.cluster.test_prefix_cache import AT_ONCE, CHUNK, PAGE, QUESTIONS, ROOT, TURNS, answers_of, ask, question
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import shown
from tests.support.drafts.eagle import save_draft
from tests.support.models.checkpoints import add_nextn, make_checkpoint

FAMILIES = {"dense": "llama", "moe": "glm4_moe", "hybrid": "qwen3_5_text", "latent": "glm_moe_dsa_pattern"}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {}, "chain": {"spec_steps": 3, "spec_draft_tokens": 3},
    "tree": {"spec_topk": 4, "spec_steps": 4, "spec_draft_tokens": 15},
    "own": {"spec_steps": 2, "spec_draft_tokens": 2}}
KINDS = [(family, draft) for family in FAMILIES for draft in DRAFTS
         if draft != "own" or family in ("moe", "latent")]
CELLS = [(family, draft, 1 + place % 3, 1 + (place // 3 + place) % 3) for place, (family, draft) in enumerate(KINDS)]
# Enough of others to take pages from what the turns left, but not all of them.
FILLERS = [question(f"filler {i}", [*ROOT[7 * i:], *ROOT[:7 * i]][:200]) for i in range(1, 4)]
EVICTED = question("partly evicted", ROOT[:300])
FLUSHED, AFTER = question("flushed", ROOT[:200]), question("after the flush", ROOT[:250])
ALL = [*QUESTIONS, *FILLERS, EVICTED, FLUSHED, AFTER]


def test_the_cells_have_every_pair_of_stages() -> None:
    assert {(prefill_pp, decode_pp) for _, _, prefill_pp, decode_pp in CELLS} == {
        (prefill_pp, decode_pp) for prefill_pp in (1, 2, 3) for decode_pp in (1, 2, 3)}
    assert len(CELLS) * len(ALL) >= 200


def make(folder: Path, family: str, draft: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint and its workers' settings."""
    checkpoint = make_checkpoint(folder, FAMILIES[family])
    if draft == "own":
        checkpoint = path = add_nextn(checkpoint, folder / "with its own")
    elif draft != "none":
        path = save_draft(folder / "draft", layers=(0, 1, 3))
    return checkpoint, {"draft": path, "spec_adaptive": False, **DRAFTS[draft]} if draft != "none" else {}


@pytest.mark.long
@pytest.mark.parametrize(("family", "draft", "prefill_pp", "decode_pp"), CELLS)
async def test_warm_answers_are_cold_answers(tmp_path: Path, family: str, draft: str, prefill_pp: int,
                                             decode_pp: int) -> None:
    checkpoint, drafting = make(tmp_path, family, draft)
    expected = answers_of(checkpoint, ALL)
    has_states = family == "hybrid"
    async with cluster_in_process(checkpoint, prefill_pp=prefill_pp, decode_pp=decode_pp, page_size=PAGE,
                                  chunk_tokens=CHUNK, max_context=320, num_pages=72, max_running=5,
                                  **drafting) as client:

        async def check(request: Request) -> int:
            completion = await ask(client, request)
            assert shown(completion) == expected[request.request_id], request.request_id
            return completion.finish.usage.cached_tokens

        assert [await check(turn) for turn, *_ in TURNS] == [there[has_states] for _, *there in TURNS]
        at_once = await asyncio.gather(*(check(request) for request in AT_ONCE))
        assert any(at_once)
        for filler in FILLERS:
            await check(filler)
        assert await check(EVICTED) < 288
        await client.flush_caches()
        assert await check(FLUSHED) == 0
        assert await check(AFTER) == 192

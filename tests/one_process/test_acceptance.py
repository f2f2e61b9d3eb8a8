"""The shipped draft is worth its passes: held-out prompts, greedy, through a whole cluster.

`python -m bench.acceptance` does it with 50 and over more than one process."""

import pytest

from baton.cluster_config import demo_model
from bench.acceptance import BARS, SHAPES, ask_all, held_out_queries
from decode import worker
from decode.speculation import VerifiedStep
from tests.support.cluster.one_process import cluster_in_process


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.long
async def test_the_demo_draft_reaches_its_bar(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[VerifiedStep] = []
    monkeypatch.setattr(worker, "observe_verified", lambda metrics, step: seen.append(step))
    topk, steps, tokens = SHAPES[name]
    drafting = {"draft": demo_model().parent / "draft", "spec_topk": topk, "spec_steps": steps,
                "spec_draft_tokens": tokens, "spec_adaptive": False}
    async with cluster_in_process(demo_model(), decode_pp=2, prefill=drafting, decode=drafting) as client:
        await ask_all(client, held_out_queries(12))
    lengths = [1 + count for step in seen for count in step.accepted]
    assert len(lengths) > 60
    assert sum(lengths) / len(lengths) >= BARS[name]

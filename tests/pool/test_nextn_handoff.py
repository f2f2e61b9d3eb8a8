"""What a NextN draft hands over with a prompt: the first tree that decode verifies is that of the formulas.

Real roles, real gRPC, real UCX, in one process. The oracle sees every slot of the prompt; the draft on the decode side
has only what arrived: latents, index keys, and where the draft stood behind the prompt.
"""

from pathlib import Path

import pytest

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import TokenTree
from engine.core.request import Request, SamplingParams
from engine.speculative.eagle import EagleDrafter
from models.loader import read_model
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query
from tests.support.drafts.drafters import Shape
from tests.support.drafts.nextn import NextNOracle
from tests.support.models.checkpoints import add_nextn, make_checkpoint
from tests.support.models.single_stage import StageDriver
from tests.support.pool.local_pool import local_pool

ASKED = Request("r", tuple(range(40, 110)), 6, SamplingParams(temperature=0.0))  # longer than a page


@pytest.mark.parametrize(("family", "shape"), [("glm_moe_dsa", Shape(1, 4, 4)), ("deepseek_v32", Shape(3, 3, 8))],
                         ids=["chain", "tree"])
async def test_the_first_tree_after_a_handoff_is_the_formulas(tmp_path: Path, family: str, shape: Shape,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = add_nextn(make_checkpoint(tmp_path, family), tmp_path / "model")
    begun: list[TokenTree] = []
    begin = EagleDrafter.begin

    def noting(self: EagleDrafter, batch: ForwardBatch) -> list[TokenTree]:
        begun.extend(trees := begin(self, batch))
        return trees

    monkeypatch.setattr(EagleDrafter, "begin", noting)
    async with cluster_in_process(checkpoint, prefill_pp=2, decode_pp=2, draft=checkpoint, spec_topk=shape.width,
                                  spec_steps=shape.depth, spec_draft_tokens=shape.nodes, spec_adaptive=False) as client:
        answer = (await client.complete(as_query(ASKED), timeout_s=60)).token_ids
    description, prompt = read_model(checkpoint), list(ASKED.prompt_token_ids)
    with local_pool(description, page_size=64, num_pages=8) as pool:
        assert [token.token_id for token in pool.generate([ASKED])[0].tokens] == list(answer)
    oracle = NextNOracle.of(checkpoint)
    model = StageDriver(description, capture_layers=frozenset(oracle.layers))
    found = model.run(model.batch(ForwardMode.PREFILL, {0: prompt}, draw=True)).aux_hidden[oracle.layers[0]]
    assert begun[-1] == oracle.tree(list(found), [*prompt[1:], answer[0]], 0, shape)

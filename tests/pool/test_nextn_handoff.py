"""State of a NextN draft handed over with a prompt: the first tree that decode verifies is that of
the formulas.

Real roles, real gRPC, real UCX, in one process. The oracle sees every slot of the prompt; the draft
on the decode side has only what arrived: latents, index keys, and the draft's position after the
prompt.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import SpecRow, TokenTree
from engine.core.request import Request, SampledToken, SamplingParams
from engine.core.rows import Row, build_batch
from engine.memory.layout import CacheKind, bytes_per_page, bytes_per_slot, travelling
from engine.speculative.attention.multistep_latent import MultiStepLatentAttention
from engine.speculative.contracts.drafter import Drafter
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from engine.speculative.drafters.layerwise import LayerwiseDrafter
from models.loader import read_model
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from tests.decode.test_layerwise import layerwise
from tests.decode.test_nextn import nextn
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query
from tests.support.drafts.drafters import Shape
from tests.support.drafts.nextn import NextNOracle
from tests.support.models.checkpoints import add_nextn, make_checkpoint
from tests.support.models.single_stage import StageDriver
from tests.support.pool.local_pool import local_pool
from transfer.agent.stage_transfer import Receiver

ASKED = Request(
    "r", tuple(range(40, 110)), 6, SamplingParams(temperature=0.0)
)  # longer than a page


@pytest.mark.parametrize(
    ("family", "shape"),
    [("glm_moe_dsa", Shape(1, 4, 4)), ("deepseek_v32", Shape(3, 3, 8))],
    ids=["chain", "tree"],
)
async def test_the_first_tree_after_a_handoff_is_the_formulas(
    tmp_path: Path, family: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = add_nextn(make_checkpoint(tmp_path, family), tmp_path / "model")
    begun: list[TokenTree] = []
    begin = EagleDrafter.begin

    def noting(self: EagleDrafter, batch: ForwardBatch) -> list[TokenTree]:
        begun.extend(trees := begin(self, batch))
        return trees

    monkeypatch.setattr(EagleDrafter, "begin", noting)
    async with cluster_in_process(
        checkpoint,
        prefill_pp=2,
        decode_pp=2,
        draft=checkpoint,
        spec_topk=shape.width,
        spec_steps=shape.depth,
        spec_draft_tokens=shape.nodes,
        spec_adaptive=False,
    ) as client:
        answer = (await client.complete(as_query(ASKED), timeout_s=60)).token_ids
    description, prompt = read_model(checkpoint), list(ASKED.prompt_token_ids)
    with local_pool(description, page_size=64, num_pages=8) as pool:
        assert [token.token_id for token in pool.generate([ASKED])[0].tokens] == list(answer)
    oracle = NextNOracle.of(checkpoint)
    model = StageDriver(description, capture_layers=frozenset(oracle.layers))
    found = model.run(model.batch(ForwardMode.PREFILL, {0: prompt}, samples=True)).aux_hidden[
        oracle.layers[0]
    ]
    assert begun[-1] == oracle.tree(list(found), [*prompt[1:], answer[0]], 0, shape)


@pytest.mark.parametrize(
    ("shares", "width", "num_choices"), [(True, 1, 0), (False, 1, 3)], ids=["shared", "anew"]
)
async def test_s2_7_the_choice_of_keys_crosses_with_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shares: bool, width: int, num_choices: int
) -> None:
    """Chains of a model that shares choices begin with the one of the prompt's last slot: their
    first round after the handoff chooses no keys, and is the round that would have followed on the
    prompt's side."""
    checkpoint = add_nextn(
        make_checkpoint(tmp_path, "glm_moe_dsa"),
        tmp_path / "model",
        index_share_for_mtp_iteration=shares,
    )
    shape, begun, choices, received = Shape(width, 4, 4 * width), [], [0], [0]
    begin, select, finished = EagleDrafter.begin, MultiStepLatentAttention.select, Receiver.complete

    def noting(self: EagleDrafter, batch: ForwardBatch) -> list[TokenTree]:
        before = choices[0]
        trees = begin(self, batch)
        begun.append((trees, choices[0] - before))
        return trees

    def counting(
        self: MultiStepLatentAttention,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        choices[0] += 1
        return select(self, layer_id, q, k, weights, batch)

    def weighing(self: Receiver) -> None:
        received[0] += self.num_bytes
        finished(self)

    monkeypatch.setattr(EagleDrafter, "begin", noting)
    monkeypatch.setattr(MultiStepLatentAttention, "select", counting)
    monkeypatch.setattr(Receiver, "complete", weighing)
    flags: dict[str, object] = {
        "draft": checkpoint,
        "spec_topk": width,
        "spec_steps": shape.depth,
        "spec_draft_tokens": shape.nodes,
        "spec_adaptive": False,
    }
    async with cluster_in_process(
        checkpoint, prefill_pp=2, decode_pp=2, prefill=flags, decode=flags
    ) as client:
        received[0] = 0
        answer = (await client.complete(as_query(ASKED), timeout_s=60)).token_ids
    drafter = nextn(checkpoint, shape, num_pages=8)
    assert begun[-1] == ([next_tree(drafter, checkpoint, answer[0], shape.nodes)], num_choices)
    plan = plan_stage(WorkerConfig.model_validate({"model": checkpoint, **flags}))
    specs = travelling(plan.geometry.specs)
    num_pages = -(-len(ASKED.prompt_token_ids) // plan.geometry.page_size)
    assert received[0] == num_pages * bytes_per_page(specs) + bytes_per_slot(specs)
    keys = [
        (spec.record_shape, spec.record_bytes)
        for spec in specs
        if spec.kind is CacheKind.DRAFT_KEYS
    ]
    assert keys == ([((8,), 32)] if num_choices == 0 else []), "index_topk int32 positions"


async def test_s1_the_chain_of_several_layers_crosses_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a handoff it is there without a forward of the draft."""
    checkpoint = add_nextn(
        make_checkpoint(tmp_path, "deepseek_v32"), tmp_path / "model", num_nextn_predict_layers=2
    )
    begun: list[TokenTree] = []
    begin = LayerwiseDrafter.begin

    def noting(self: LayerwiseDrafter, batch: ForwardBatch) -> list[TokenTree]:
        begun.extend(trees := begin(self, batch))
        return trees

    monkeypatch.setattr(LayerwiseDrafter, "begin", noting)
    async with cluster_in_process(
        checkpoint, prefill_pp=2, decode_pp=3, draft=checkpoint, spec_adaptive=False
    ) as client:
        answer = (await client.complete(as_query(ASKED), timeout_s=60)).token_ids
    with local_pool(read_model(checkpoint), page_size=64, num_pages=8) as pool:
        assert [token.token_id for token in pool.generate([ASKED])[0].tokens] == list(answer)
    assert begun[-1] == next_tree(layerwise(checkpoint, num_pages=8), checkpoint, answer[0], 2)


def next_tree(drafter: Drafter, checkpoint: Path, first_token: int, num_nodes: int) -> TokenTree:
    """Return the proposal of a draft that has followed the whole prompt itself."""
    prompt, description = list(ASKED.prompt_token_ids), read_model(checkpoint)
    model = StageDriver(description, capture_layers=frozenset({description.facts.num_layers - 1}))
    features = model.run(model.batch(ForwardMode.PREFILL, {0: prompt}, samples=True)).aux_hidden
    batch = build_batch(
        ForwardMode.PREFILL,
        [
            Row(
                0,
                prompt,
                0,
                [3, 1, 5, 2, 6],
                0,
                SamplingRow(SamplingParams(), 0),
                SpecRow(num_draft_tokens=num_nodes),
            )
        ],
    )
    with torch.inference_mode():
        return drafter.propose(
            batch,
            StageOutput(aux_hidden=features),
            [AcceptedRun(0, [0], [SampledToken(first_token)])],
        )[0]

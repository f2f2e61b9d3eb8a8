"""State of a draft handed over with a prompt: the first decode step verifies a tree, and pools with
and without drafts pair.

Real roles, real gRPC, real UCX, in one process.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.client import AsyncBatonClient
from bench.storm.leaks import settled
from decode import worker
from decode.speculation import VerifiedStep
from engine.core.request import Request, SamplingParams
from engine.memory.layout import CacheKind
from models.drafts.loader import DraftDescription
from models.loader import read_model
from models.weights_digest import PoolWeights
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from runtime.digests import Compatibility, check_compatible
from runtime.errors import IncompatiblePeerError
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query
from tests.support.drafts.drafters import KnowingModel
from tests.support.drafts.eagle import save_draft
from tests.support.models.checkpoints import make_checkpoint
from tests.support.pool.local_pool import local_pool

CHAIN = {"spec_topk": 1, "spec_steps": 3, "spec_draft_tokens": 3}
TREE = {"spec_topk": 3, "spec_steps": 4, "spec_draft_tokens": 12}
ASKED = Request(
    "r", tuple(range(40, 110)), 12, SamplingParams(temperature=0.7, seed=5), num_top_logprobs=0
)


@pytest.fixture(scope="module", params=["qwen3_5_text", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with recurrent state, and one that needs slots for the draft's state
    only."""
    return make_checkpoint(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("drafts") / "eagle3", layers=(0, 1, 3))


@pytest.fixture(scope="module")
def answer(checkpoint: Path) -> list[int]:
    """Return the output of one process without a draft."""
    torch.set_num_threads(1)
    with local_pool(read_model(checkpoint), page_size=64, num_pages=8) as pool:
        return [token.token_id for token in pool.generate([ASKED])[0].tokens]


@pytest.fixture
def seen(answer: list[int], monkeypatch: pytest.MonkeyPatch) -> list[VerifiedStep]:
    """Record every verification of the decode pool, whose draft is always right."""
    steps: list[VerifiedStep] = []
    load, truth = DraftDescription.load_layers, [*ASKED.prompt_token_ids, *answer]
    monkeypatch.setattr(
        DraftDescription,
        "load_layers",
        lambda self, **where: [KnowingModel(layer, truth) for layer in load(self, **where)],
    )
    monkeypatch.setattr(worker, "observe_verified", lambda metrics, step: steps.append(step))
    return steps


async def ask(client: AsyncBatonClient, seen: list[VerifiedStep]) -> list[int]:
    """Send a request when the cluster is idle, after its warm-up, so that `seen` has its steps
    alone."""
    await client.complete(as_query(replace(ASKED, max_tokens=6)), timeout_s=60)
    await settled([client], 60)
    seen.clear()
    return list((await client.complete(as_query(ASKED), timeout_s=60)).token_ids)


@pytest.mark.parametrize(
    ("prefill_pp", "decode_pp", "data_ranks", "shape"),
    [(2, 1, 1, CHAIN), (1, 2, 2, TREE)],
    ids=["chain", "tree on data ranks"],
)
async def test_the_first_decode_step_verifies_a_tree(
    checkpoint: Path,
    draft: Path,
    answer: list[int],
    seen: list[VerifiedStep],
    prefill_pp: int,
    decode_pp: int,
    data_ranks: int,
    shape: dict[str, int],
) -> None:
    drafting = {
        **shape,
        "draft": draft,
        "spec_adaptive": False,
        "spec_suffix": False,
        "dp_attention": data_ranks,
    }
    async with cluster_in_process(
        checkpoint,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        prefill_tp=data_ranks,
        decode_tp=data_ranks,
        prefill=drafting,
        decode=drafting,
    ) as client:
        assert await ask(client, seen) == answer
    assert seen[0].num_drafted == shape["spec_draft_tokens"]
    assert seen[0].accepted == (shape["spec_steps"],)
    assert sum(step.num_tokens for step in seen) == len(answer) - 1


@pytest.mark.parametrize(
    ("prefill", "decode"), [({}, CHAIN), (CHAIN, {})], ids=["decode drafts", "prefill drafts"]
)
async def test_only_one_side_has_a_draft(
    checkpoint: Path,
    draft: Path,
    answer: list[int],
    seen: list[VerifiedStep],
    prefill: dict[str, object],
    decode: dict[str, object],
) -> None:
    """Lower acceptance at the beginning, or none at all, and the same output."""
    with_draft = {"draft": draft, "spec_adaptive": False, "spec_suffix": False}
    async with cluster_in_process(
        checkpoint,
        prefill={**prefill, **with_draft} if prefill else {},
        decode={**decode, **with_draft} if decode else {},
    ) as client:
        assert await ask(client, seen) == answer
    if decode:
        assert (seen[0].num_drafted, seen[1].accepted) == (0, (3,))
    else:
        assert seen == []


def compatibility_of(checkpoint: Path, draft: Path | None, **shape: int) -> Compatibility:
    return plan_stage(
        WorkerConfig.model_validate({"model": checkpoint, "draft": draft, **shape})
    ).compatibility(PoolWeights("0" * 32))


def test_widths_that_differ_are_refused_naming_both(checkpoint: Path, draft: Path) -> None:
    chain, tree = (
        compatibility_of(checkpoint, draft, **CHAIN),
        compatibility_of(checkpoint, draft, **TREE),
    )
    with pytest.raises(IncompatiblePeerError) as refused:
        check_compatible(chain, tree.digest, tree.text)
    assert "topk_index (1,) int64 + topk_p (1,) float32" in chain.text
    assert "draft_hidden (72,)" in chain.text
    for side in (chain.text, tree.text):
        assert side in str(refused.value)
    plain = compatibility_of(checkpoint, None)
    for drafting in (chain, tree):
        check_compatible(drafting, plain.digest, plain.text)
        check_compatible(plain, drafting.digest, drafting.text)


def test_the_hidden_row_is_of_draft_width_and_the_first_level_of_the_trees(
    checkpoint: Path, draft: Path
) -> None:
    plan = plan_stage(WorkerConfig.model_validate({"model": checkpoint, "draft": draft, **TREE}))
    own = [
        replace(spec, layer_id=0)
        for spec in plan.geometry.specs
        if spec.of_draft and not spec.kind.is_paged
    ]
    assert plan.geometry.num_slots > 1
    assert [(spec.kind, spec.record_shape) for spec in own] == [
        (CacheKind.TOPK_P, (3,)),
        (CacheKind.TOPK_INDEX, (3,)),
        (CacheKind.DRAFT_HIDDEN, (72,)),
    ]

"""Selected keys on their way between layers and stages (GLM-5), and what an indexer must get
right."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, SpecRow
from engine.core.layer_range import LayerRange, get_pp_indices
from engine.core.numerics import Numerics
from engine.core.rows import build_batch
from engine.memory.layout import CacheKind
from models.loader import ModelDescription, random_model, read_model
from runtime.errors import ConfigError, InternalError
from testing.batches import unmarked
from tests.models.conftest import CheckpointMaker
from tests.support.drafts.drafters import CHAINS, OracleDrafter
from tests.support.models.single_stage import StageDriver
from tests.support.models.tiny_models import GLM_DSA, HIDDEN_SIZE, VOCAB_SIZE, tiny
from tests.support.pool.local_pool import Speculation, build_executor

PROMPT = torch.randint(3, 240, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture
def model(checkpoint: CheckpointMaker) -> ModelDescription:
    """Return a model whose layers 0, 3 and 5 compute and 1, 2 and 4 share."""
    return read_model(checkpoint("glm_moe_dsa_pattern"))


@pytest.mark.parametrize(
    "sharing",
    [
        {"index_topk_freq": 1},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {"index_topk_freq": 4, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSSFSS"},
        {"index_topk_pattern": "FSFFSF"},
        {"indexer_types": ["full", "shared", "full", "full", "shared", "shared"]},
    ],
)
def test_a_layer_hands_shared_keys_to_the_next_one_s2_2(
    sharing: dict[str, object], checkpoint: CheckpointMaker
) -> None:
    """This holds for every form of the config; the last layer hands nothing on."""
    config = json.loads((checkpoint("glm_moe_dsa") / "config.json").read_text())
    for name in (
        "indexer_types",
        "index_topk_freq",
        "index_skip_topk_offset",
        "index_topk_pattern",
    ):
        config.pop(name, None)
    model = random_model(config | sharing)
    driver = StageDriver(model, cuts=range(1, 6))
    batch = driver.batch(ForwardMode.PREFILL, {0: PROMPT[:20]}, samples=True)
    output, hands_on = StageOutput(), []
    for index, (stage, context) in enumerate(zip(driver.stages, driver.contexts, strict=True)):
        local = unmarked(batch)
        if index:
            local.token_ids = None
        driver.plan(index, local)
        output = stage.forward(local, output.hidden, context, selected_keys=output.selected_keys)
        hands_on.append(output.selected_keys is not None)
    shares = [
        layer_id
        not in {spec.layer_id for spec in model.cache_specs(16) if spec.kind is CacheKind.INDEX_KEY}
        for layer_id in range(6)
    ]
    assert hands_on == [*shares[1:], False]


def run_first_stage(
    driver: StageDriver, batch: ForwardBatch
) -> tuple[Tensor | None, Tensor | None]:
    driver.plan(0, batch)
    output = driver.stages[0].forward(batch, None, driver.contexts[0])
    return output.hidden, output.selected_keys


@pytest.mark.parametrize(
    ("cut", "is_carried"), [(1, True), (2, True), (3, False), (4, True), (5, False)]
)
def test_a_boundary_carries_keys_only_before_a_sharing_layer_s2_5(
    cut: int, *, is_carried: bool, model: ModelDescription
) -> None:
    driver = StageDriver(model, cuts=(cut,))
    _, selected = run_first_stage(
        driver, driver.batch(ForwardMode.PREFILL, {0: PROMPT}, samples=True)
    )
    if not is_carried:
        assert selected is None
        return
    assert selected is not None
    assert (selected.dtype, selected.shape) == (torch.int32, (40, 8))
    for position, keys in enumerate(selected.tolist()):
        chosen = [key for key in keys if key >= 0]
        assert len(chosen) == min(8, position + 1)
        assert chosen == sorted(set(chosen))
        assert chosen[-1] <= position


def test_keys_cross_stages_that_only_share_s2_6(model: ModelDescription) -> None:
    """Layer 2 shares what layer 0 chose two stages before; prefill in chunks, decode, and rows of a
    batch."""
    whole, cut = StageDriver(model), StageDriver(model, cuts=(1, 2, 3))
    for driver in (whole, cut):
        driver.prefill({0: PROMPT[:17]}, samples=False)
    assert torch.equal(
        cut.prefill({0: PROMPT[17:], 1: PROMPT[:5]}), whole.prefill({0: PROMPT[17:], 1: PROMPT[:5]})
    )
    assert torch.equal(cut.decode({1: 9, 0: 11}), whole.decode({1: 9, 0: 11}))


@pytest.mark.parametrize("cuts", [(), (1,), (2, 4), (1, 2, 3)])
def test_selections_of_a_tree_cross_stages_s2_6(
    cuts: tuple[int, ...], model: ModelDescription
) -> None:
    """Verification: every node has the bits of decoding its own path in one process."""
    tokens, parents, depths = [9, 11, 13, 17], (-1, 0, 0, 2), [0, 1, 1, 2]
    tree = StageDriver(model, cuts=cuts)
    tree.prefill({0: PROMPT[:30]}, samples=False)
    batch = tree.batch(ForwardMode.VERIFY, {0: tokens}, samples=True)
    batch.positions = torch.tensor([30 + depth for depth in depths])
    batch.spec_info = SpecInfo(torch.tensor(tokens), (SpecRow(parents),))
    logits = run_tree(tree, batch)
    for path in ([0, 1], [0, 2, 3]):
        plain = StageDriver(model)
        plain.prefill({0: PROMPT[:30]}, samples=False)
        for node in path:
            assert torch.equal(plain.decode({0: tokens[node]})[0], logits[node]), f"node {node}"


def run_tree(driver: StageDriver, batch: ForwardBatch) -> Tensor:
    """Run like `StageDriver.run`, with the tree on every stage; return logits [nodes, vocab]."""
    output = StageOutput()
    for index, (stage, context) in enumerate(zip(driver.stages, driver.contexts, strict=True)):
        local = replace(batch, token_ids=batch.token_ids if index == 0 else None)
        driver.plan(index, local)
        output = stage.forward(local, output.hidden, context, selected_keys=output.selected_keys)
    assert output.logits is not None
    return output.logits


def test_a_sharing_stage_without_keys_fails_and_never_falls_back_s2_5(
    model: ModelDescription,
) -> None:
    driver = StageDriver(model, cuts=(4,))
    batch = driver.batch(ForwardMode.PREFILL, {0: PROMPT}, samples=True)
    hidden, selected = run_first_stage(driver, batch)
    assert selected is not None
    context = driver.contexts[1]
    for keys in (None, selected[:-1]):
        with pytest.raises(
            InternalError,
            match=r"stage 4-6 needs the keys selected for 40 tokens: its layer 4 shares",
        ):
            driver.stages[1].forward(batch, hidden, context, selected_keys=keys)


@pytest.mark.parametrize(
    ("sharing", "is_refused"),
    [
        ({"index_topk_freq": 1}, False),
        ({"index_topk_freq": 2}, True),
        ({"index_topk_pattern": "FFFFFF"}, False),
        ({"index_topk_pattern": "FFFFSF"}, True),
        ({"indexer_types": ["full", "full", "full", "full", "shared", "full"]}, True),
    ],
)
def test_half_a_batch_with_the_keys_of_the_whole_is_refused_s2_8(
    sharing: dict[str, object], *, is_refused: bool, checkpoint: CheckpointMaker
) -> None:
    """A batch cut in two between stages: where the next layer shares, each half must bring its own
    tokens' keys."""
    config = json.loads((checkpoint("glm_moe_dsa") / "config.json").read_text())
    for name in (
        "indexer_types",
        "index_topk_freq",
        "index_skip_topk_offset",
        "index_topk_pattern",
    ):
        config.pop(name, None)
    driver = StageDriver(random_model(config | sharing), cuts=(4,))
    batch = driver.batch(ForwardMode.PREFILL, {0: PROMPT[:20], 1: PROMPT[20:]}, samples=True)
    hidden, selected = run_first_stage(driver, batch)
    assert hidden is not None
    assert (selected is not None) == is_refused
    expected, found = run_last_stage(driver, unmarked(batch), hidden, selected), []
    for half, tokens in zip(batch.split(1), (slice(20), slice(20, 40)), strict=True):
        if selected is not None:
            for keys in (None, selected):
                with pytest.raises(InternalError, match="needs the keys selected for 20 tokens"):
                    run_last_stage(driver, unmarked(half), hidden[tokens], keys)
        own = None if selected is None else selected[tokens]
        found.append(run_last_stage(driver, half, hidden[tokens], own))
    assert torch.equal(torch.cat(found), expected)


def run_last_stage(
    driver: StageDriver, batch: ForwardBatch, hidden: Tensor, selected: Tensor | None
) -> Tensor:
    batch.token_ids = None
    driver.plan(1, batch)
    logits = (
        driver.stages[1].forward(batch, hidden, driver.contexts[1], selected_keys=selected).logits
    )
    assert logits is not None
    return logits


def test_a_batch_without_tokens_needs_no_keys_s2_5(model: ModelDescription) -> None:
    driver = StageDriver(model, cuts=(1, 2, 4))
    logits = driver.run(driver.batch(ForwardMode.IDLE, {}, samples=False)).logits
    assert logits is not None
    assert logits.shape == (0, VOCAB_SIZE)


def test_an_idle_batch_passes_tree_verification_s2_5() -> None:
    speculation = Speculation(
        lambda num_pages: OracleDrafter(CHAINS["chain 1"]), num_draft_tokens=1
    )
    for rank in range(3):
        stage, _ = build_executor(
            tiny(GLM_DSA),
            get_pp_indices(5, rank, 3),
            page_size=16,
            num_pages=4,
            num_slots=0,
            speculation=speculation,
        )
        batch = build_batch(ForwardMode.IDLE, [])
        batch.spec_info = SpecInfo(torch.empty(0, dtype=torch.int64), ())
        assert stage.run(batch) == StageOutput()  # the next stage has an idle batch of its own
        assert stage.num_forwards["idle"] == 1
        assert stage.num_plans == 0


def test_sharing_layers_have_no_indexer_weights(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("glm_moe_dsa_pattern"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    assert {int(name.split(".")[2]) for name in tensors if ".indexer." in name} == {0, 3, 5}
    stray = "model.layers.1.self_attn.indexer.wk.weight"
    save_file(tensors | {stray: torch.zeros(16, HIDDEN_SIZE)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unexpected: layers\.1\.self_attn\.indexer\.wk"):
        read_model(folder).load_stage(LayerRange(1, 2), numerics=Numerics.EXACT)


def test_choosing_every_key_equals_attending_to_all(checkpoint: CheckpointMaker) -> None:
    """With index_topk no smaller than the context, DSA is dense MLA, to the bit."""
    config = json.loads((checkpoint("deepseek_v32") / "config.json").read_text()) | {
        "index_topk": 64
    }
    dense = config | {"architectures": ["DeepseekV3ForCausalLM"]}
    assert torch.equal(
        StageDriver(random_model(config)).prefill({0: PROMPT}),
        StageDriver(random_model(dense)).prefill({0: PROMPT}),
    )
    narrow = StageDriver(random_model(config | {"index_topk": 8})).prefill({0: PROMPT})
    assert not torch.equal(narrow, StageDriver(random_model(dense)).prefill({0: PROMPT}))


def test_ties_are_broken_equally_in_prefill_and_decode(checkpoint: CheckpointMaker) -> None:
    """Two indexer heads leave many scores at exactly 0, so the tie rule decides most choices."""
    config = json.loads((checkpoint("deepseek_v32") / "config.json").read_text())
    model = random_model(config | {"index_n_heads": 2})
    whole, stepwise = StageDriver(model), StageDriver(model)
    stepwise.prefill({0: PROMPT[:1]}, samples=False)
    for token in PROMPT[1:]:
        last = stepwise.decode({0: token})
    assert torch.equal(last, whole.prefill({0: PROMPT}))

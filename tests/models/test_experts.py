"""Experts: both file layouts, routing by hand, refusals, and layers that belong to drafts."""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from models.blocks.moe import InputRouting, MoeSpec, SigmoidRouting, SoftmaxRouting
from models.blocks.random_weights import RandomWeights
from models.blocks.weights import Weights
from models.loader import random_model, read_model
from runtime.errors import ConfigError
from tests.models.conftest import CheckpointMaker
from tests.support.models.single_stage import StageDriver

MOE_FAMILIES = ["qwen2_moe", "qwen3_moe", "glm4_moe", "qwen3_5_moe"]


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the fused layout of the same weights: [E, 2 * width, H] gate over up, and [E, H,
    width] down."""
    num_experts = 1 + max(
        int(name.split("experts.")[1].split(".")[0]) for name in tensors if ".experts." in name
    )
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {
        name.split("experts.")[0] + "experts." for name in tensors if ".experts." in name
    }:

        def one(index: int, part: str, prefix: str = prefix) -> Tensor:
            return tensors[f"{prefix}{index}.{part}_proj.weight"]

        stacked[f"{prefix}gate_up_proj"] = torch.stack(
            [torch.cat([one(index, "gate"), one(index, "up")]) for index in range(num_experts)]
        )
        stacked[f"{prefix}down_proj"] = torch.stack(
            [one(index, "down") for index in range(num_experts)]
        )
    return stacked


@pytest.fixture
def copy(checkpoint: CheckpointMaker, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(checkpoint(request.param), tmp_path / "model"))


@pytest.mark.parametrize("copy", MOE_FAMILIES, indirect=True)
def test_fused_experts_load_like_single_ones_s4_5(copy: Path) -> None:
    single = StageDriver(read_model(copy)).prefill({0: list(range(3, 40))})
    file = copy / "model.safetensors"
    save_file(stack_experts(load_file(file)), file)
    model = read_model(copy)
    assert torch.equal(StageDriver(model).prefill({0: list(range(3, 40))}), single)
    for a, b in pairwise(range(5)):
        model.load_stage(LayerRange(a, b), numerics=Numerics.EXACT)


@pytest.mark.parametrize("copy", ["qwen3_moe"], indirect=True)
def test_a_stack_of_another_number_of_experts_is_named(copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = stack_experts(load_file(file))
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(7, 72, 40)
    save_file(tensors, file)
    with pytest.raises(
        ConfigError, match=r"down_proj is \[7, 72, 40\], the config says \[5, 72, 40\]"
    ):
        read_model(copy).load_stage(LayerRange(0, 4), numerics=Numerics.EXACT)


@pytest.mark.parametrize("copy", ["qwen3_moe"], indirect=True)
def test_a_missing_expert_fails_its_own_stage_only_s0_9_s4_5(copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.3.mlp.experts.4.up_proj.weight"]
    save_file(tensors, file)
    model = read_model(copy)
    model.load_stage(LayerRange(0, 3), numerics=Numerics.EXACT)
    with pytest.raises(ConfigError, match=r"missing: layers\.3\.mlp\.experts\.4\.up_proj\.weight"):
        model.load_stage(LayerRange(3, 4), numerics=Numerics.EXACT)


@pytest.mark.parametrize("copy", ["glm4_moe"], indirect=True)
@pytest.mark.parametrize("num_declared", [0, 1])
def test_layers_of_drafts_are_left_alone_when_declared_s4_5(copy: Path, num_declared: int) -> None:
    file = copy / "model.safetensors"
    expected = StageDriver(read_model(copy)).prefill({0: [5, 6, 7]})
    save_file(load_file(file) | {"model.layers.4.eh_proj.weight": torch.zeros(72, 144)}, file)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(config | {"num_nextn_predict_layers": num_declared})
    )
    if num_declared:
        assert torch.equal(StageDriver(read_model(copy)).prefill({0: [5, 6, 7]}), expected)
        return
    with pytest.raises(ConfigError, match=r"unexpected: layers\.4\.eh_proj"):
        StageDriver(read_model(copy))


def test_softmax_routing_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    weights, ids = SoftmaxRouting(renormalize=False).choose(logits, num_chosen=2)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.3]]))
    weights, _ = SoftmaxRouting(renormalize=True).choose(logits, num_chosen=2)
    torch.testing.assert_close(weights, torch.tensor([[4 / 7, 3 / 7]]))


def test_sigmoid_routing_by_hand() -> None:
    """Group 0 holds the best expert, group 1 the best pair: groups count by pairs, and the bias
    only chooses."""
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.2])
    routing = SigmoidRouting(renormalize=True, scale=2.0, num_groups=2, kept_groups=1)
    weights, ids = routing.choose(torch.logit(scores), bias, num_chosen=2)
    assert ids.tolist() == [[3, 2]]
    torch.testing.assert_close(weights, torch.tensor([[2 * 0.5 / 1.1, 2 * 0.6 / 1.1]]))


def test_input_routing_by_hand() -> None:
    """Two experts of one inner value and weights a, b, c: each makes c silu(a x) b x of x times its
    score."""
    spec = MoeSpec(
        hidden_size=1, num_experts=3, num_chosen=2, expert_width=1, routing=InputRouting()
    )
    scores, x = torch.tensor([0.9, 0.2, 0.6]), torch.tensor([[2.0]])
    tensors = {"gate.weight": torch.logit(scores)[:, None] / 2} | {
        f"experts.{index}.{name}_proj.weight": torch.tensor([[value + index]])
        for index in range(3)
        for name, value in (("gate", 1.0), ("up", 0.5), ("down", -1.5))
    }

    class Source(RandomWeights):
        def has(self, name: str) -> bool:
            return name in tensors

        def read(self, name: str, out: Tensor, *, item: tuple[int, int] | None = None) -> None:
            out.copy_(tensors[name])

    built = spec.build(
        Weights(Source(seed=0), prefix="", dtype=torch.float32, numerics=Numerics.EXACT)
    )
    given = [(index, 2.0 * float(scores[index])) for index in (0, 2)]
    expected = sum(
        (index - 1.5) * (1.0 + index) * y / (1 + math.exp(-(1.0 + index) * y)) * (0.5 + index) * y
        for index, y in given
    )
    torch.testing.assert_close(built.forward(x), torch.tensor([[expected]]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "change", "field"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("glm4_moe", {"n_group": 4}, "n_group"),
        ("glm4_moe", {"topk_group": 3}, "topk_group"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("llama4", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("llama4", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
    ],
)
def test_bad_field_is_named(
    family: str, change: dict[str, Any], field: str, checkpoint: CheckpointMaker
) -> None:
    config = json.loads((checkpoint(family) / "config.json").read_text())
    with pytest.raises(ConfigError, match=field):
        random_model(config | change)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_tokens_are_counted_by_expert(checkpoint: CheckpointMaker, family: str) -> None:
    """Each token goes to as many experts in each layer, whichever rank has these."""
    driver = StageDriver(read_model(checkpoint(family)))
    before = {
        layer_id: int(tokens.counts.sum())
        for layer_id, tokens in driver.stages[0].expert_tokens.items()
    }
    driver.prefill({0: list(range(3, 40))})
    for layer_id, tokens in driver.stages[0].expert_tokens.items():
        assert tokens.own.is_whole
        is_last = layer_id == driver.stages[0].layer_range.end - 1
        assert int(tokens.counts.sum()) - before[layer_id] == (1 if is_last else 37) * 2
    assert before

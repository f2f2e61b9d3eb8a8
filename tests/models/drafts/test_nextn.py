"""NextN drafts: their trees are those of the formulas, from any kind of folder; other variants are
refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.assembly.cpu import CpuBackends
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardMode, SamplingRow
from engine.core.draft_trees import SpecRow, TokenTree
from engine.core.numerics import Numerics
from engine.core.request import SampledToken, SamplingParams
from engine.core.rows import Row, build_batch
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from models.drafts.loader import read_draft
from models.loader import read_model
from runtime.errors import ConfigError
from tests.support.drafts.drafters import CHAINS, TREES, Shape
from tests.support.drafts.nextn import NextNOracle, nan_pools
from tests.support.models.checkpoints import add_nextn, make_checkpoint, oracle
from tests.support.models.tiny_models import HIDDEN_SIZE, LLAMA, tiny

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
Maker = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Write a family's checkpoint with a NextN layer and these fields in its config."""
    folder, count = tmp_path_factory.mktemp("nextn"), iter(range(100))

    def make(family: str, **fields: object) -> Path:
        return add_nextn(make_checkpoint(folder, family), folder / f"nextn-{next(count)}", **fields)

    return make


def drafter(folder: Path, draft: Path, shape: Shape) -> EagleDrafter:
    model = read_draft(draft, read_model(folder)).load(numerics=Numerics.EXACT)
    attention = CpuBackends(Numerics.EXACT).of_draft(
        model.attention_geometry(16), nan_pools(model, 16, 8)
    )
    return EagleDrafter(model=model, attention=attention, topk=shape.width, steps=shape.depth)


def proposed(
    folder: Path, draft: Path, shape: Shape, features: Tensor, tokens: list[int]
) -> TokenTree:
    """Propose after a prompt whose tokens have these features; the last of `tokens` is sampled."""
    made = drafter(folder, draft, shape)
    batch = build_batch(
        ForwardMode.PREFILL,
        [
            Row(
                1,
                [9, *tokens[:-1]],
                0,
                [3, 5, 2],
                0,
                SamplingRow(SamplingParams(), 0),
                SpecRow(num_draft_tokens=shape.nodes),
            )
        ],
    )
    (tree,) = made.propose(
        batch,
        StageOutput(aux_hidden={last_layer(folder): features}),
        [AcceptedRun(0, [0], [SampledToken(tokens[-1])])],
    )
    return tree


def last_layer(folder: Path) -> int:
    return read_model(folder).facts.num_layers - 1


TOKENS = torch.randint(3, 250, (37,), generator=torch.Generator().manual_seed(6)).tolist()
FEATURES = torch.randn(37, HIDDEN_SIZE, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("shape", [CHAINS["chain 5"], TREES["tree 4x4/15"]], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("family", "fields"),
    [("deepseek_v32", {}), ("glm_moe_dsa", {}), ("deepseek_v3", {"rope_parameters": PLAIN_ROPE})],
)
def test_trees_are_the_formulas(
    made: Maker, family: str, fields: dict[str, object], shape: Shape
) -> None:
    """The prompt is longer than index_topk, so a wrong choice of keys shows."""
    folder = made(family, **fields)
    expected = NextNOracle.of(folder).tree(list(FEATURES), TOKENS, 0, shape)
    assert proposed(folder, folder, shape, FEATURES, TOKENS) == expected


def test_a_folder_with_the_draft_alone_is_the_same_draft(made: Maker, tmp_path: Path) -> None:
    folder = made("deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    alone = {
        f"model.layers.0.{name.split('.', 3)[3]}": tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(f"model.layers.{config['num_hidden_layers']}.")
    }
    save_file(alone, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {**config, "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
        )
    )
    shape = CHAINS["chain 3"]
    assert proposed(folder, tmp_path, shape, FEATURES, TOKENS) == proposed(
        folder, folder, shape, FEATURES, TOKENS
    )


@torch.no_grad()
def test_glm4_moe_chains_are_those_of_transformers(made: Maker, tmp_path: Path) -> None:
    """Its layer has plain attention: transformers runs it as the fifth layer of a model of five."""
    folder = made("glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    model: Any = oracle(tmp_path).model
    own = {
        name: tensors[f"model.layers.4.{name}.weight"]
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    }

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"])

    tokens, hidden, expected = list(TOKENS), normed(FEATURES, tensors["model.norm.weight"]), []
    for _ in range(3):
        embedded = normed(tensors["model.embed_tokens.weight"][tokens], own["enorm"])
        x = (torch.cat([embedded, normed(hidden, own["hnorm"])], -1) @ own["eh_proj"].t())[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        out = model.layers[4](
            x,
            position_embeddings=model.rotary_emb(x, positions),
            attention_mask=mask,
            position_ids=positions,
        )
        last = normed(
            (out[0] if isinstance(out, tuple) else out).reshape(-1, HIDDEN_SIZE)[-1],
            own["shared_head.norm"],
        )
        expected.append(int((tensors["lm_head.weight"] @ last).argmax()))
        tokens, hidden = [*tokens, expected[-1]], torch.cat([hidden, last[None]])
    assert list(proposed(folder, folder, CHAINS["chain 3"], FEATURES, TOKENS).token_ids) == expected


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"num_nextn_predict_layers": 0},
            "num_nextn_predict_layers must be an integer from 1 to 10000, is 0",
        ),
        ({"hidden_size": 128}, "hidden_size is 128, the target's is 72"),
        ({"vocab_size": 300}, "vocab_size is 300, the target's is 257"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16, the target runs in float32"),
        ({"index_topk": 4}, "attention differ"),
        ({"n_routed_experts": 4}, "experts differ"),
        ({"rms_norm_eps": 1e-3}, "norm differ"),
        ({"max_position_embeddings": 100, "kv_lora_rank": 8}, "attention differ"),
        (
            {"index_share_for_mtp_iteration": "yes"},
            "index_share_for_mtp_iteration must be true or false",
        ),
        ({"architectures": ["DeepseekV4ForCausalLMNextN"]}, "DeepseekV4ForCausalLMNextN"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method"),
    ],
)
def test_unimplemented_features_are_refused_by_name(
    made: Maker, fields: dict[str, object], complaint: str
) -> None:
    target, draft = read_model(made("glm_moe_dsa")), made("glm_moe_dsa", **fields)
    with pytest.raises(ConfigError, match=complaint):
        assert read_draft(draft, target).capture_layers


def test_a_target_without_such_layers_refuses_it(made: Maker) -> None:
    draft = made("deepseek_v3")
    with pytest.raises(ConfigError, match="a NextN draft does not fit LlamaForCausalLM"):
        assert read_draft(draft, tiny(LLAMA)).capture_layers


def test_a_checkpoint_without_the_layer_is_no_draft(made: Maker) -> None:
    folder = made("deepseek_v32")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".layers.4." not in name},
        folder / "model.safetensors",
    )
    with pytest.raises(ConfigError, match="no tensors of a draft"):
        read_draft(folder, read_model(folder))


def test_wrong_tensors_are_named(made: Maker) -> None:
    folder = made("deepseek_v32")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.4.self_attn.indexer.wk.weight"]
    tensors["model.layers.4.enorm.weight"] = torch.zeros(3)
    save_file(
        tensors | {"model.layers.4.fc_norm.weight": torch.zeros(HIDDEN_SIZE)},
        folder / "model.safetensors",
    )
    with pytest.raises(ConfigError, match="do not fit its config") as caught:
        read_draft(folder, read_model(folder)).load(numerics=Numerics.EXACT)
    for complaint in (
        r"indexer.wk.weight is missing",
        "enorm.weight is [3], the config says [72]",
        "fc_norm.weight is unexpected",
    ):
        assert complaint in str(caught.value)

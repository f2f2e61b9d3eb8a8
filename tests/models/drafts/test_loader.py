"""Draft folders: public names and conventions in, one clear refusal for what is not implemented."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.numerics import Numerics
from models.blocks.config import RawConfig, dtype_name
from models.drafts.eagle3 import aux_layer_ids
from models.drafts.loader import read_draft
from runtime.errors import ConfigError
from tests.support.drafts import eagle
from tests.support.models.tiny_models import HIDDEN_SIZE, LLAMA, VOCAB_SIZE, tiny


def change(folder: Path, **fields: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0."])
def test_all_public_names_load(tmp_path: Path, prefix: str) -> None:
    draft = read_draft(eagle.save_draft(tmp_path / "draft", prefix=prefix), tiny(LLAMA))
    assert draft.capture_layers == {1, 2, 4}
    model = draft.load(numerics=Numerics.EXACT)
    expected = eagle.random_tensors(tied_head=False)
    x = torch.randn(3, HIDDEN_SIZE)
    normed = expected["norm.weight"] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(model.logits(x), normed @ expected["lm_head.weight"].t())
    assert (model.vocab_size, [spec.layer_id for spec in model.cache_specs(16)]) == (
        VOCAB_SIZE,
        [0],
    )


def test_a_draft_without_a_dtype_runs_in_that_of_its_weights(tmp_path: Path) -> None:
    folder = eagle.save_draft(tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    stated = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(stated))
    tensors = load_file(folder / "model.safetensors")
    halves = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_file(halves, folder / "model.safetensors")
    draft = read_draft(folder, tiny(LLAMA, "bfloat16"))
    assert dtype_name(draft.raw) == "bfloat16"
    assert draft.notices == (
        f"{folder / 'config.json'} states no dtype: the model runs in the dtype of its weights, "
        f"bfloat16",
    )


def test_a_smaller_vocabulary_is_translated(tmp_path: Path) -> None:
    model = read_draft(
        eagle.save_draft(tmp_path / "draft", kept_ids=(2, 3, 50, 255)), tiny(LLAMA)
    ).load(numerics=Numerics.EXACT)
    assert model.vocab_size == 4
    assert model.target_ids(torch.tensor([[3, 0], [1, 2]])).tolist() == [[255, 2], [3, 50]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}, (1, 46, 90)),
        (
            {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 47, 91]},
            (1, 46, 90),
        ),
        ({}, (1, 46, 90)),
    ],
)
def test_both_conventions_of_layer_ids_mean_outputs(
    fields: dict[str, object], expected: tuple[int, ...]
) -> None:
    assert aux_layer_ids(RawConfig(fields), 94) == expected


@pytest.mark.parametrize("ids", [[1, 2], [1, 2, 2], [1, 2, 94]])
def test_layer_ids_that_the_target_has_not_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="three of the target's 94 layers"):
        aux_layer_ids(RawConfig({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}), 94)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_output": True}, "norm_output"),
        ({"num_hidden_layers": 2}, "num_hidden"),
        ({"target_hidden_size": 128}, "target_hidden_size"),
        ({"hidden_size": 32}, "hidden_size"),
        ({"vocab_size": 300}, "vocab_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"architectures": ["LlamaForCausalLMMedusa"]}, "LlamaForCausalLMMedusa"),
    ],
)
def test_unimplemented_features_are_refused_by_name(
    tmp_path: Path, fields: dict[str, object], complaint: str
) -> None:
    folder = change(eagle.save_draft(tmp_path / "draft"), **fields)
    with pytest.raises(ConfigError, match=complaint):
        assert read_draft(folder, tiny(LLAMA)).capture_layers


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    folder = change(eagle.save_draft(tmp_path / "draft"), intermediate_size=64)
    with pytest.raises(
        ConfigError, match=r"mlp\.gate_proj\.weight is \[100, 72\], the config says \[64, 72\]"
    ):
        read_draft(folder, tiny(LLAMA)).load(numerics=Numerics.EXACT)

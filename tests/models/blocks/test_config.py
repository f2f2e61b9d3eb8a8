"""Raw configs: both rope styles, wrappers, and one clear error naming the field for everything
else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.blocks.config import RawConfig
from models.blocks.rotary import inverse_frequencies, read_rope
from models.loader import random_model, read_model
from runtime.errors import ConfigError
from tests.support.models.tiny_models import KIMI_LINEAR

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
HYBRID = LLAMA | {"architectures": ["Qwen3_5ForCausalLM"], "head_dim": 32, "num_hidden_layers": 8}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.5,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25},
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_of_both_styles_matches_transformers(scaling: dict[str, Any]) -> None:
    newer = RawConfig(LLAMA | {"rope_parameters": scaling | {"rope_theta": 5000.0}})
    older = RawConfig(LLAMA | {"rope_theta": 5000.0, "rope_scaling": scaling})
    oldest = RawConfig(
        LLAMA
        | {
            "rope_theta": 5000.0,
            "rope_scaling": {
                "type" if name == "rope_type" else name: value for name, value in scaling.items()
            },
        }
    )
    spec = read_rope(newer, head_dim=128)
    assert read_rope(older, head_dim=128) == spec
    assert read_rope(oldest, head_dim=128) == spec
    if scaling["rope_type"] != "default":
        config = transformers.LlamaConfig(
            hidden_size=512,
            num_attention_heads=4,
            max_position_embeddings=512,
            rope_parameters=scaling | {"rope_theta": 5000.0},
        )
        expected, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
        torch.testing.assert_close(inverse_frequencies(spec), expected, atol=1e-7, rtol=1e-6)
        assert spec.amplitude == pytest.approx(amplitude)


def test_both_styles_of_rope_must_say_the_same() -> None:
    """transformers follows `rope_scaling`, which may have been added to a file saved with the other
    style."""
    newer = {"rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0}}
    older = {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_rope(RawConfig(LLAMA | newer | older), head_dim=16).factor == 2.0
    assert read_rope(RawConfig(LLAMA | newer | {"rope_theta": 1.0}), head_dim=16).theta == 700.0
    with pytest.raises(ConfigError, match="differs from rope_parameters") as caught:
        read_rope(
            RawConfig(LLAMA | newer | older | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
            head_dim=16,
        )
    assert caught.value.field == "rope_scaling"


@pytest.mark.parametrize("where", ["top", "inside"])
def test_partial_rotation_at_top_level_or_inside(where: str) -> None:
    half = {"partial_rotary_factor": 0.5}
    inside = {"rope_type": "default", "rope_theta": 10.0} | (half if where == "inside" else {})
    raw = RawConfig(LLAMA | {"rope_parameters": inside} | (half if where == "top" else {}))
    assert read_rope(raw, head_dim=32, default_partial=1.0).dim == 16
    assert read_rope(raw, head_dim=32).dim == 32, "of a family whose heads turn whole"
    assert read_rope(RawConfig(LLAMA), head_dim=32, default_partial=0.25).dim == 8


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_other_rope_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' is not supported") as caught:
        random_model(LLAMA | {"rope_scaling": {"type": kind, "factor": 2.0}})
    assert caught.value.field == "rope_scaling"


def test_wrapper_config_reads_through() -> None:
    wrapper = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "eos_token_id": [3, 4],
        "vision_config": {"depth": 1, "hidden_size": 9},
        "image_token_id": 250,
        "text_config": {
            k: v for k, v in HYBRID.items() if k not in ("architectures", "torch_dtype")
        }
        | {"tie_word_embeddings": False, "eos_token_id": None},
    }
    model = random_model(wrapper)
    assert model.facts.architecture == "Qwen3_5ForConditionalGeneration"
    assert model.facts.dtype == "bfloat16"
    assert model.facts.eos_token_ids == (3, 4)
    assert model.spec.tied_head
    assert model.facts.hidden_size == 64


def test_hybrid_layer_kinds_by_interval_and_by_list() -> None:
    def grids(config: dict[str, Any]) -> list[int]:
        return [layer.mixer.chunk_grid for layer in random_model(config).spec.layers]

    assert grids(HYBRID) == [64, 64, 64, 1] * 2
    assert grids(HYBRID | {"full_attention_interval": 2}) == [64, 1] * 4
    assert (
        grids(HYBRID | {"layer_types": ["full_attention"] + ["linear_attention"] * 7})
        == [1] + [64] * 7
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, "sliding_window"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            "final_logit_softcapping",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "silu"},
            "hidden_activation",
        ),
        ({"architectures": ["Gemma4ForCausalLM"]}, "hidden_size_per_layer_input"),
        (
            {
                "architectures": ["Gemma4ForCausalLM"],
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
            },
            "enable_moe_block",
        ),
        ({"architectures": None}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"hidden_size": (1 << 24) + 1}, "hidden_size"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"rope_theta": 0}, "rope_theta"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
            "partial_rotary_factor",
        ),
        ({**HYBRID, "partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
    ],
)
def test_bad_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field.removesuffix("s")) as caught:
        random_model(LLAMA | change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_bad_hybrid_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        random_model(HYBRID | change)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"use_grouped_topk": False}, "use_grouped_topk"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": None}, "layer_types"),
        (
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [0, 1, 2, 3]},
            },
            "kda_layers",
        ),
    ],
)
def test_bad_field_of_kimi_linear_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        random_model(KIMI_LINEAR | change)


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="use_sliding_window"):
        random_model(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True})


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'Nope' is not supported; known are .*LlamaForCausalLM.*Qwen3ForCausalLM",
    ):
        random_model(LLAMA | {"architectures": ["Nope"]})


def test_a_folder_without_config_or_with_a_bad_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model(tmp_path)
    (tmp_path / "weights.safetensors").touch()
    for content in ("{", "[]", "\x00"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        read_model(tmp_path)

"""Multimodal wrappers as they are published, their text_config without what transformers knows by
itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.blocks.attention import AttentionSpec
from models.blocks.config import RawConfig, text_config
from models.loader import read_model
from models.registry import read_decoder
from router.text.model_facts import load_served_model
from runtime.errors import ConfigError
from tests.support.models.checkpoints import spread_weights
from tests.support.models.single_stage import StageDriver

TOLERANCE = 1e-4
# As Google publishes Gemma-3-4b-it, narrower: heads, vocabulary and context are transformers'
# defaults.
GEMMA3 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 16,
}
# As Meta publishes Llama 4 Scout, likewise; `head_dim` is left out by others.
LLAMA4 = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def write_wrapper(
    folder: Path, architecture: str, model: str, config: str, text: dict[str, Any]
) -> torch.nn.Module:
    """Write a checkpoint under a wrapper's names; return the text model that transformers makes of
    `text`."""
    torch.manual_seed(0)
    built: torch.nn.Module = getattr(transformers, model)(getattr(transformers, config)(**text))
    spread_weights(built)
    built.train(mode=False)
    getattr(built, "save_pretrained")(folder)  # noqa: B009 - a Module to the type checker
    tensors: dict[str, Tensor] = {
        f"language_model.{name}": tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors["vision_tower.patch.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": [architecture],
                "text_config": text,
                "vision_config": {"hidden_size": 9},
                "eos_token_id": [1, 106],
                "torch_dtype": "float32",
            }
        )
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    return built


@pytest.mark.parametrize(
    ("architecture", "model", "config", "text"),
    [
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3),
        ("Llama4ForConditionalGeneration", "Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),
    ],
)
def test_a_wrapper_without_fields_is_the_model_of_transformers(
    architecture: str, model: str, config: str, text: dict[str, Any], tmp_path: Path
) -> None:
    oracle = write_wrapper(tmp_path, architecture, model, config, text)
    tokens = torch.randint(3, 240, (40,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = oracle(tokens[None], use_cache=False).logits[0, -1]
    description = read_model(tmp_path)
    found = StageDriver(description, cuts=(1, 3)).prefill({0: tokens.tolist()})[0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    facts = load_served_model(tmp_path).facts
    assert (facts.architecture, facts.vocab_size, facts.num_layers, facts.eos_token_ids) == (
        architecture,
        description.facts.vocab_size,
        description.facts.num_layers,
        (1, 106),
    )


def test_other_text_models_of_mistrals_wrapper_are_refused(tmp_path: Path) -> None:
    """Ministral 3 scales its queries by position."""
    text = {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": 0.1}}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"norm": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model_type .*mistral") as refused:
        read_model(tmp_path)
    assert refused.value.field == "model_type"


def test_gpt_oss_as_published_is_the_model_of_the_newer_style() -> None:
    """Fields of the published file that transformers does not read, and its older rope."""
    common = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    rope = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    published = {
        **common,
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "rope_scaling": rope,
        "rope_theta": 150000,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }
    newer = {**common, "rope_parameters": {**rope, "rope_theta": 150000.0}}
    expected = read_decoder("GptOssForCausalLM", text_config(RawConfig(newer)))
    assert read_decoder("GptOssForCausalLM", text_config(RawConfig(published))) == expected
    assert expected.max_context_tokens == 131072
    assert [layer.mixer for layer in expected.layers[::2]] == [expected.layers[0].mixer] * 12
    windows = [
        spec.mixer.window for spec in expected.layers[:2] if isinstance(spec.mixer, AttentionSpec)
    ]
    assert windows == [127, None]

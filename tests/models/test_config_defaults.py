"""Fields that a config.json leaves out have the values of transformers' config classes, on workers
and on routers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from models.blocks.config import RawConfig, text_config
from models.loader import random_model
from models.registry import read_decoder
from runtime.model_files.config import read_facts
from runtime.model_files.defaults import CONFIG_DEFAULTS

CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "Llama4ForCausalLM": "Llama4TextConfig",
    "Llama4ForConditionalGeneration": "Llama4TextConfig",
    "MistralForCausalLM": "MistralConfig",
    "Mistral3ForConditionalGeneration": "MistralConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "SeedOssForCausalLM": "SeedOssConfig",
    "SmolLM3ForCausalLM": "SmolLM3Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma3ForConditionalGeneration": "Gemma3TextConfig",
    "Gemma4ForCausalLM": "Gemma4TextConfig",
    "Gemma4ForConditionalGeneration": "Gemma4TextConfig",
    "Gemma4AssistantForCausalLM": "Gemma4TextConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen2MoeForCausalLM": "Qwen2MoeConfig",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3VLForConditionalGeneration": "Qwen3VLTextConfig",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "MiniMaxM2ForCausalLM": "MiniMaxM2Config",
    "GptOssForCausalLM": "GptOssConfig",
    "Glm4MoeForCausalLM": "Glm4MoeConfig",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteConfig",
    "KimiLinearForCausalLM": "KimiLinearConfig",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "DeepseekV32ForCausalLM": "DeepseekV32Config",
    "GlmMoeDsaForCausalLM": "GlmMoeDsaConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5TextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeTextConfig",
}
# What every published file states, because the classes' own defaults are of no model that Baton
# serves, or of none.
STATED: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": None},
    "Mistral3ForConditionalGeneration": {"sliding_window": None},
    "Qwen3VLForConditionalGeneration": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
    },
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0},
    "Gemma4ForConditionalGeneration": {"hidden_size_per_layer_input": 0},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "KimiLinearForCausalLM": {
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "num_hidden_layers": 8,
    },
}
# A NextN layer behind the last is what a file has to state; transformers names one by default and
# ignores it.
NOT_OURS = ("num_nextn_predict_layers", "dtype", "architectures", "transformers_version")
SERVED = [name for name in CLASSES if name != "Gemma4AssistantForCausalLM"]


def whole_of(architecture: str) -> dict[str, Any]:
    """Return the config that transformers writes for one with only the fields of `STATED`."""
    config = getattr(transformers, CLASSES[architecture])(**STATED.get(architecture, {}))
    return {name: value for name, value in config.to_dict().items() if name not in NOT_OURS}


def test_every_served_architecture_has_defaults() -> None:
    assert set(CONFIG_DEFAULTS) == set(CLASSES)


@pytest.mark.parametrize("architecture", CLASSES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    whole = getattr(transformers, CLASSES[architecture])().to_dict()
    assert {name: whole[name] for name in CONFIG_DEFAULTS[architecture]} == CONFIG_DEFAULTS[
        architecture
    ]


@pytest.mark.parametrize("architecture", SERVED)
def test_a_file_that_states_nothing_is_the_model_of_one_that_states_all(architecture: str) -> None:
    named = {"architectures": [architecture], **STATED.get(architecture, {})}
    spec = read_decoder(architecture, text_config(RawConfig(named)))
    assert spec == read_decoder(
        architecture, text_config(RawConfig({**named, **whole_of(architecture)}))
    )
    facts = read_facts(named)
    assert (facts.architecture, facts.vocab_size, facts.num_layers) == (
        architecture,
        spec.vocab_size,
        spec.num_layers,
    )
    assert (
        facts.max_context_tokens >= spec.max_context_tokens
    )  # Llama 4 is served to the end of its first chunk


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        # As Google publishes Gemma-3-4b-it, and Meta Llama 4 Scout: without the fields that the
        # classes know.
        (
            "Gemma3ForConditionalGeneration",
            {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        ),
        (
            "Llama4ForConditionalGeneration",
            {
                "hidden_size": 5120,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "num_hidden_layers": 48,
                "head_dim": 128,
                "model_type": "llama4_text",
            },
        ),
    ],
)
def test_routers_and_workers_read_wrappers_without_fields_equally(
    architecture: str, text: dict[str, Any]
) -> None:
    config: dict[str, Any] = {
        "architectures": [architecture],
        "text_config": text,
        "eos_token_id": [1, 106],
    }
    oracle: Any = getattr(transformers, CLASSES[architecture])(**text)
    facts, worker = read_facts(config), random_model(config).facts
    assert (facts.vocab_size, facts.num_layers, facts.max_context_tokens) == (
        oracle.vocab_size,
        oracle.num_hidden_layers,
        oracle.max_position_embeddings,
    )
    assert (worker.vocab_size, worker.num_layers, worker.eos_token_ids) == (
        oracle.vocab_size,
        oracle.num_hidden_layers,
        (1, 106),
    )


def test_null_is_stated_and_takes_no_default() -> None:
    """As in transformers: Mistral's `sliding_window: null` says that there is none, where its
    absence says 4,096."""
    named = {"architectures": ["MistralForCausalLM"]}
    assert transformers.MistralConfig(sliding_window=None).sliding_window is None
    assert "sliding_window" not in text_config(RawConfig({**named, "sliding_window": None}))
    assert (
        text_config(RawConfig(named)).integer("sliding_window")
        == transformers.MistralConfig().sliding_window
    )


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_a_field_of_two_names_takes_no_default_under_the_other(name: str) -> None:
    for architecture in ("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"):
        config = {"architectures": [architecture], name: 32}
        experts = random_model(config).spec.layers[0].feed_forward.num_experts
        assert experts == 32, architecture


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            131072,
        ),  # as Qwen3's page says
        ({"type": "yarn", "factor": 4.0}, 4 * 40960),
        (
            {"type": "yarn", "factor": 40, "original_max_position_embeddings": 1024},
            40960,
        ),  # DeepSeek's kind: the same
        ({"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 10001}, 40960),
        ({"rope_type": "linear", "factor": 4.0}, 40960),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            40960,
        ),
    ],
)
@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_yarn_makes_the_context_longer(rope: dict[str, Any], expected: int, style: str) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960, style: rope}
    facts, worker = read_facts(config), random_model(config).facts
    assert facts.max_context_tokens == worker.max_context_tokens == expected
    assert worker.context_field == (style if expected > 40960 else "max_position_embeddings")


def test_a_context_beyond_every_bound_names_its_source(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "rope_scaling": {"type": "yarn", "factor": 1e6},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        Exception, match="rope_scaling gives a context of 32768000000 tokens, the limit is 16777216"
    ):
        read_facts(config)

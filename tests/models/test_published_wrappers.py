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

from models.loader import read_model
from router.text.model_facts import load_served_model
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

"""What is Llama 4's own: where its context ends, which layers know positions, and the files as they are published."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.blocks.attention import AttentionSpec, Rotation
from models.blocks.moe import MoeSpec
from models.loader import read_model
from tests.models.conftest import CheckpointMaker
from tests.support.models.single_stage import StageDriver
from tests.support.models.tiny_models import LLAMA4, tiny


@pytest.mark.parametrize(("change", "longest"), [
    ({}, 8191), ({"max_position_embeddings": 4096}, 4096), ({"attention_chunk_size": 2048}, 2048),
    ({"floor_scale": 1024, "attn_temperature_tuning": 4}, 1023),
    ({"attn_temperature_tuning": False}, 8192), ({"no_rope_layers": [1] * 5}, 8192),
])
def test_the_context_ends_with_the_first_chunk(change: dict[str, object], longest: int) -> None:
    """And before the temperature of layers without positions is another than 1."""
    assert tiny({**LLAMA4, "max_position_embeddings": 100_000, **change}).facts.max_context_tokens == longest


@pytest.mark.parametrize(("change", "bare", "sparse"), [
    ({}, [3], [1, 3]), ({"no_rope_layers": [], "no_rope_layer_interval": 2}, [1, 3], [1, 3]),
    ({"no_rope_layers": [0, 1, 1, 1, 0, 0], "moe_layers": [0, 4]}, [0, 4], [0, 4]),
])
def test_which_layers_know_positions_and_have_experts(change: dict[str, object], bare: list[int],
                                                      sparse: list[int]) -> None:
    layers = tiny({**LLAMA4, **change}).spec.layers
    mixers = [layer.mixer for layer in layers]
    assert [place for place, mixer in enumerate(mixers)
            if isinstance(mixer, AttentionSpec) and mixer.rotation is Rotation.NONE and mixer.qk_norm is None] == bare
    assert [place for place, layer in enumerate(layers) if isinstance(layer.feed_forward, MoeSpec)] == sparse


def test_a_published_wrapper_is_read(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """The text model lies below `language_model.`, beside vision tensors."""
    plain = checkpoint("llama4")
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    own = {name: config.pop(name) for name in ("dtype", "tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps({
        **own, "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": config}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    stray = torch.full((8, 8), 7.0)
    save_file({**tensors, "vision_model.model.layers.0.self_attn.q_proj.weight": stray,
               "multi_modal_projector.linear_1.weight": stray.clone()}, folder / "model.safetensors")
    expected = StageDriver(read_model(plain)).prefill({0: [5, 6, 7]})
    assert torch.equal(StageDriver(read_model(folder)).prefill({0: [5, 6, 7]}), expected)

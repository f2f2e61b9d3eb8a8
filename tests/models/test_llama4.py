"""Llama 4: the end of its context, layers with positions, and the published files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.blocks.attention import AttentionSpec, Rotation
from models.blocks.moe import MoeSpec
from models.loader import read_model
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from runtime.errors import ConfigError
from tests.models.conftest import CheckpointMaker
from tests.support.models.quantized import fp8
from tests.support.models.single_stage import StageDriver
from tests.support.models.tiny_models import LLAMA4, tiny


@pytest.mark.parametrize(
    ("change", "longest", "field"),
    [
        ({}, 8191, "floor_scale"),
        ({"max_position_embeddings": 4096}, 4096, "max_position_embeddings"),
        ({"attention_chunk_size": 2048}, 2048, "attention_chunk_size"),
        ({"floor_scale": 1024, "attn_temperature_tuning": 4}, 1023, "floor_scale"),
        ({"attn_temperature_tuning": False}, 8192, "attention_chunk_size"),
        ({"no_rope_layers": [1] * 5}, 8192, "attention_chunk_size"),
    ],
)
def test_the_context_ends_with_the_first_chunk(
    change: dict[str, object], longest: int, field: str
) -> None:
    """And before the temperature of layers without positions is another than 1."""
    facts = tiny({**LLAMA4, "max_position_embeddings": 100_000, **change}).facts
    assert (facts.max_context_tokens, facts.context_field) == (longest, field)


def test_a_longer_context_is_refused_by_the_field_that_ends_it(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama4"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_chunk_size": 256}))
    with pytest.raises(
        ConfigError, match=r"at most 256, the model's own \(its attention_chunk_size\), got 257"
    ):
        plan_stage(WorkerConfig(model=folder, num_pages=8, max_context=257))


@pytest.mark.parametrize(
    ("change", "bare", "sparse"),
    [
        ({}, [3], [1, 3]),
        ({"no_rope_layers": [], "no_rope_layer_interval": 2}, [1, 3], [1, 3]),
        ({"no_rope_layers": [0, 1, 1, 1, 0, 0], "moe_layers": [0, 4]}, [0, 4], [0, 4]),
    ],
)
def test_which_layers_know_positions_and_have_experts(
    change: dict[str, object], bare: list[int], sparse: list[int]
) -> None:
    layers = tiny({**LLAMA4, **change}).spec.layers
    mixers = [layer.mixer for layer in layers]
    assert [
        place
        for place, mixer in enumerate(mixers)
        if isinstance(mixer, AttentionSpec)
        and mixer.rotation is Rotation.NONE
        and mixer.qk_norm is None
    ] == bare
    assert [
        place for place, layer in enumerate(layers) if isinstance(layer.feed_forward, MoeSpec)
    ] == sparse


def test_a_published_wrapper_is_read(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """The text model is below `language_model.`, next to vision tensors."""
    plain = checkpoint("llama4")
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    own = {name: config.pop(name) for name in ("dtype", "tie_word_embeddings")}
    (folder / "config.json").write_text(
        json.dumps(
            {
                **own,
                "architectures": ["Llama4ForConditionalGeneration"],
                "model_type": "llama4",
                "text_config": config,
            }
        )
    )
    tensors = {
        f"language_model.{name}": tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    stray = torch.full((8, 8), 7.0)
    save_file(
        {
            **tensors,
            "vision_model.model.layers.0.self_attn.q_proj.weight": stray,
            "multi_modal_projector.linear_1.weight": stray.clone(),
        },
        folder / "model.safetensors",
    )
    expected = StageDriver(read_model(plain)).prefill({0: [5, 6, 7]})
    assert torch.equal(StageDriver(read_model(folder)).prefill({0: [5, 6, 7]}), expected)


def test_experts_in_fp8_have_a_scale_for_each_output(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """As published: codes [experts, in, out], scales [experts, 1, out] of the first product and
    [experts, out, 1] of the second."""
    plain = checkpoint("llama4")
    config = json.loads((plain / "config.json").read_text())
    codes, meant = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in codes if ".experts." in name]:
        coded = [fp8((1, 0), "scale", torch.float32)(expert.mT) for expert in codes[name]]
        codes[name] = torch.stack([parts["weight"].mT for parts, _ in coded])
        scales = torch.stack([parts["scale"] for parts, _ in coded])
        codes[f"{name}_scale"] = scales.mT.contiguous() if name.endswith("gate_up_proj") else scales
        meant[name] = torch.stack([value.mT for _, value in coded])
    quantized = {
        **config,
        "quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    }
    drivers = []
    for folder, tensors, fields in (
        (tmp_path / "codes", codes, quantized),
        (tmp_path / "meant", meant, config),
    ):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(fields))
        drivers.append(StageDriver(read_model(folder)))
    found, expected = (driver.prefill({0: [5, 6, 7]}) for driver in drivers)
    assert torch.equal(found, expected)

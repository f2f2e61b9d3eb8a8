"""Weights in MXFP4 are those that transformers reads, and make the model that they mean."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations import mxfp4 as theirs

from engine.core.layer_range import LayerRange
from engine.core.numerics import WeightFormat
from models import mxfp4
from models.blocks.config import RawConfig
from models.checkpoint import read_tensor
from models.loader import read_model
from models.quantized_formats import open_checkpoint
from runtime.errors import ConfigError
from runtime.model_files.weights import loaded_bytes
from tests.models.test_weights_digest import flip, read_stages, tensor_bytes
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.single_stage import StageDriver

PROMPT = [5, 6, 7, 8, 9]
SECTION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def random_parts(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a stack [items, out, in / 32]: every code, and scales of a usual size."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)


def meaning(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return what transformers makes of them, [items, in, out] bf16."""
    convert: Any = theirs.convert_moe_packed_tensors
    found: Tensor = convert(blocks, scales)
    return found


def written(folder: Path, **tensors: Tensor) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stack_is_the_one_that_transformers_reads(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces that do not divide it, whole and one matrix after the other; and as a family reads it
    that stores [in, out]."""
    monkeypatch.setattr(mxfp4, "_PIECE_NUMBERS", 700)
    parts = random_parts(3, 14, 4, seed=1)
    written(tmp_path, **dict(zip(("a.up_proj_blocks", "a.up_proj_scales"), parts, strict=True)))
    entries = open_checkpoint(tmp_path, RawConfig({"quantization_config": SECTION})).entries
    expected = meaning(*parts).mT.to(dtype)
    assert list(entries) == ["a.up_proj"]
    assert entries["a.up_proj"].shape == (3, 14, 128)
    whole = torch.empty(3, 14, 128, dtype=dtype)
    read_tensor(entries["a.up_proj"], whole, name="a", digest=None)
    assert torch.equal(whole, expected)
    for item in range(3):
        one = torch.empty(14, 128, dtype=dtype)
        read_tensor(entries["a.up_proj"], one, name="a", digest=None, item=item)
        assert torch.equal(one, expected[item])


def quantized(plain: Path, folder: Path) -> tuple[Path, Path]:
    """Write a model with experts in MXFP4, as published, and the one that they mean in bfloat16."""
    paths = folder / "coded", folder / "meant"
    tensors = load_file(plain / "model.safetensors")
    coded, meant = dict(tensors), dict(tensors)
    names = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
    for seed, name in enumerate(names):
        items, columns, rows = tensors[name].shape
        blocks, scales = random_parts(items, rows, columns // 32, seed=seed)
        del coded[name]
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = meaning(blocks, scales)
    for path, content, section in zip(
        paths, (coded, meant), ({"quantization_config": SECTION}, {}), strict=True
    ):
        shutil.copytree(plain, path)
        save_file(content, path / "model.safetensors", {"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **section}))
    return paths


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    plain = make_checkpoint(folder, "gpt_oss_blocks", dtype=torch.bfloat16)
    return quantized(plain, folder)


def test_a_model_is_the_one_its_weights_mean(both: tuple[Path, Path]) -> None:
    coded, meant = both
    expected = StageDriver(read_model(meant)).prefill({0: PROMPT})
    assert torch.equal(StageDriver(read_model(coded), cuts=(1, 3)).prefill({0: PROMPT}), expected)


def test_eight_bits_are_near_the_model(both: tuple[Path, Path]) -> None:
    expected = StageDriver(read_model(both[0])).prefill({0: PROMPT})
    found = StageDriver(read_model(both[0], weight_format=WeightFormat.INT8)).prefill({0: PROMPT})
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


def test_memory_counts_the_final_form(both: tuple[Path, Path]) -> None:
    coded, meant = both
    layers = LayerRange(1, 3)
    assert read_model(coded).weight_bytes(layers) == read_model(meant).weight_bytes(layers)
    assert loaded_bytes(meant) < loaded_bytes(coded) < 1.1 * loaded_bytes(meant), "with scales"


def test_every_part_counts_and_splits_do_not(both: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(both[0], tmp_path / "model"))
    whole = read_stages(folder, 1)
    assert [read_stages(folder, size) for size in (2, 4)] == [whole] * 2
    places = tensor_bytes(folder / "model.safetensors")
    for ending in ("blocks", "scales", "bias"):
        start, _ = places[f"model.layers.1.mlp.experts.down_proj_{ending}"]
        flip(folder / "model.safetensors", start)
        assert read_stages(folder, 2) != whole, ending
        flip(folder / "model.safetensors", start)
    assert read_stages(folder, 2) == whole


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a_blocks": (torch.uint8, 2, 4, 16)}, "a: has no _scales"),
        ({"a_scales": (torch.uint8, 2, 4)}, "a: has no _blocks"),
        (
            {"a_blocks": (torch.uint8, 2, 4, 16), "a_scales": (torch.uint8, 2, 5)},
            r"scales of shape \[2, 5\] for codes of \[2, 4, 16\]",
        ),
        (
            {"a_blocks": (torch.uint8, 2, 4, 8), "a_scales": (torch.uint8, 2, 4)},
            r"\[2, 4, 8\] are not blocks of 16 bytes",
        ),
        (
            {"a_blocks": (torch.int32, 2, 4, 16), "a_scales": (torch.uint8, 2, 4)},
            "codes are I32 and scales U8, not U8",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tensors: dict[str, tuple[Any, ...]], message: str, tmp_path: Path
) -> None:
    written(
        tmp_path,
        **{name: torch.zeros(shape, dtype=dtype) for name, (dtype, *shape) in tensors.items()},
    )
    with pytest.raises(ConfigError, match=message) as caught:
        open_checkpoint(tmp_path, RawConfig({"quantization_config": SECTION}))
    assert caught.value.field == "quantization_config"

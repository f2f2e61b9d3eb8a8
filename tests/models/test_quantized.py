"""Quantized checkpoints load as their formats define, bit for bit, and each stage reads its own
part."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics, WeightFormat
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.linear.packed_linear import PackedWeight
from engine.kernels.host.linear.packing import SEGMENTS
from engine.kernels.host.linear.weight_memory import Allocate
from models import quantized
from models.blocks import linear
from models.blocks.config import RawConfig
from models.checkpoint import read_tensor
from models.drafts.loader import read_draft
from models.loader import read_model
from models.quantized_formats import open_checkpoint
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from runtime.digests import check_compatible
from runtime.errors import ConfigError, IncompatiblePeerError
from runtime.model_files.weights import loaded_bytes
from tests.models.conftest import CheckpointMaker
from tests.models.test_weights_digest import flip, read_stages, tensor_bytes
from tests.support.models.checkpoints import add_nextn, make_checkpoint
from tests.support.models.quantized import LAYOUTS, meant_by, write_quantized
from tests.support.models.single_stage import StageDriver

PROMPT = [5, 6, 7, 8, 9]


def written(folder: Path, layout: str, **tensors: Tensor) -> Path:
    """Write a folder with these tensors and a config that sets only the layout."""
    chosen = LAYOUTS[layout]
    save_file(tensors, folder / "model.safetensors")
    (folder / chosen.file).write_text(json.dumps(chosen.config))
    return folder


def opened(
    folder: Path,
    layout: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    item: tuple[int, int] | None = None,
) -> Tensor:
    chosen = LAYOUTS[layout]
    section = {"quantization_config": chosen.config} if chosen.file == "config.json" else {}
    entry = open_checkpoint(folder, RawConfig(section)).entries[name]
    assert entry.shape == (shape if item is None else (item[1], *shape))
    out = torch.empty(shape, dtype=dtype)
    read_tensor(entry, out, name=name, digest=None, item=None if item is None else item[0])
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_of_several_pieces_is_dequantized_by_its_format(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of rows or columns that blocks of 128 or pieces divide."""
    monkeypatch.setattr(quantized, "_PIECE_NUMBERS", 5000)
    weight = torch.randn(296, 264, generator=torch.Generator().manual_seed(1))
    parts, meant = LAYOUTS[layout].code(weight)
    folder = written(
        tmp_path, layout, **{f"a.{ending}": part.contiguous() for ending, part in parts.items()}
    )
    assert torch.equal(opened(folder, layout, "a.weight", (296, 264), torch.float32), meant)
    assert torch.equal(
        opened(folder, layout, "a.weight", (296, 264), torch.bfloat16), meant.bfloat16()
    )
    assert (meant - weight).abs().max() < 0.6, "codes are near what was coded"


def test_blocks_are_dequantized_as_by_transformers(tmp_path: Path) -> None:
    weight = torch.randn(384, 256, generator=torch.Generator().manual_seed(1))
    parts, _ = LAYOUTS["fp8 blocks of 128"].code(weight)
    theirs: Any = Fp8Dequantize(None)  # type: ignore[no-untyped-call]
    expected = theirs.convert({name: [part] for name, part in parts.items()})["weight"]
    folder = written(
        tmp_path, "fp8 blocks of 128", **{f"a.{ending}": part for ending, part in parts.items()}
    )
    assert torch.equal(
        opened(folder, "fp8 blocks of 128", "a.weight", (384, 256), torch.bfloat16), expected
    )


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    each = [
        LAYOUTS["fp8 blocks"].code(
            torch.randn(40, 24, generator=torch.Generator().manual_seed(index))
        )
        for index in range(3)
    ]
    folder = written(
        tmp_path,
        "fp8 blocks",
        **{
            "experts.down_proj": torch.stack(
                [parts["weight"].view(torch.uint8) for parts, _ in each]
            ).view(torch.float8_e4m3fn),
            "experts.down_proj_scale_inv": torch.stack(
                [parts["weight_scale_inv"] for parts, _ in each]
            ),
        },
    )
    for index, (_, meant) in enumerate(each):
        found = opened(
            folder, "fp8 blocks", "experts.down_proj", (40, 24), torch.float32, item=(index, 3)
        )
        assert torch.equal(found, meant)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("fp8 blocks", "deepseek_v32"),
        ("fp8 tensors", "glm4_moe"),
        ("fp8 channels", "qwen3_moe"),
        ("modelopt", "llama"),
        ("int8 channels", "qwen3"),
        ("int4 packed with zeros", "qwen3_5"),
        ("awq", "qwen2"),
        ("gptq reordered", "glm_moe_dsa"),
        ("fp8 of MiniMax", "minimax_m2"),
        ("awq in capitals", "llama"),
        ("modelopt by producer", "qwen3"),
    ],
)
def test_a_model_is_the_one_its_weights_mean(
    layout: str, family: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = write_quantized(checkpoint(family), tmp_path / "model", layout)
    expected = StageDriver(read_model(meant_by(folder))).prefill({0: PROMPT})
    assert torch.equal(StageDriver(read_model(folder), cuts=(1, 3)).prefill({0: PROMPT}), expected)
    assert not torch.equal(
        StageDriver(read_model(checkpoint(family))).prefill({0: PROMPT}), expected
    )


@pytest.mark.parametrize(
    ("layout", "family"), [("int8 channels", "qwen3_5_text"), ("int8 packed", "qwen3_moe")]
)
def test_eight_bits_keep_the_scales_that_a_row_has(
    layout: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in the order of their rows: in another, codes would be far off."""
    kept: list[Tensor] = []

    class Recorded(PackedWeight):
        def __init__(
            self,
            weight: Tensor,
            bias: Tensor | None,
            team: Team,
            *,
            num_segments: int = SEGMENTS,
            segment_terms: int | None = None,
            weight_format: WeightFormat = WeightFormat.MODEL,
            row_scales: Tensor | None = None,
            allocate: Allocate = torch.empty,
        ) -> None:
            super().__init__(
                weight,
                bias,
                team,
                num_segments=num_segments,
                segment_terms=segment_terms,
                weight_format=weight_format,
                row_scales=row_scales,
                allocate=allocate,
            )
            if row_scales is not None:
                kept.append(row_scales)

    monkeypatch.setattr(linear, "PackedWeight", Recorded)
    folder = write_quantized(
        make_checkpoint(tmp_path, family, dtype=torch.bfloat16), tmp_path / "model", layout
    )
    found = StageDriver(read_model(folder, weight_format=WeightFormat.INT8), cuts=(1, 3)).prefill(
        {0: PROMPT}
    )
    stored = [
        tensor.float().flatten()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith("_scale")
    ]
    every = torch.cat(kept)
    assert torch.equal(every[every > 0].sort().values, torch.cat(stored).sort().values)
    expected = StageDriver(read_model(meant_by(folder))).prefill({0: PROMPT})
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_a_stage_reads_its_own_part_once(
    checkpoint: CheckpointMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_quantized(checkpoint("deepseek_v32"), tmp_path / "model", "fp8 blocks")
    model, reads = read_model(folder), []
    original = os.preadv

    def recording(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = original(descriptor, buffers, offset)
        reads.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", recording)
    model.load_stage(LayerRange(2, 3), numerics=Numerics.EXACT)
    own = [
        place
        for name, place in tensor_bytes(folder / "model.safetensors").items()
        if ".layers.2." in name
    ]
    assert sum(end - start for start, end in reads) == sum(end - start for start, end in own)
    assert all(any(start <= first and last <= end for start, end in own) for first, last in reads)


def test_every_part_counts_and_splits_do_not(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder = write_quantized(checkpoint("llama"), tmp_path / "model", "gptq")
    whole = read_stages(folder, 1)
    assert [read_stages(folder, size) for size in (2, 3)] == [whole] * 2
    places = tensor_bytes(folder / "model.safetensors")
    for ending in ("qweight", "scales", "qzeros"):
        start, _ = places[f"model.layers.1.mlp.up_proj.{ending}"]
        flip(folder / "model.safetensors", start)
        assert read_stages(folder, 2) != whole, ending
        flip(folder / "model.safetensors", start)
    assert read_stages(folder, 2) == whole


def test_pools_of_quantized_and_of_plain_weights_do_not_pair(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Even where they would compute the same: that is known of these two only because a test wrote
    them."""
    folder = write_quantized(checkpoint("llama"), tmp_path / "model", "fp8 blocks")
    again = write_quantized(checkpoint("llama"), tmp_path / "again", "fp8 blocks")
    mine, same, theirs = (
        plan_stage(WorkerConfig(model=path, num_pages=8)).compatibility(read_stages(path, size))
        for path, size in ((folder, 2), (again, 1), (meant_by(folder), 1))
    )
    check_compatible(mine, same.digest, same.text)
    with pytest.raises(IncompatiblePeerError, match=r"differ in config \(.* there\), weights \("):
        check_compatible(mine, theirs.digest, theirs.text)


def test_a_draft_in_the_same_files_is_dequantized_too(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = write_quantized(
        add_nextn(checkpoint("deepseek_v32"), tmp_path / "plain"), tmp_path / "model", "fp8 blocks"
    )
    drafts = [read_draft(path, read_model(path)) for path in (folder, meant_by(folder))]
    assert drafts[0].weight_bytes == drafts[1].weight_bytes
    for name, entry in (drafts[0].entries or {}).items():
        found, expected = torch.empty(entry.shape), torch.empty(entry.shape)
        read_tensor(entry, found, name=name, digest=None)
        read_tensor((drafts[1].entries or {})[name], expected, name=name, digest=None)
        assert torch.equal(found, expected), name
    drafts[0].load(numerics=Numerics.EXACT)


@pytest.mark.parametrize("layout", ["fp8 blocks", "int4 packed"])
def test_weight_bytes_count_the_final_form(
    layout: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = write_quantized(checkpoint("llama", dtype=torch.bfloat16), tmp_path / "model", layout)
    layers = LayerRange(1, 3)
    assert read_model(folder).weight_bytes(layers) == read_model(meant_by(folder)).weight_bytes(
        layers
    )
    assert (
        loaded_bytes(meant_by(folder))
        < loaded_bytes(folder)
        < 1.25 * loaded_bytes(meant_by(folder))
    ), "with scales"


def with_scales_of_the_cache(source: Path, path: Path) -> Path:
    """Add the scales of a quantized cache to the checkpoint, under every published name."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    for name in (
        "self_attn.k_scale",
        "self_attn.v_scale",
        "self_attn.kv_scale",
        "self_attn.k_proj.k_scale",
        "self_attn.v_proj.output_scale",
        "self_attn.attn.q_scale",
        "self_attn.attn.prob_scale",
    ):
        tensors[f"model.layers.0.{name}"] = torch.tensor(0.5)
    save_file(tensors, path / "model.safetensors")
    return path


CACHE_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}
ONLY_THE_CACHE: dict[str, dict[str, Any]] = {
    "without a word": {},
    "llm-compressor": {
        "config.json": {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "config_groups": {},
            "quantization_status": "compressed",
            "kv_cache_scheme": CACHE_SCHEME,
        }
    },
    "llm-compressor, older": {
        "config.json": {
            "quant_method": "compressed-tensors",
            "format": "naive-quantized",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["re:.*k_proj", "re:.*v_proj"],
                    "weights": None,
                    "input_activations": None,
                    "output_activations": CACHE_SCHEME,
                }
            },
        }
    },
    "modelopt": {
        "hf_quant_config.json": {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
        }
    },
    "modelopt in config.json": {
        "config.json": {
            "quant_method": "modelopt",
            "quant_algo": "NO_QUANT",
            "kv_cache_scheme": CACHE_SCHEME,
        }
    },
    "fp8 with every layer left out": {
        "config.json": {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "kv_cache_scheme": "static",
            "ignored_layers": ["re:.*"],
        }
    },
}


@pytest.mark.parametrize("form", ONLY_THE_CACHE)
def test_a_checkpoint_with_only_a_quantized_cache_is_the_plain_one(
    form: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    plain = checkpoint("llama")
    folder = with_scales_of_the_cache(plain, tmp_path / "model")
    for file, content in ONLY_THE_CACHE[form].items():
        if file == "config.json":
            content = {**json.loads((folder / file).read_text()), "quantization_config": content}
        (folder / file).write_text(json.dumps(content))
    assert torch.equal(
        StageDriver(read_model(folder), cuts=(1, 3)).prefill({0: PROMPT}),
        StageDriver(read_model(plain)).prefill({0: PROMPT}),
    )


@pytest.mark.parametrize(
    ("section", "own"),
    [
        (
            {"quant_algo": "FP8", "kv_cache_scheme": CACHE_SCHEME},
            {"quant_method": "modelopt", "quantization": {}},
        ),
        (
            {"quant_method": "modelopt", "ignore": ["lm_head"]},
            {"quantization": {"quant_algo": "FP8"}},
        ),
        (
            {"ignore": ["lm_head"]},
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
        ),
        (
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            {"producer": {"name": "modelopt"}},
        ),
    ],
)
def test_model_optimizer_may_name_itself_in_its_own_file(
    section: dict[str, Any], own: dict[str, Any], checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = write_quantized(checkpoint("llama"), tmp_path / "model", "modelopt")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert torch.equal(
        StageDriver(read_model(folder)).prefill({0: PROMPT}),
        StageDriver(read_model(meant_by(folder))).prefill({0: PROMPT}),
    )


CT, GPTQ, FP8 = (LAYOUTS[name].config for name in ("int8 channels", "gptq", "fp8 blocks"))


def with_weights(**fields: object) -> dict[str, Any]:
    group = CT["config_groups"]["group_0"]
    return {
        **CT,
        "config_groups": {"group_0": {**group, "weights": {**group["weights"], **fields}}},
    }


@pytest.mark.parametrize(
    ("section", "field", "complaint"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method",
            "'bitsandbytes' is not supported; known are awq, compressed-tensors",
        ),
        ({}, "quant_method", "quantization_config: quant_method is missing"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size", "rows and columns of a block"),
        ({**FP8, "fmt": "e5m2"}, "fmt", "'e5m2' is not supported"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_algo",
            "'NVFP4' is not supported; known are FP8",
        ),
        (
            {"quant_method": "awq", "version": "GEMV"},
            "version",
            "'gemv' is not supported, only 'gemm'",
        ),
        (
            {"quant_method": "awq", "backend": "llm-awq"},
            "backend",
            "stores weights in another order",
        ),
        ({**GPTQ, "bits": 3}, "bits", "3 are not supported"),
        ({**GPTQ, "group_size": 0}, "group_size", "-1 for whole rows"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format", "'marlin'"),
        ({**CT, "format": "nvfp4-pack-quantized"}, "format", "nvfp4-pack-quantized"),
        (
            {**CT, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config",
            "is not supported",
        ),
        ({**CT, "config_groups": {}}, "config_groups", "has 0 ways"),
        (with_weights(strategy="token"), "strategy", "'token' is not supported"),
        (with_weights(num_bits=4), "format", "4 bits is not supported"),
    ],
)
def test_an_unsupported_format_is_refused_by_name(
    broken: Path, section: dict[str, Any], field: str, complaint: str
) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_model(broken)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"weight_scale_inv": None},
            "up_proj.weight is F8_E4M3 and has no model.layers.0.mlp.up_proj.weight_scale_inv",
        ),
        (
            {"weight_scale_inv": torch.ones(2, 2)},
            r"scales of shape \[2, 2\] for a weight of \[104, 72\] in blocks of 16 x",
        ),
        (
            {"weight_scale_inv": torch.ones(6, 4, dtype=torch.int32)},
            "scales are I32, not one of F32",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(
    checkpoint: CheckpointMaker, tmp_path: Path, change: dict[str, Tensor | None], complaint: str
) -> None:
    folder = write_quantized(checkpoint("llama"), tmp_path / "model", "fp8 blocks")
    tensors: dict[str, Tensor | None] = dict(load_file(folder / "model.safetensors"))
    tensors |= {f"model.layers.0.mlp.up_proj.{ending}": part for ending, part in change.items()}
    save_file(
        {name: part for name, part in tensors.items() if part is not None},
        folder / "model.safetensors",
    )
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_model(folder)
    assert caught.value.field == "quantization_config"


def test_a_group_without_a_scale_is_refused(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder = write_quantized(checkpoint("llama"), tmp_path / "model", "gptq")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.g_idx"][3] = 5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="groups from 0 to 5; it has scales for 5"):
        read_model(folder).load_stage(LayerRange(0, 1), numerics=Numerics.EXACT)

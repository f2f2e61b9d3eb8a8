"""Writes tiny checkpoints in the layouts quantized models are published in, and what the formats
say they mean.

Names, types, packing and the config's section are as in the published files. What a weight means is
computed from its codes by the format's definition, in fp32, on whole matrices.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# As published: no norms, routers, convolutions, embeddings or heads.
_QUANTIZED = (
    "_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "wq_b.weight",
    "wk.weight",
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    ".w1.weight",
    ".w2.weight",
    ".w3.weight",
)


@dataclass(frozen=True)
class Layout:
    """`code` makes of a weight [out, in] its tensors, by their endings, and what they mean."""

    code: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    config: dict[str, Any]
    file: str = "config.json"  # or the file that holds `config` by itself
    extra: dict[str, Tensor] | None = None  # beside every weight, of activations


def coded(
    weight: Tensor,
    block: tuple[int, int],
    low: float,
    high: float,
    *,
    scale_dtype: torch.dtype,
    symmetric: bool = True,
    rounds: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes (fp32), scales and zero points by block, and the dequantized weight."""
    height, width = block[0] or weight.shape[0], block[1] or weight.shape[1]
    padded = torch.nn.functional.pad(
        weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height)
    )
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    if symmetric:
        scales = (tiles.abs().amax((1, 3)) / high).to(scale_dtype)
        zeros = torch.zeros_like(scales)
    else:
        scales = ((tiles.amax((1, 3)) - tiles.amin((1, 3))) / (high - low)).to(scale_dtype)
        zeros = (low - tiles.amin((1, 3)) / scales.float()).round().clamp(low + 1, high)

    def spread(by_block: Tensor) -> Tensor:
        whole = by_block.float().repeat_interleave(height, 0).repeat_interleave(width, 1)
        return whole[: weight.shape[0], : weight.shape[1]]

    codes = weight / spread(scales) + spread(zeros)
    codes = codes.round().clamp(low, high) if rounds else codes.to(torch.float8_e4m3fn).float()
    return codes, scales, zeros, (codes - spread(zeros)) * spread(scales)


def fp8(
    block: tuple[int, int],
    ending: str,
    scale_dtype: torch.dtype,
    *shape: int,
) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """Quantize to FP8. `shape` is that of the tensor of scales, -1 for the rest; in the order of
    blocks if not given."""

    def code(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, _, meant = coded(
            weight, block, -448, 448, scale_dtype=scale_dtype, rounds=False
        )
        return {
            "weight": codes.to(torch.float8_e4m3fn),
            ending: scales.view(shape or scales.shape),
        }, meant

    return code


def int8(
    block: tuple[int, int], *, symmetric: bool
) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    def code(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros, meant = coded(
            weight, block, -128, 127, scale_dtype=torch.bfloat16, symmetric=symmetric
        )
        points = {} if symmetric else {"weight_zero_point": zeros.to(torch.int8)}
        return {"weight": codes.to(torch.int8), "weight_scale": scales, **points}, meant

    return code


def packed(numbers: Tensor, bits: int, axis: int, order: tuple[int, ...]) -> Tensor:
    """Pack int32 words along `axis`, padded with zeros; the number at place i of a word's bits is
    number order[i] of it."""
    per_word = 32 // bits
    if axis == 0:
        return packed(numbers.t(), bits, 1, order).t().contiguous()
    wide = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % per_word)).view(
        len(numbers), -1, per_word
    )
    words = torch.zeros(wide.shape[:2], dtype=torch.long)
    for place in range(per_word):
        words |= wide[:, :, order[place]] << (bits * place)
    return (
        words.to(torch.int32)
        if bits * per_word < 32
        else (words - (words >> 31 << 32)).to(torch.int32)
    )


def int4_compressed(
    group: int, *, bits: int, symmetric: bool
) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """Return signed codes, stored with an offset that makes them positive."""
    offset, order = 1 << (bits - 1), tuple(range(32 // bits))

    def code(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros, meant = coded(
            weight, (1, group), -offset, offset - 1, scale_dtype=torch.bfloat16, symmetric=symmetric
        )
        parts = {
            "weight_packed": packed(codes + offset, bits, 1, order),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = packed(zeros + offset, bits, 0, order)
        return parts, meant

    return code


def awq(group: int) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def code(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros, meant = coded(
            weight, (1, group), 0, 15, scale_dtype=torch.float16, symmetric=False
        )
        return {
            "qweight": packed(codes.t(), 4, 1, order),
            "qzeros": packed(zeros.t(), 4, 1, order),
            "scales": scales.t().contiguous(),
        }, meant

    return code


def gptq(
    group: int, *, bits: int = 4, lacks: int = 1, reorders: bool = False
) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """Quantize as GPTQ. `reorders`: columns are grouped in their own order (`desc_act`)."""
    in_order = tuple(range(32 // bits))

    def code(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_columns = weight.shape[1]
        order = torch.randperm(num_columns) if reorders else torch.arange(num_columns)
        codes, scales, zeros, meant = coded(
            weight[:, order],
            (1, group),
            0,
            (1 << bits) - 1,
            symmetric=False,
            scale_dtype=torch.float16,
        )
        back = order.argsort()
        groups = back // (group or num_columns)
        return {
            "qweight": packed(codes[:, back].t(), bits, 0, in_order),
            "scales": scales.t().contiguous(),
            "qzeros": packed(zeros.t() - lacks, bits, 1, in_order),
            "g_idx": groups.to(torch.int32),
        }, meant[:, back]

    return code


def _compressed(form: str, **weights: object) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": {"dynamic": False, "observer": "minmax", "symmetric": True, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


_DEEPSEEK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
_ONE = torch.ones(())
LAYOUTS = {
    "fp8 blocks": Layout(
        fp8((16, 16), "weight_scale_inv", torch.float32),
        {**_DEEPSEEK, "weight_block_size": [16, 16]},
    ),
    "fp8 blocks of 128": Layout(
        fp8((128, 128), "weight_scale_inv", torch.bfloat16),
        {**_DEEPSEEK, "weight_block_size": [128, 128]},
    ),
    "fp8 tensors": Layout(
        fp8((0, 0), "weight_scale", torch.float32, 1),
        {"quant_method": "fp8", "activation_scheme": "static"},
        extra={"input_scale": _ONE},
    ),
    "fp8 channels": Layout(
        fp8((1, 0), "weight_scale", torch.bfloat16),
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "fp8 fbgemm": Layout(
        fp8((1, 0), "weight_scale", torch.float32),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    "modelopt": Layout(
        fp8((0, 0), "weight_scale", torch.float32, *()),
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        },
        file="hf_quant_config.json",
        extra={"input_scale": _ONE, "k_scale": _ONE},
    ),
    "modelopt channels": Layout(
        fp8((1, 0), "weight_scale", torch.float32, -1),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    # What Model Optimizer has written without a `quant_method`, in config.json or with it in the
    # file of its own.
    "modelopt by producer": Layout(
        fp8((0, 0), "weight_scale", torch.float32, *()),
        {
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {"quant_algo": "FP8"},
        },
    ),
    "fp8 of MiniMax": Layout(
        fp8((16, 16), "weight_scale_inv", torch.float32),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "weight_block_size": [16, 16],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    ),
    "int8 channels": Layout(
        int8((1, 0), symmetric=True),
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "int8 groups": Layout(
        int8((1, 16), symmetric=False),
        _compressed(
            "int-quantized",
            num_bits=8,
            type="int",
            strategy="group",
            group_size=16,
            symmetric=False,
        ),
    ),
    "int4 packed": Layout(
        int4_compressed(32, bits=4, symmetric=True),
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    ),
    "int4 packed with zeros": Layout(
        int4_compressed(16, bits=4, symmetric=False),
        _compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="group",
            group_size=16,
            symmetric=False,
        ),
    ),
    "int8 packed": Layout(
        int4_compressed(0, bits=8, symmetric=True),
        _compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "awq": Layout(
        awq(16),
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
    ),
    "awq in capitals": Layout(
        awq(16),
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 16,
            "version": "GEMM",
            "backend": "auto",
            "zero_point": True,
            "modules_to_not_convert": None,
        },
    ),
    "gptq": Layout(gptq(16), _GPTQ),
    "gptq reordered": Layout(gptq(16, reorders=True), {**_GPTQ, "desc_act": True}),
    "gptq v2 of 8 bits": Layout(
        gptq(0, bits=8, lacks=0),
        {**_GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
}


def write_quantized(source: Path, path: Path, layout: str) -> Path:
    """Write checkpoint `source` in a layout, and next to it (`path` with "-meant") the dequantized
    one."""
    chosen, config = LAYOUTS[layout], json.loads((source / "config.json").read_text())
    quantized: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    torch.manual_seed(3)
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(_QUANTIZED):
            quantized[name] = meant[name] = tensor
            continue
        parts, value = chosen.code(tensor.float())
        stem = name.removesuffix("weight")
        quantized |= {stem + ending: part.contiguous() for ending, part in parts.items()}
        quantized |= {stem + ending: part.clone() for ending, part in (chosen.extra or {}).items()}
        meant[name] = value.to(tensor.dtype).contiguous()
    dense = path.with_name(f"{path.name}-meant")
    for folder, tensors in ((path, quantized), (dense, meant)):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    if chosen.file == "config.json":
        (path / "config.json").write_text(
            json.dumps({**config, "quantization_config": chosen.config})
        )
    else:
        (path / chosen.file).write_text(json.dumps(chosen.config))
    return path


def meant_by(path: Path) -> Path:
    return path.with_name(f"{path.name}-meant")

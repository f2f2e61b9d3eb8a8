"""Which quantised checkpoints are read, and what their configs say about the tensors.

One function for each `quant_method`. What only concerns activations and the cache (their scales, ranges, types) is left
out: both stay in the model's type, which is closer to the model that was quantised than what its file describes.
"""

import re
from collections.abc import Callable
from pathlib import Path

from models.blocks.config import RawConfig, read_config_file
from models.checkpoint import Checkpoint, open_tensors
from models.quantised import Packing, QuantisedFormat, dequantised

_SECTIONS = ("quantization_config", "compression_config")  # the second is compressed-tensors' older name
_MODELOPT_FILE = "hf_quant_config.json"  # where its config is, unless it is in config.json
_OF_ACTIVATIONS = re.compile(r"\.(input|output|activation)_(scale|zero_point)$|\.(q|k|v|kv|prob)_scale$"
                             r"|\.weight_shape$")
_IN_ORDER = {4: (0, 1, 2, 3, 4, 5, 6, 7), 8: (0, 1, 2, 3)}
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_ALL = 0


def open_checkpoint(folder: Path, config: RawConfig, inputs_first: tuple[str, ...] = ()) -> Checkpoint:
    """The weights in `folder`, those of a quantised checkpoint in the model's own type. `config`: of the text model.
    `inputs_first`: ends of names of weights that are stored [in, out].

    Raises:
        ConfigError: no safetensors files, a damaged one, or a quantisation that is not supported; the field is named.
    """
    tensors, form = open_tensors(folder), _format(folder, config)
    if form is None:
        return Checkpoint(dict(tensors))
    weights = {name: entry for name, entry in tensors.items() if not _OF_ACTIVATIONS.search(name)}
    return dequantised(weights, form, inputs_first)


def _format(folder: Path, config: RawConfig) -> QuantisedFormat | None:
    """None: the checkpoint is not quantised."""
    section = next((config.section(name) for name in _SECTIONS if name in config), None)
    if section is None:
        file = folder / _MODELOPT_FILE
        return _read_modelopt(read_config_file(file)) if file.is_file() else None
    method = section.text("quant_method")
    if method not in _METHODS:
        raise section.fail("quant_method", f"{method!r} is not supported; known are {', '.join(sorted(_METHODS))}")
    return _METHODS[method](section)


def _fp8(block: tuple[int, int]) -> QuantisedFormat:
    return QuantisedFormat(codes="", codes_dtype="F8_E4M3", weight="", scales=("_scale_inv", "_scale"), block=block)


def _read_fp8(raw: RawConfig) -> QuantisedFormat:
    """DeepSeek's, also of Qwen3, Qwen3.5 and GLM: blocks as `weight_block_size` says, or one scale for each tensor."""
    raw.require("fmt", only="e4m3", default="e4m3")
    raw.require("expert_dtype", only="fp8", default="fp8")
    if "weight_block_size" not in raw:
        return _fp8((_ALL, _ALL))
    return _fp8(_pair(raw, "weight_block_size"))


def _read_fbgemm_fp8(_raw: RawConfig) -> QuantisedFormat:
    return _fp8((1, _ALL))


def _read_modelopt(raw: RawConfig) -> QuantisedFormat | None:
    """Of NVIDIA's Model Optimizer: in config.json, or below `quantization` in a file of its own. None where only the
    cache is quantised."""
    raw = raw.section("quantization") if "quantization" in raw else raw
    if "quant_algo" not in raw:
        return None
    blocks = {"FP8": (_ALL, _ALL), "FP8_PER_CHANNEL_PER_TOKEN": (1, _ALL), "FP8_PB_WO": (128, 128)}
    algorithm = raw.text("quant_algo").upper()
    if algorithm not in blocks:
        raise raw.fail("quant_algo", f"{algorithm!r} is not supported; known are {', '.join(blocks)}")
    return _fp8(blocks[algorithm])


def _read_compressed_tensors(raw: RawConfig) -> QuantisedFormat:
    """Of llm-compressor. Several groups of layers may differ in how activations are quantised, not in how weights are.
    """
    for name in ("sparsity_config", "transform_config"):
        if name in raw and not _is_empty(raw.section(name)):
            raise raw.fail(name, "is not supported")
    groups = raw.section("config_groups")
    forms = {name: _read_group(groups.section(name), raw) for name in groups.as_dict()
             if "weights" in groups.section(name)}
    if len(set(forms.values())) != 1:
        raise raw.fail("config_groups", f"must quantise weights in one way, has {len(set(forms.values()))} ways in "
                                        f"groups {', '.join(sorted(forms)) or 'none'}")
    return next(iter(forms.values()))


def _is_empty(section: RawConfig) -> bool:
    """Whether a section of compressed-tensors describes nothing that was done to the weights."""
    return section.as_dict().get("format") == "dense" or not any(section.as_dict().values())


def _read_group(group: RawConfig, whole: RawConfig) -> QuantisedFormat:
    weights, bits = group.section("weights"), group.section("weights").integer("num_bits")
    form, kind = (group if "format" in group else whole).text("format"), weights.text("type", "int")
    block = _strategy_block(weights)
    symmetric_zero = 0 if weights.flag("symmetric", default=True) else None
    if form in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8):
        return _fp8(block)
    if form in ("int-quantized", "naive-quantized") and (kind, bits) == ("int", 8):
        return QuantisedFormat(codes="", codes_dtype="I8", weight="", scales=("_scale",), zeros="_zero_point",
                               groups="_g_idx", block=block, zero=symmetric_zero)
    if form == "pack-quantized" and kind == "int" and bits in _IN_ORDER:
        packing = Packing(bits=bits, codes_axis=1, zeros_axis=0, places=_IN_ORDER[bits])
        return QuantisedFormat(codes="_packed", codes_dtype="I32", weight="", scales=("_scale",), zeros="_zero_point",
                               groups="_g_idx", block=block, packing=packing,
                               zero=None if symmetric_zero is None else 1 << (bits - 1))
    raise whole.fail("format", f"{form!r} with weights of type {kind!r} and {bits} bits is not supported; known are "
                               f"float-quantized with 8, int-quantized with 8, pack-quantized with 4 or 8")


def _strategy_block(weights: RawConfig) -> tuple[int, int]:
    strategy = weights.text("strategy", "group" if "group_size" in weights else "tensor")
    if strategy == "group":
        return 1, _group_size(weights)
    if strategy == "block":
        return _pair(weights, "block_structure")
    blocks = {"tensor": (_ALL, _ALL), "channel": (1, _ALL)}
    if strategy not in blocks:
        raise weights.fail("strategy", f"{strategy!r} is not supported; known are tensor, channel, group, block")
    return blocks[strategy]


def _read_awq(raw: RawConfig) -> QuantisedFormat:
    raw.require("bits", only=4, default=4)
    raw.require("version", only="gemm", default="gemm")
    raw.require("backend", only="autoawq", default="autoawq")
    raw.require("zero_point", only=True, default=True)
    return QuantisedFormat(
        codes=".qweight", codes_dtype="I32", weight=".weight", scales=(".scales",), zeros=".qzeros",
        block=(1, _group_size(raw)), zero=None,
        packing=Packing(bits=4, codes_axis=1, zeros_axis=1, places=_AWQ_PLACES, is_transposed=True))


def _read_gptq(raw: RawConfig) -> QuantisedFormat:
    """The first version of the format stores each zero point less one."""
    bits, version = raw.integer("bits"), raw.text("checkpoint_format", "gptq")
    if bits not in _IN_ORDER:
        raise raw.fail("bits", f"{bits} are not supported, only 4 and 8")
    if version not in ("gptq", "gptq_v2"):
        raise raw.fail("checkpoint_format", f"{version!r} is not supported, only 'gptq' and 'gptq_v2'")
    return QuantisedFormat(
        codes=".qweight", codes_dtype="I32", weight=".weight", scales=(".scales",), zeros=".qzeros", groups=".g_idx",
        block=(1, _group_size(raw)), zero=None,
        packing=Packing(bits=bits, codes_axis=0, zeros_axis=1, places=_IN_ORDER[bits], is_transposed=True,
                        added_zero=1 if version == "gptq" else 0))


def _group_size(raw: RawConfig) -> int:
    size = raw.integer("group_size", 128, minimum=-1)
    if size == 0:
        raise raw.fail("group_size", "must be positive, or -1 for whole rows")
    return max(size, _ALL)


def _pair(raw: RawConfig, name: str) -> tuple[int, int]:
    values = raw.integers(name)
    if len(values) != 2 or min(values) < 1:
        raise raw.fail(name, f"must be the rows and columns of a block, is {list(values)}")
    return values[0], values[1]


_METHODS: dict[str, Callable[[RawConfig], QuantisedFormat | None]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
}

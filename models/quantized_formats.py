"""The supported formats of quantized checkpoints, as read from their configs.

There is one function per `quant_method`. Settings for activations and the cache (scales, ranges,
dtypes) are ignored. Both stay in the model's dtype, which is closer to the original model than the
quantized form.
"""

import re
from collections.abc import Callable
from pathlib import Path

from models.blocks.config import RawConfig, read_config_file
from models.checkpoint import Checkpoint, open_tensors
from models.mxfp4 import Mxfp4Format
from models.quantized import Packing, QuantizedFormat, dequantized

# The second name is the older one of compressed-tensors.
_SECTIONS = (
    "quantization_config",
    "compression_config",
)
_MODELOPT = "modelopt"
_MODELOPT_FILE = "hf_quant_config.json"  # holds the config if config.json does not
_OF_ACTIVATIONS = re.compile(
    r"\.(input|output|activation)_(scale|zero_point)$|\.(q|k|v|kv|prob)_scale$"
    r"|\.weight_shape$"
)
_IN_ORDER = {4: (0, 1, 2, 3, 4, 5, 6, 7), 8: (0, 1, 2, 3)}
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_ALL = 0
# names that Model Optimizer writes if it left the weights unchanged
_NO_ALGORITHM = ("NONE", "NO_QUANT")
# AWQ's `backend` names the library that computes the products. All but llm-awq store weights alike.
_OTHER_AWQ = "llm-awq"


def open_checkpoint(
    folder: Path, config: RawConfig, inputs_first: tuple[str, ...] = ()
) -> Checkpoint:
    """Open the weights in `folder`; quantized weights are converted to the model's dtype.

    `config` is that of the text model. `inputs_first` has suffixes of weights that are stored [in,
    out].

    Raises:
        ConfigError: there are no safetensors files, one is damaged, or the quantization is not
            supported. The message names the field.
    """
    form = _format(folder, config)
    # Scales of a quantized cache may accompany plain weights, even if the config does not mention
    # it.
    weights = {
        name: entry
        for name, entry in open_tensors(folder).items()
        if not _OF_ACTIVATIONS.search(name)
    }
    if form is None:
        return Checkpoint(weights)
    if isinstance(form, Mxfp4Format):
        return form.dequantized(weights, inputs_first)
    return dequantized(weights, form, inputs_first)


def _format(folder: Path, config: RawConfig) -> QuantizedFormat | Mxfp4Format | None:
    """Return the format, or None if the weights are not quantized."""
    section = next((config.section(name) for name in _SECTIONS if name in config), None)
    file = folder / _MODELOPT_FILE
    own = read_config_file(file) if file.is_file() else None
    if section is None:
        return None if own is None else _read_modelopt(own)
    is_modelopt = "quant_method" not in section and (own is not None or _is_of_modelopt(section))
    method = _MODELOPT if is_modelopt else section.text("quant_method").lower()
    method = method.replace("compressed_tensors", "compressed-tensors")
    if method == _MODELOPT and own is not None and _algorithms(section) is None:
        section = own
    if method not in _METHODS:
        raise section.fail(
            "quant_method", f"{method!r} is not supported; known are {', '.join(sorted(_METHODS))}"
        )
    return _METHODS[method](section)


def _is_of_modelopt(section: RawConfig) -> bool:
    """Return whether the section names Model Optimizer, which long wrote no `quant_method`."""
    return "producer" in section and section.section("producer").as_dict().get("name") == _MODELOPT


def _algorithms(raw: RawConfig) -> RawConfig | None:
    """Return the section that names Model Optimizer's algorithm, or None.

    It is this section or its `quantization`.
    """
    nested = raw.section("quantization") if "quantization" in raw else raw
    return nested if "quant_algo" in nested else None


def _read_mxfp4(_raw: RawConfig) -> Mxfp4Format:
    return Mxfp4Format()


def _fp8(block: tuple[int, int]) -> QuantizedFormat:
    return QuantizedFormat(
        codes="", codes_dtype="F8_E4M3", weight="", scales=("_scale_inv", "_scale"), block=block
    )


def _read_fp8(raw: RawConfig) -> QuantizedFormat:
    """Read DeepSeek's format, which Qwen3, Qwen3.5 and GLM also use.

    Blocks are given by `weight_block_size`. Without it there is one scale per tensor.
    """
    if (form := raw.text("fmt", "e4m3").lower()) not in ("e4m3", "float8_e4m3fn"):
        raise raw.fail(
            "fmt", f"{form!r} is not supported, only 'e4m3' and 'float8_e4m3fn', which are the same"
        )
    raw.require("expert_dtype", only="fp8", default="fp8")
    if "weight_block_size" not in raw:
        return _fp8((_ALL, _ALL))
    return _fp8(_pair(raw, "weight_block_size"))


def _read_fbgemm_fp8(_raw: RawConfig) -> QuantizedFormat:
    return _fp8((1, _ALL))


def _read_modelopt(raw: RawConfig) -> QuantizedFormat | None:
    """Read the format of NVIDIA's Model Optimizer, from config.json or a separate file.

    Return None if only the cache is quantized.
    """
    named = _algorithms(raw)
    if named is None or named.text("quant_algo").upper() in _NO_ALGORITHM:
        return None
    raw = named
    blocks = {"FP8": (_ALL, _ALL), "FP8_PER_CHANNEL_PER_TOKEN": (1, _ALL), "FP8_PB_WO": (128, 128)}
    algorithm = raw.text("quant_algo").upper()
    if algorithm not in blocks:
        raise raw.fail(
            "quant_algo", f"{algorithm!r} is not supported; known are {', '.join(blocks)}"
        )
    return _fp8(blocks[algorithm])


def _read_compressed_tensors(raw: RawConfig) -> QuantizedFormat | None:
    """Read the format of llm-compressor.

    Groups of layers may differ in how activations are quantized, but not in how weights are. Return
    None if only activations or the cache are quantized.
    """
    for name in ("sparsity_config", "transform_config"):
        if name in raw and not _is_empty(raw.section(name)):
            raise raw.fail(name, "is not supported")
    groups = raw.section("config_groups") if "config_groups" in raw else RawConfig({})
    forms = {
        name: _read_group(groups.section(name), raw)
        for name in groups.as_dict()
        if "weights" in groups.section(name)
    }
    if not forms and ("kv_cache_scheme" in raw or groups.as_dict()):
        return None
    if len(set(forms.values())) != 1:
        raise raw.fail(
            "config_groups",
            f"must quantize weights in one way, has {len(set(forms.values()))} ways in "
            f"groups {', '.join(sorted(forms)) or 'none'}",
        )
    return next(iter(forms.values()))


def _is_empty(section: RawConfig) -> bool:
    """Return whether a section of compressed-tensors describes no change of the weights."""
    return section.as_dict().get("format") == "dense" or not any(section.as_dict().values())


def _read_group(group: RawConfig, whole: RawConfig) -> QuantizedFormat:
    weights = group.section("weights")
    bits = group.section("weights").integer("num_bits")
    form = (group if "format" in group else whole).text("format")
    kind = weights.text("type", "int")
    block = _strategy_block(weights)
    symmetric_zero = 0 if weights.flag("symmetric", default=True) else None
    if form in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8):
        return _fp8(block)
    if form in ("int-quantized", "naive-quantized") and (kind, bits) == ("int", 8):
        return QuantizedFormat(
            codes="",
            codes_dtype="I8",
            weight="",
            scales=("_scale",),
            zeros="_zero_point",
            groups="_g_idx",
            block=block,
            zero=symmetric_zero,
        )
    if form == "pack-quantized" and kind == "int" and bits in _IN_ORDER:
        packing = Packing(bits=bits, codes_axis=1, zeros_axis=0, places=_IN_ORDER[bits])
        return QuantizedFormat(
            codes="_packed",
            codes_dtype="I32",
            weight="",
            scales=("_scale",),
            zeros="_zero_point",
            groups="_g_idx",
            block=block,
            packing=packing,
            zero=None if symmetric_zero is None else 1 << (bits - 1),
        )
    raise whole.fail(
        "format",
        f"{form!r} with weights of type {kind!r} and {bits} bits is not supported; known are "
        f"float-quantized with 8, int-quantized with 8, pack-quantized with 4 or 8",
    )


def _strategy_block(weights: RawConfig) -> tuple[int, int]:
    strategy = weights.text("strategy", "group" if "group_size" in weights else "tensor")
    if strategy == "group":
        return 1, _group_size(weights)
    if strategy == "block":
        return _pair(weights, "block_structure")
    blocks = {"tensor": (_ALL, _ALL), "channel": (1, _ALL)}
    if strategy not in blocks:
        raise weights.fail(
            "strategy", f"{strategy!r} is not supported; known are tensor, channel, group, block"
        )
    return blocks[strategy]


def _read_awq(raw: RawConfig) -> QuantizedFormat:
    raw.require("bits", only=4, default=4)
    field = "version" if "version" in raw else "format"
    if (version := raw.text(field, "gemm").lower()) != "gemm":
        raise raw.fail(field, f"{version!r} is not supported, only 'gemm'")
    if raw.text("backend", "auto").lower() == _OTHER_AWQ:
        raise raw.fail(
            "backend", f"{_OTHER_AWQ!r} is not supported: it stores weights in another order"
        )
    raw.require("zero_point", only=True, default=True)
    return QuantizedFormat(
        codes=".qweight",
        codes_dtype="I32",
        weight=".weight",
        scales=(".scales",),
        zeros=".qzeros",
        block=(1, _group_size(raw)),
        zero=None,
        packing=Packing(bits=4, codes_axis=1, zeros_axis=1, places=_AWQ_PLACES, is_transposed=True),
    )


def _read_gptq(raw: RawConfig) -> QuantizedFormat:
    """Read GPTQ's format. Its first version stores each zero point minus one."""
    field = "checkpoint_format" if "checkpoint_format" in raw else "format"
    bits = raw.integer("bits")
    version = raw.text(field, "gptq").lower()
    if bits not in _IN_ORDER:
        raise raw.fail("bits", f"{bits} are not supported, only 4 and 8")
    if version not in ("gptq", "gptq_v2"):
        raise raw.fail(field, f"{version!r} is not supported, only 'gptq' and 'gptq_v2'")
    return QuantizedFormat(
        codes=".qweight",
        codes_dtype="I32",
        weight=".weight",
        scales=(".scales",),
        zeros=".qzeros",
        groups=".g_idx",
        block=(1, _group_size(raw)),
        zero=None,
        packing=Packing(
            bits=bits,
            codes_axis=0,
            zeros_axis=1,
            places=_IN_ORDER[bits],
            is_transposed=True,
            added_zero=1 if version == "gptq" else 0,
        ),
    )


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


_METHODS: dict[str, Callable[[RawConfig], QuantizedFormat | Mxfp4Format | None]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "compressed-tensors": _read_compressed_tensors,
    _MODELOPT: _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}

"""Tensors of a GGUF file under the names of transformers, in its order of rows.

llama.cpp stores the rows of Llama's queries and keys in pairs for its rope, experts of a layer as one
tensor, and Gemma's norms with 1 added. A tensor is yielded in parts, so that a large one is never in
memory whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.gguf.metadata import GgufMetadata, refused

PART_BYTES = 64 << 20  # of float32 values
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
ROPE_FREQS = "rope_freqs.weight"  # read with the settings


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of the checkpoint; `parts` yields float32 arrays that are its rows in order."""

    name: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[np.ndarray]]


def named_tensors(metadata: GgufMetadata, stored: Any) -> Iterator[NamedTensor]:  # noqa: ANN401
    """Yield the tensors of a `gguf.ReaderTensor`: one, or one for each expert.

    Raises:
        ConfigError: the name has no counterpart.
    """
    name: str = stored.name
    if name == ROPE_FREQS:
        return
    if name in _OUTER:
        yield _whole(metadata, stored, _OUTER[name])
        return
    prefix, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    kind, _, suffix = part.rpartition(".")
    names = _GEMMA_LAYER if metadata.architecture == "gemma3" else _LAYER
    if prefix != "blk" or not index.isdecimal() or suffix not in ("weight", "bias"):
        raise refused(f"tensor {name!r} is unknown")
    layer = f"model.layers.{index}"
    if kind in _EXPERTS and suffix == "weight":
        for expert in range(stored.data.shape[0]):
            target = f"{layer}.mlp.experts.{expert}.{_EXPERTS[kind]}.weight"
            yield _tensor(target, stored, stored.data[expert])
    elif kind in names:
        yield _whole(metadata, stored, f"{layer}.{names[kind]}.{suffix}")
    else:
        raise refused(f"tensor {name!r} of architecture {metadata.architecture!r} is unknown")


def _whole(metadata: GgufMetadata, stored: Any, target: str) -> NamedTensor:  # noqa: ANN401
    data = stored.data
    if metadata.architecture == "llama" and "self_attn.q_proj" in target:
        data = _unpaired(data, metadata.count("attention.head_count"))
    if metadata.architecture == "llama" and "self_attn.k_proj" in target:
        heads = metadata.count("attention.head_count")
        data = _unpaired(data, metadata.count("attention.head_count_kv", heads))
    if target.endswith("shared_expert_gate.weight"):
        data = data.reshape(1, -1)
    is_shifted = metadata.architecture == "gemma3" and target.endswith("norm.weight")
    return _tensor(target, stored, data, added=1.0 if is_shifted else 0.0)


def _unpaired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as two halves of each head: llama.cpp stores the first of either half, the second
    of either half, and so on.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _tensor(target: str, stored: Any, data: np.ndarray, *, added: float = 0.0) -> NamedTensor:  # noqa: ANN401
    """Return a tensor from rows as they are stored. `added` is what llama.cpp adds to every value."""
    from gguf.quants import dequantize, quant_shape_from_byte_shape

    kind = stored.tensor_type
    shape = quant_shape_from_byte_shape(data.shape, kind) if data.dtype == np.uint8 else data.shape

    def parts() -> Iterator[np.ndarray]:
        flat = data.reshape(-1, data.shape[-1])
        step = max(PART_BYTES // (4 * shape[-1]), 1)
        for start in range(0, flat.shape[0], step):
            values = dequantize(flat[start : start + step], kind).astype(np.float32, copy=False)
            yield values - np.float32(added) if added else values

    return NamedTensor(target, tuple(int(size) for size in shape), parts)

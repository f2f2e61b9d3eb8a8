"""Random weights of `bench.engine_sides.MODEL` as files for the other engines."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.engine_sides import MODEL
from engine.core.numerics import WeightFormat
from models.blocks.random_weights import RandomWeights

_KINDS = {WeightFormat.MODEL: "BF16", WeightFormat.INT8: "Q8_0", WeightFormat.INT4: "Q4_0"}
_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _number(name: str) -> int:
    value = MODEL[name]
    assert isinstance(value, int)
    return value


def _real(name: str) -> float:
    value = MODEL[name]
    assert isinstance(value, int | float)
    return value


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model, by its name without `model.` and `.weight`."""
    hidden = _number("hidden_size")
    inner = _number("intermediate_size")
    head = _number("head_dim")
    queries = _number("num_attention_heads") * head
    keys = _number("num_key_value_heads") * head
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (_number("vocab_size"), hidden),
        "norm": (hidden,),
    }
    for index in range(_number("num_hidden_layers")):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _tensor(source: RandomWeights, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    source.read(f"{name}.weight", tensor)
    return tensor


def write_checkpoint(folder: Path) -> Path:
    """Write config.json and one safetensors file, unless they exist; return the folder."""
    config = folder / "config.json"
    if not config.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = RandomWeights(seed=0)
        tensors = {
            f"model.{name}.weight": _tensor(source, name, shape)
            for name, shape in _shapes().items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config.write_text(json.dumps(MODEL))
    return folder


def write_gguf(path: Path, weight_format: WeightFormat = WeightFormat.MODEL) -> Path:
    """Write the same for llama.cpp with the package `gguf`, unless it exists; return the path.

    Coded matrices are in Q8_0 or Q4_0, the embedding, which is also the head, in Q8_0.

    Raises:
        ModuleNotFoundError: `gguf` is not installed.
    """
    if path.exists():
        return path
    import gguf  # of llama.cpp, on machines that compare with it

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "qwen3")
    writer.add_block_count(_number("num_hidden_layers"))
    writer.add_context_length(_number("max_position_embeddings"))
    writer.add_embedding_length(_number("hidden_size"))
    writer.add_feed_forward_length(_number("intermediate_size"))
    writer.add_head_count(_number("num_attention_heads"))
    writer.add_head_count_kv(_number("num_key_value_heads"))
    writer.add_key_length(_number("head_dim"))
    writer.add_value_length(_number("head_dim"))
    writer.add_rope_freq_base(_real("rope_theta"))
    writer.add_layer_norm_rms_eps(_real("rms_norm_eps"))
    writer.add_vocab_size(_number("vocab_size"))
    writer.add_tokenizer_model("none")
    source = RandomWeights(seed=0)
    for name, shape in _shapes().items():
        tensor = _tensor(source, name, shape)
        if len(shape) == 1:
            writer.add_tensor(_gguf_name(name), tensor.float().numpy())
            continue
        is_head = name == "embed_tokens"
        kind = _KINDS[weight_format.of_head if is_head else weight_format]
        stored = (
            gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind])
            if weight_format.is_coded
            else tensor.view(torch.uint8).numpy()
        )
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path


def _gguf_name(name: str) -> str:
    if not name.startswith("layers."):
        return f"{_GGUF_NAMES[name]}.weight"
    _, index, part = name.split(".", 2)
    return f"blk.{index}.{_GGUF_NAMES[part]}.weight"

"""GGUF files of tiny checkpoints, as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "mlp.gate": "ffn_gate_inp",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SPECIAL = ("<unk>", "<s>", "</s>")


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Add a byte-level tokenizer with one merge, of as many tokens as the model has rows."""
    tokens = [*SPECIAL, "a", "b", "ab"]
    tokens += [f"t{index}" for index in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (vocab_size - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(checkpoint: Path, file: Path) -> Path:
    """Write the checkpoint as float32; return the file."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = {
        name: value.float() for name, value in load_file(checkpoint / "model.safetensors").items()
    }
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    _add_settings(writer, config)
    add_tokenizer(writer, config["vocab_size"])
    for name, value in _stored(config, tensors).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_settings(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _stored(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """Return the tensors by llama.cpp's names, changed as it changes them."""
    names = _GEMMA_NAMES if config["model_type"] == "gemma3_text" else _NAMES
    stored: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if stem in names:
            stored[f"{names[stem]}.{suffix}"] = _changed(config, stem, value)
            continue
        _, _, index, part = stem.split(".", 3)
        if part.startswith("mlp.experts"):
            number, _, projection = part.removeprefix("mlp.experts.").partition(".")
            kind = f"blk.{index}.ffn_{projection.removesuffix('_proj')}_exps.weight"
            experts.setdefault(kind, {})[int(number)] = value
        else:
            stored[f"blk.{index}.{names[part]}.{suffix}"] = _changed(config, part, value)
    for kind, parts in experts.items():
        stored[kind] = torch.stack([parts[number] for number in sorted(parts)]).numpy()
    return stored


def _changed(config: Mapping[str, Any], part: str, value: torch.Tensor) -> np.ndarray:
    if config["model_type"] == "gemma3_text" and part.endswith("norm"):
        value = value + 1
    if config["model_type"] == "llama" and part.endswith(("q_proj", "k_proj")):
        key = "num_key_value_heads" if part.endswith("k_proj") else "num_attention_heads"
        heads = config[key]
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        value = halves.transpose(1, 2).reshape(value.shape)
    return value.contiguous().numpy()

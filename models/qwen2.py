"""Qwen2: Llama with biases on q, k and v."""

from models.blocks.attention import AttentionSpec, read_attention
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    attention = read_qwen2_attention(raw, qkv_bias=True)
    layer = LayerSpec(attention, read_mlp(raw))
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim),
        layers=(layer,) * raw.integer("num_hidden_layers"),
    )


def read_qwen2_attention(raw: RawConfig, *, qkv_bias: bool) -> AttentionSpec:
    raw.require("use_sliding_window", only=False, default=False)
    return read_attention(raw, qkv_bias=qkv_bias)

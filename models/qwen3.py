"""Qwen3: Llama with a separate head_dim, and a norm on each head of q and k before rope."""

from models.blocks.attention import AttentionSpec, read_attention
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder, read_norm


def read_decoder(raw: RawConfig) -> DecoderSpec:
    attention = read_qwen3_attention(raw)
    layer = LayerSpec(attention, read_mlp(raw))
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim),
        layers=(layer,) * raw.integer("num_hidden_layers"),
    )


def read_qwen3_attention(raw: RawConfig) -> AttentionSpec:
    raw.require("use_sliding_window", only=False, default=False)
    bias = raw.flag("attention_bias", default=False)
    return read_attention(raw, qkv_bias=bias, output_bias=bias, qk_norm=read_norm(raw))

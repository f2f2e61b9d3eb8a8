"""Seed-OSS: Llama with biases on q, k and v, and its own field for that of the output."""

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    attention = read_attention(
        raw,
        qkv_bias=raw.flag("attention_bias", default=True),
        output_bias=raw.flag("attention_out_bias", default=False),
    )
    layer = LayerSpec(attention, read_mlp(raw, bias=raw.flag("mlp_bias", default=False)))
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim),
        layers=(layer,) * raw.integer("num_hidden_layers"),
    )

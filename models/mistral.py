"""Mistral: Llama without biases, whose heads may be wider or narrower than hidden_size / num_attention_heads."""

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    raw.require("sliding_window", only=None, default=None)
    attention = read_attention(raw)
    return assemble_decoder(raw, rope=read_rope(raw, head_dim=attention.head_dim),
                            layers=(LayerSpec(attention, read_mlp(raw)),) * raw.integer("num_hidden_layers"))

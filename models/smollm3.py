"""SmolLM3: Llama in which every fourth layer has no positions."""

from dataclasses import replace

from models.blocks.attention import Rotation, read_attention, read_rotating_layers
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    raw.require("use_sliding_window", only=False, default=False)
    bias = raw.flag("attention_bias", default=False)
    rotated = read_attention(raw, qkv_bias=bias, output_bias=bias)
    bare = replace(rotated, rotation=Rotation.NONE)
    feed_forward = read_mlp(raw, bias=raw.flag("mlp_bias", default=False))
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=rotated.head_dim, default_theta=2_000_000.0),
        layers=tuple(
            LayerSpec(rotated if rotates else bare, feed_forward)
            for rotates in read_rotating_layers(raw)
        ),
    )

"""Qwen3.5: three layers of Gated DeltaNet per layer of gated attention.

Norms are zero-centred, and rope rotates a quarter of each head. Only the text model is supported:
`text_config` of a multimodal wrapper. Its interleaved rope has three rows of positions, which are
equal for text. So it is plain partial rope.
"""

from collections.abc import Sequence

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.gated_delta_net import read_gated_delta_net
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import (
    FULL_ATTENTION,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    assemble_decoder,
    read_layer_kinds,
    read_norm,
)

_LINEAR = "linear_attention"


def read_decoder(raw: RawConfig) -> DecoderSpec:
    return read_hybrid_decoder(raw, [read_mlp(raw)] * raw.integer("num_hidden_layers"))


def read_hybrid_decoder(
    raw: RawConfig, feed_forwards: Sequence[FeedForwardSpec], *, is_interleaved: bool = False
) -> DecoderSpec:
    """Return the hybrid stack with these feed-forwards.

    For `is_interleaved` see `GatedDeltaNetSpec`.
    """
    norm = read_norm(raw, zero_centred=True)
    raw.require("attention_bias", only=False, default=False)
    raw.require("attn_output_gate", only=True, default=True)
    attention = read_attention(raw, qk_norm=norm, output_gate=True)
    recurrent = read_gated_delta_net(raw, norm_eps=norm.eps, is_interleaved=is_interleaved)
    mixers: dict[str, MixerSpec] = {_LINEAR: recurrent, FULL_ATTENTION: attention}
    kinds = read_layer_kinds(
        raw, usual=_LINEAR, interval_field="full_attention_interval", interval=4
    )
    return assemble_decoder(
        raw,
        norm=norm,
        rope=read_rope(raw, head_dim=attention.head_dim, default_partial=0.25),
        layers=tuple(
            LayerSpec(mixers[kind], feed_forward)
            for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
        ),
    )

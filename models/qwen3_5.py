"""Qwen3.5: three layers of Gated DeltaNet to one of gated attention, zero-centred norms, rope on a quarter of the head.

The text model only: of a multimodal wrapper, `text_config`. Its interleaved three-row rope positions are equal for
text, which makes it plain partial rope.
"""

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.gated_delta_net import read_gated_delta_net
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, FeedForwardSpec, LayerSpec, MixerSpec, assemble_decoder, read_norm

_LINEAR, _FULL = "linear_attention", "full_attention"


def read_decoder(raw: RawConfig) -> DecoderSpec:
    return read_hybrid_decoder(raw, read_mlp(raw))


def read_hybrid_decoder(raw: RawConfig, feed_forward: FeedForwardSpec) -> DecoderSpec:
    """The hybrid stack with the same feed-forward on every layer."""
    norm = read_norm(raw, zero_centred=True)
    raw.require("attention_bias", only=False, default=False)
    raw.require("attn_output_gate", only=True, default=True)
    attention = read_attention(raw, head_dim=256, qk_norm=norm, output_gate=True)
    mixers: dict[str, MixerSpec] = {_LINEAR: read_gated_delta_net(raw, norm_eps=norm.eps), _FULL: attention}
    return assemble_decoder(
        raw, norm=norm, rope=read_rope(raw, head_dim=attention.head_dim, default_partial=0.25),
        layers=tuple(LayerSpec(mixers[kind], feed_forward) for kind in _layer_kinds(raw)),
    )


def _layer_kinds(raw: RawConfig) -> tuple[str, ...]:
    """`layer_types` if given, else every `full_attention_interval`-th layer is full attention."""
    num_layers = raw.integer("num_hidden_layers")
    if "layer_types" not in raw:
        interval = raw.integer("full_attention_interval", 4)
        return tuple(_LINEAR if (layer_id + 1) % interval else _FULL for layer_id in range(num_layers))
    kinds = raw.texts("layer_types")
    if len(kinds) != num_layers:
        raise raw.fail("layer_types", f"names {len(kinds)} layers, num_hidden_layers is {num_layers}")
    unknown = set(kinds) - {_LINEAR, _FULL}
    if unknown:
        raise raw.fail("layer_types", f"{sorted(unknown)} are not supported, only {_LINEAR!r} and {_FULL!r}")
    return kinds

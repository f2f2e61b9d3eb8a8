"""Gemma 3: five window layers per full-attention layer, norms before and after each part.

Only the text model is supported: `text_config` of a multimodal wrapper.
"""

from dataclasses import replace

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.linear import Activation
from models.blocks.mlp import read_mlp
from models.blocks.rotary import RopeSpec, read_rope
from models.blocks.spec import (
    FULL_ATTENTION,
    DecoderSpec,
    LayerSpec,
    assemble_decoder,
    read_layer_kinds,
    read_norm,
)

_WINDOW = "sliding_attention"


def read_decoder(raw: RawConfig) -> DecoderSpec:
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        raw.require(field, only=None, default=None)
    for field in ("attention_bias", "use_bidirectional_attention"):
        raw.require(field, only=False, default=False)
    norm = read_norm(raw, zero_centred=True)
    full = replace(read_attention(raw, qk_norm=norm), score_dim=raw.number("query_pre_attn_scalar"))
    mixers = {
        _WINDOW: replace(full, window=raw.integer("sliding_window") - 1),
        FULL_ATTENTION: full,
    }
    feed_forward = read_mlp(raw, activation=Activation.GELU, field="hidden_activation")
    kinds = read_layer_kinds(
        raw, usual=_WINDOW, interval_field="sliding_window_pattern", interval=6
    )
    decoder = assemble_decoder(
        raw,
        norm=norm,
        rope=_read_rope(raw, FULL_ATTENTION, full.head_dim),
        layers=tuple(LayerSpec(mixers[kind], feed_forward) for kind in kinds),
    )
    return replace(
        decoder,
        window_rope=_read_rope(raw, _WINDOW, full.head_dim),
        norms_outputs=True,
        embedding_scale=decoder.hidden_size**0.5,
    )


def _read_rope(raw: RawConfig, kind: str, head_dim: int) -> RopeSpec:
    """Read the rope of one kind of layer.

    In the older style, only full-attention layers scale it.
    """
    if "rope_parameters" in raw:
        raw = raw.updated(
            {"rope_parameters": raw.section("rope_parameters").section(kind).as_dict()}
        )
    elif kind == _WINDOW:
        raw = raw.updated(
            {"rope_theta": raw.number("rope_local_base_freq", 10_000.0), "rope_scaling": None}
        )
    return read_rope(
        raw, head_dim=head_dim, default_theta=10_000.0 if kind == _WINDOW else 1_000_000.0
    )

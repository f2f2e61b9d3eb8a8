"""Gemma 4, the dense models, as a variation of Gemma 3.

Full-attention layers have larger heads, and their keys are also their values. Values are
normalized, the result of each layer is scaled, and logits are bounded.

Only the text model is supported. Not supported are layers that embed tokens again or share keys and
values, and experts.
"""

from dataclasses import replace

from models.blocks.attention import AttentionSpec, read_attention
from models.blocks.config import RawConfig
from models.blocks.linear import Activation
from models.blocks.mlp import read_mlp
from models.blocks.norm import NormSpec
from models.blocks.rotary import RopeSpec, read_rope
from models.blocks.spec import (
    FULL_ATTENTION,
    DecoderSpec,
    LayerSpec,
    assemble_decoder,
    read_layer_kinds,
)

WINDOW = "sliding_attention"
_ROPE = {
    WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL_ATTENTION: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def read_decoder(raw: RawConfig) -> DecoderSpec:
    if "rope_parameters" not in raw:
        raw = raw.updated({"rope_parameters": _ROPE})
    for field in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if number := raw.integer(field, 0, minimum=0):
            raise raw.fail(field, f"{number} is not supported, only 0")
    for field in ("enable_moe_block", "use_double_wide_mlp", "attention_bias"):
        raw.require(field, only=False, default=False)
    if raw.text("use_bidirectional_attention", "vision") != "vision":
        raise raw.fail("use_bidirectional_attention", "is not supported for text")
    mixers = read_mixers(raw)
    feed_forward = read_mlp(raw, activation=Activation.GELU, field="hidden_activation")
    kinds = read_layer_kinds(raw, usual=WINDOW, interval_field="sliding_window_pattern", interval=6)
    decoder = assemble_decoder(
        raw,
        norm=_norm(raw),
        rope=_read_rope(raw, FULL_ATTENTION, mixers[FULL_ATTENTION]),
        layers=tuple(LayerSpec(mixers[kind], feed_forward) for kind in kinds),
    )
    return replace(
        decoder,
        window_rope=_read_rope(raw, WINDOW, mixers[WINDOW]),
        norms_outputs=True,
        scales_layers=True,
        embedding_scale=decoder.hidden_size**0.5,
        logit_bound=raw.number("final_logit_softcapping")
        if "final_logit_softcapping" in raw
        else None,
    )


def read_mixers(raw: RawConfig) -> dict[str, AttentionSpec]:
    """Return the attention by kind of layer."""
    norm = _norm(raw)
    shares = raw.flag("attention_k_eq_v", default=False)
    own = read_attention(raw, qk_norm=norm)
    full = read_attention(_of_full_layers(raw, shares=shares), qk_norm=norm)
    window = raw.integer("sliding_window") - 1
    if shares:
        full = replace(full, kv_heads_field="num_global_key_value_heads")
    return {
        WINDOW: replace(own, score_dim=1, value_norm=norm, window=window),
        FULL_ATTENTION: replace(full, score_dim=1, value_norm=norm, keys_are_values=shares),
    }


def _of_full_layers(raw: RawConfig, *, shares: bool) -> RawConfig:
    """Return the config of full-attention layers, in the published form or in transformers' form.

    transformers writes fields by layer.
    """
    if "per_layer_config" in raw:
        by_layer = raw.section("per_layer_config")
        return raw.updated(by_layer.section(next(iter(by_layer.as_dict()))).as_dict())
    kv_heads = raw.integer("num_global_key_value_heads", raw.integer("num_key_value_heads"))
    return raw.updated(
        {
            "head_dim": raw.integer("global_head_dim", 512),
            **({"num_key_value_heads": kv_heads} if shares else {}),
        }
    )


def _norm(raw: RawConfig) -> NormSpec:
    return NormSpec(eps=raw.number("rms_norm_eps"), rounds_last=True)


def _read_rope(raw: RawConfig, kind: str, mixer: AttentionSpec) -> RopeSpec:
    parameters = raw.section("rope_parameters").section(kind).as_dict()
    return read_rope(raw.updated({"rope_parameters": parameters}), head_dim=mixer.head_dim)

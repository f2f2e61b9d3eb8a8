"""Kimi-Linear: three layers of Kimi Delta Attention per layer of latent attention.

Latent attention has no positions. Experts are sigmoid-routed, after one dense layer.
"""

from dataclasses import replace

from models.blocks.config import RawConfig
from models.blocks.kimi_delta import read_kimi_delta
from models.blocks.mla import read_mla
from models.blocks.spec import (
    FULL_ATTENTION,
    DecoderSpec,
    LayerSpec,
    MixerSpec,
    assemble_decoder,
    read_layer_kinds,
    read_norm,
)
from models.deepseek_v3 import read_feed_forwards

_LINEAR = "linear_attention"
_NUM_DENSE_LAYERS = 1  # default if the file does not state it
_OTHER_FIELDS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_OTHER_LINEAR_FIELDS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_OTHER_NAMES = (
    ("block_sparse_moe.", "mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def read_decoder(raw: RawConfig) -> DecoderSpec:
    raw.require("mla_use_nope", only=True, default=True)
    raw.require("use_grouped_topk", only=True, default=True)
    raw.require("moe_router_activation_func", only="sigmoid", default="sigmoid")
    raw.require("num_nextn_predict_layers", only=0, default=0)
    raw = _as_others_spell(raw)
    norm = read_norm(raw)
    mixers: dict[str, MixerSpec] = {
        _LINEAR: read_kimi_delta(raw, norm_eps=norm.eps),
        FULL_ATTENTION: read_mla(raw, rope=None),
    }
    kinds = read_layer_kinds(raw, usual=_LINEAR)
    decoder = assemble_decoder(
        raw,
        norm=norm,
        rope=None,
        layers=tuple(
            LayerSpec(mixers[kind], feed_forward)
            for kind, feed_forward in zip(kinds, read_feed_forwards(raw), strict=True)
        ),
    )
    return replace(decoder, other_names=_OTHER_NAMES)


def _as_others_spell(raw: RawConfig) -> RawConfig:
    """Return the config with the field names of other families.

    Published files have a section for the recurrent layers. transformers writes its fields at the
    top level.
    """
    values = {"first_k_dense_replace": _NUM_DENSE_LAYERS, **raw.as_dict()}
    values |= {ours: values[theirs] for theirs, ours in _OTHER_FIELDS.items() if theirs in values}
    if "linear_attn_config" in raw:
        section = raw.section("linear_attn_config")
        values |= {
            ours: section.integer(theirs)
            for theirs, ours in _OTHER_LINEAR_FIELDS.items()
            if theirs in section
        }
        if "layer_types" not in raw:
            values["layer_types"] = _layer_types(section, raw.integer("num_hidden_layers"))
    return raw.updated(values)


def _layer_types(section: RawConfig, num_layers: int) -> list[str]:
    """Return the layer types from lists that count layers from 1."""
    full = section.integers("full_attn_layers")
    recurrent = section.integers("kda_layers")
    if sorted([*full, *recurrent]) != list(range(1, num_layers + 1)):
        raise section.fail(
            "kda_layers",
            f"and full_attn_layers must name each of {num_layers} layers once, counted from 1",
        )
    return [FULL_ATTENTION if layer in full else _LINEAR for layer in range(1, num_layers + 1)]

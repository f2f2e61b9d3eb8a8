"""gpt-oss: attention sinks, windows on every second layer, experts with clamped activations.

Weights of experts are published in MXFP4; conversions to bfloat16 store them as [experts, in, out].
"""

from dataclasses import replace

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.expert_layers import ClampedSwiglu
from models.blocks.moe import read_softmax_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import (
    FULL_ATTENTION,
    DecoderSpec,
    LayerSpec,
    assemble_decoder,
    read_layer_kinds,
)

_WINDOW = "sliding_attention"
_OTHER_NAMES = (("mlp.router.", "mlp.gate."),)
# That of files without one, as in transformers.
_USUAL_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_INPUTS_FIRST = (".experts.gate_up_proj", ".experts.down_proj")


def read_decoder(raw: RawConfig) -> DecoderSpec:
    has_bias = raw.flag("attention_bias", default=True)
    full = replace(read_attention(raw, qkv_bias=has_bias, output_bias=has_bias), sinks=True)
    mixers = {
        _WINDOW: replace(full, window=raw.integer("sliding_window") - 1),
        FULL_ATTENTION: full,
    }
    if "rope_parameters" not in raw and "rope_scaling" not in raw:
        raw = raw.updated({"rope_parameters": _USUAL_ROPE})
    width = raw.integer("intermediate_size")
    # The published softmax over the selected logits has the same values.
    experts = replace(
        read_softmax_moe(
            raw.updated({"moe_intermediate_size": width}), renormalize=True, has_shared=False
        ),
        clamped=ClampedSwiglu(raw.number("swiglu_alpha", 1.702), raw.number("swiglu_limit", 7.0)),
    )
    kinds = read_layer_kinds(raw, usual=_WINDOW, interval=2)
    decoder = assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=full.head_dim, default_theta=150_000.0),
        layers=tuple(LayerSpec(mixers[kind], experts) for kind in kinds),
    )
    return replace(decoder, other_names=_OTHER_NAMES, inputs_first=_INPUTS_FIRST)

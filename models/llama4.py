"""Llama 4: every fourth layer has no positions, the others attend within chunks.

An expert's input is its token times the router's score.

Only the text model is supported, up to the end of the first chunk. Up to there, a chunked layer
sees all earlier tokens, and the temperature of layers without positions is 1.
"""

from dataclasses import replace

from models.blocks.attention import (
    AttentionSpec,
    Rotation,
    read_attention,
    read_rotating_layers,
)
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.moe import InputRouting, MoeSpec
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, FeedForwardSpec, LayerSpec, assemble_decoder, read_norm

_OTHER_NAMES = (("feed_forward.router.", "mlp.gate."), ("feed_forward.", "mlp."))
_INPUTS_FIRST = (".experts.gate_up_proj", ".experts.down_proj")


def read_decoder(raw: RawConfig) -> DecoderSpec:
    has_bias = raw.flag("attention_bias", default=False)
    bare = replace(
        read_attention(raw, qkv_bias=has_bias, output_bias=has_bias), rotation=Rotation.NONE
    )
    # The published order is rotation, then norm. A norm without weights gives the same before
    # rotation.
    norm = (
        replace(read_norm(raw), has_weights=False)
        if raw.flag("use_qk_norm", default=True)
        else None
    )
    rotated = replace(bare, rotation=Rotation.PAIRS, qk_norm=norm)
    mixers = [rotated if rotates else bare for rotates in read_rotating_layers(raw)]
    decoder = assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=bare.head_dim, default_theta=500_000.0),
        layers=tuple(map(LayerSpec, mixers, _read_feed_forwards(raw))),
    )
    longest, context_field = _longest(raw, mixers)
    return replace(
        decoder,
        max_context_tokens=longest,
        context_field=context_field,
        other_names=_OTHER_NAMES,
        inputs_first=_INPUTS_FIRST,
    )


def _longest(raw: RawConfig, mixers: list[AttentionSpec]) -> tuple[int, str]:
    """Return the longest supported sequence in tokens, and the field that limits it."""
    limits = [
        (raw.integer("max_position_embeddings"), "max_position_embeddings"),
        (raw.integer("attention_chunk_size"), "attention_chunk_size"),
    ]
    # The flag is also published as a number.
    is_tuned = bool(raw.as_dict().get("attn_temperature_tuning", True))
    if is_tuned and Rotation.NONE in [mixer.rotation for mixer in mixers]:
        limits.append((raw.integer("floor_scale", minimum=2) - 1, "floor_scale"))
    return min(limits)


def _read_feed_forwards(raw: RawConfig) -> list[FeedForwardSpec]:
    """Return each layer's feed-forward.

    Experts are on the layers of `moe_layers`, or by default on the last layer of each interval.
    """
    num_layers = raw.integer("num_hidden_layers")
    step = raw.integer("interleave_moe_layer_step")
    width = raw.integer("intermediate_size")
    dense = replace(
        read_mlp(raw.updated({"intermediate_size": raw.integer("intermediate_size_mlp")})),
        field="intermediate_size_mlp",
    )
    experts = MoeSpec(
        hidden_size=raw.integer("hidden_size"),
        num_experts=raw.integer("num_local_experts"),
        num_chosen=raw.integer("num_experts_per_tok"),
        expert_width=width,
        shared_width=width,
        routing=InputRouting(),
        swaps_factors=True,
        experts_field="num_local_experts",
        shared_field="intermediate_size",
    )
    if experts.num_chosen > experts.num_experts:
        raise raw.fail(
            "num_experts_per_tok", f"must be at most num_local_experts {experts.num_experts}"
        )
    sparse = (
        raw.integers("moe_layers") if "moe_layers" in raw else range(step - 1, num_layers, step)
    )
    return [experts if layer_id in sparse else dense for layer_id in range(num_layers)]

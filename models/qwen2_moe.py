"""Qwen2-MoE: Qwen2 with experts and a gated shared expert, except on layers named dense."""

from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.moe import MoeSpec, read_softmax_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, FeedForwardSpec, LayerSpec, MixerSpec, assemble_decoder
from models.qwen2 import read_qwen2_attention


def read_decoder(raw: RawConfig) -> DecoderSpec:
    attention = read_qwen2_attention(raw, qkv_bias=raw.flag("qkv_bias", default=True))
    moe = read_softmax_moe(
        raw, renormalize=raw.flag("norm_topk_prob", default=False), has_shared=True
    )
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim),
        layers=read_sparse_layers(raw, attention, moe),
    )


def read_sparse_layers(raw: RawConfig, mixer: MixerSpec, moe: MoeSpec) -> tuple[LayerSpec, ...]:
    """Return layers with the same mixer, and feed-forwards as the config states."""
    return tuple(
        LayerSpec(mixer, feed_forward) for feed_forward in read_sparse_feed_forwards(raw, moe)
    )


def read_sparse_feed_forwards(raw: RawConfig, moe: MoeSpec) -> list[FeedForwardSpec]:
    """Return experts for every `decoder_sparse_step`-th layer, and dense feed-forwards for others.

    Layers in `mlp_only_layers` are dense too.
    """
    step = raw.integer("decoder_sparse_step")
    dense = raw.integers("mlp_only_layers")
    return [
        read_mlp(raw) if layer_id in dense or (layer_id + 1) % step else moe
        for layer_id in range(raw.integer("num_hidden_layers"))
    ]

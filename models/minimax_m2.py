"""MiniMax-M2: one norm over all heads of q and one over all heads of k, sigmoid-routed experts.

Rope rotates half of each head.
"""

from dataclasses import replace

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.moe import read_sigmoid_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder, read_norm
from models.mixtral import EXPERT_NAMES

_OTHER_NAMES = (
    ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    *EXPERT_NAMES,
)


def read_decoder(raw: RawConfig) -> DecoderSpec:
    raw.require("use_qk_norm", only=True, default=True)
    raw.require("qk_norm_type", only="per_layer", default="per_layer")
    raw.require("shared_intermediate_size", only=0, default=0)
    attention = replace(read_attention(raw, qk_norm=read_norm(raw)), norms_whole=True)
    moe = read_sigmoid_moe(
        raw.updated(
            {
                "n_routed_experts": raw.integer("num_local_experts"),
                "n_shared_experts": 0,
                "moe_intermediate_size": raw.integer("intermediate_size"),
            }
        )
    )
    rope = read_rope(
        raw,
        head_dim=attention.head_dim,
        default_theta=5_000_000.0,
        default_partial=raw.integer("rotary_dim", attention.head_dim) / attention.head_dim,
    )
    layers = (LayerSpec(attention, moe),) * raw.integer("num_hidden_layers")
    return replace(assemble_decoder(raw, rope=rope, layers=layers), other_names=_OTHER_NAMES)

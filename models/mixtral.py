"""Mixtral: Mistral with experts as feed-forwards."""

from dataclasses import replace

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.moe import read_softmax_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder
from models.mistral import refuse_windows

# Names of experts that MiniMax-M2 uses, too.
EXPERT_NAMES = (
    ("block_sparse_moe.", "mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def read_decoder(raw: RawConfig) -> DecoderSpec:
    refuse_windows(raw)
    attention = read_attention(raw)
    width = raw.integer("intermediate_size")
    moe = read_softmax_moe(
        raw.updated({"moe_intermediate_size": width}), renormalize=True, has_shared=False
    )
    decoder = assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim, default_theta=1_000_000.0),
        layers=(LayerSpec(attention, moe),) * raw.integer("num_hidden_layers"),
    )
    return replace(decoder, other_names=EXPERT_NAMES)

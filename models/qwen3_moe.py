"""Qwen3-MoE: Qwen3 with experts as feed-forwards, without a shared expert."""

from models.blocks.config import RawConfig
from models.blocks.moe import read_softmax_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, assemble_decoder
from models.qwen2_moe import read_sparse_layers
from models.qwen3 import read_qwen3_attention


def read_decoder(raw: RawConfig) -> DecoderSpec:
    attention = read_qwen3_attention(raw)
    moe = read_softmax_moe(
        raw, renormalize=raw.flag("norm_topk_prob", default=False), has_shared=False
    )
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim),
        layers=read_sparse_layers(raw, attention, moe),
    )

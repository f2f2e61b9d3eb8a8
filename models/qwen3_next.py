"""Qwen3-Next: the stack of Qwen3.5 with projections interleaved by key head.

The config states which layers have experts.
"""

from models.blocks.config import RawConfig
from models.blocks.moe import read_softmax_moe
from models.blocks.spec import DecoderSpec
from models.qwen2_moe import read_sparse_feed_forwards
from models.qwen3_5 import read_hybrid_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    moe = read_softmax_moe(
        raw, renormalize=raw.flag("norm_topk_prob", default=True), has_shared=True
    )
    return read_hybrid_decoder(raw, read_sparse_feed_forwards(raw, moe), is_interleaved=True)

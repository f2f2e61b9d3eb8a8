"""Qwen3.5-MoE: Qwen3.5 with experts and a gated shared expert on every layer.

Weights of experts are always renormalized.
"""

from models.blocks.config import RawConfig
from models.blocks.moe import read_softmax_moe
from models.blocks.spec import DecoderSpec
from models.qwen3_5 import read_hybrid_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    moe = read_softmax_moe(raw, renormalize=True, has_shared=True)
    return read_hybrid_decoder(raw, [moe] * raw.integer("num_hidden_layers"))

"""GLM-5: DeepSeek-V3.2 whose indexer rotates pairs, and whose layers share key selections."""

from dataclasses import replace

from models.blocks.config import RawConfig
from models.blocks.indexer import read_indexer
from models.blocks.mla import read_draft_mla, read_mla
from models.blocks.moe import read_sigmoid_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder
from models.deepseek_v3 import read_feed_forwards
from models.index_sharing import computing_layers


def read_decoder(raw: RawConfig) -> DecoderSpec:
    raw.require("rope_interleave", only=True, default=True)
    raw.require("indexer_rope_interleave", only=True, default=True)
    rope = read_rope(raw, head_dim=raw.integer("qk_rope_head_dim"))
    computing = read_mla(
        raw,
        rope,
        max_selected=raw.integer("index_topk"),
        indexer=read_indexer(raw, rotates_pairs=True),
    )
    sharing = replace(computing, indexer=None)
    feed_forwards = read_feed_forwards(raw)
    layers = tuple(
        LayerSpec(computing if computes else sharing, feed_forward)
        for computes, feed_forward in zip(
            computing_layers(raw, len(feed_forwards)), feed_forwards, strict=True
        )
    )
    draft_layer = LayerSpec(read_draft_mla(raw, computing), read_sigmoid_moe(raw))
    return assemble_decoder(raw, rope=rope, draft_layer=draft_layer, layers=layers)

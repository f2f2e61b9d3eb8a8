"""DeepSeek-V3.2: V3 with an indexer on every layer that selects the keys to attend to."""

from models.blocks.config import RawConfig
from models.blocks.indexer import read_indexer
from models.blocks.mla import read_draft_mla, read_mla
from models.blocks.moe import read_sigmoid_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder
from models.deepseek_v3 import read_feed_forwards


def read_decoder(raw: RawConfig) -> DecoderSpec:
    raw.require("rope_interleave", only=True, default=True)
    raw.require("indexer_rope_interleave", only=False, default=False)
    rope = read_rope(raw, head_dim=raw.integer("qk_rope_head_dim"))
    mixer = read_mla(
        raw,
        rope,
        max_selected=raw.integer("index_topk"),
        indexer=read_indexer(raw, rotates_pairs=False),
    )
    draft_layer = LayerSpec(read_draft_mla(raw, mixer), read_sigmoid_moe(raw))
    return assemble_decoder(
        raw,
        rope=rope,
        draft_layer=draft_layer,
        layers=tuple(LayerSpec(mixer, feed_forward) for feed_forward in read_feed_forwards(raw)),
    )

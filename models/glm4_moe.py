"""GLM4-MoE: rope on half of each head, biases on q, k and v, sigmoid-routed experts.

The first few layers are dense.
"""

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.moe import read_sigmoid_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder, read_norm


def read_decoder(raw: RawConfig) -> DecoderSpec:
    attention = read_attention(
        raw,
        qkv_bias=raw.flag("attention_bias", default=False),
        qk_norm=read_norm(raw) if raw.flag("use_qk_norm", default=False) else None,
    )
    dense = LayerSpec(attention, read_mlp(raw))
    sparse = LayerSpec(attention, read_sigmoid_moe(raw))
    num_dense = raw.integer("first_k_dense_replace", minimum=0)
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim, default_partial=0.5),
        layers=tuple(
            dense if layer_id < num_dense else sparse
            for layer_id in range(raw.integer("num_hidden_layers"))
        ),
        draft_layer=sparse,
    )

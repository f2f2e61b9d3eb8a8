"""DeepSeek-V3: multi-head latent attention, sigmoid-routed experts after a few dense layers."""

from models.blocks.config import RawConfig
from models.blocks.mla import read_mla
from models.blocks.mlp import read_mlp
from models.blocks.moe import read_sigmoid_moe
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, FeedForwardSpec, LayerSpec, assemble_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    raw.require("rope_interleave", only=True, default=True)
    rope = read_rope(raw, head_dim=raw.integer("qk_rope_head_dim"))
    mixer = read_mla(raw, rope)
    return assemble_decoder(
        raw,
        rope=rope,
        draft_layer=LayerSpec(mixer, read_sigmoid_moe(raw)),
        layers=tuple(LayerSpec(mixer, feed_forward) for feed_forward in read_feed_forwards(raw)),
    )


def read_feed_forwards(raw: RawConfig) -> tuple[FeedForwardSpec, ...]:
    """Return each layer's feed-forward, by `mlp_layer_types` if given.

    Otherwise layers before `first_k_dense_replace` are dense.
    """
    num_layers = raw.integer("num_hidden_layers")
    kinds: dict[str, FeedForwardSpec] = {"dense": read_mlp(raw), "sparse": read_sigmoid_moe(raw)}
    if "mlp_layer_types" not in raw:
        num_dense = raw.integer("first_k_dense_replace", minimum=0)
        return tuple(
            kinds["dense" if layer_id < num_dense else "sparse"] for layer_id in range(num_layers)
        )
    names = raw.texts("mlp_layer_types")
    if len(names) != num_layers or not set(names) <= kinds.keys():
        raise raw.fail(
            "mlp_layer_types", f"must name 'dense' or 'sparse' for each of {num_layers} layers"
        )
    return tuple(kinds[name] for name in names)

"""Mistral: Llama without biases; the head width need not be hidden_size / num_attention_heads.

A window as long as the context hides nothing, so it is ignored.
"""

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    # The wrapper of vision models has other text models, too.
    raw.require("model_type", only="mistral", default="mistral")
    refuse_windows(raw)
    attention = read_attention(raw)
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim),
        layers=(LayerSpec(attention, read_mlp(raw)),) * raw.integer("num_hidden_layers"),
    )


def refuse_windows(raw: RawConfig) -> None:
    """Check that layers see the whole context.

    Raises:
        ConfigError: they have a shorter window.
    """
    if "sliding_window" in raw and (window := raw.integer("sliding_window")) < raw.context()[0]:
        raise raw.fail(
            "sliding_window",
            f"{window} is not supported, only one that is as long as the context or null",
        )

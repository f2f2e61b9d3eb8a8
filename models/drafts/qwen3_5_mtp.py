"""The draft of Qwen3.5: one full-attention layer of the family.

Its tensors `mtp.*` are in the target's checkpoint. All norms are zero-centred, as in the whole
family.
"""

import torch

from engine.contracts.attention import AttentionGeometry
from engine.memory.layout import CacheSpec
from models.blocks.config import RawConfig
from models.blocks.spec import LayerSpec
from models.drafts.mtp import Mtp, MtpNames, MtpShared, check_target
from models.drafts.weights import DraftFiles
from models.loader import ModelDescription
from runtime.errors import ConfigError

_NAMES = MtpNames(
    embedding_norm="pre_fc_norm_embedding", hidden_norm="pre_fc_norm_hidden", fuse="fc", norm="norm"
)


def build(*, files: DraftFiles) -> tuple[Mtp]:
    """Build the draft.

    Raises:
        ConfigError: the target has no full-attention layer.
    """
    return (
        Mtp(files=files, shared=MtpShared(files), layer=_layer_spec(files.target), names=_NAMES),
    )


def capture_layers(raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    """Return the target's last layer.

    Raises:
        ConfigError: the checkpoint is not the target's, or has more than one draft layer.
    """
    raw.require("mtp_num_hidden_layers", only=1, default=1)
    check_target(raw, target)
    return frozenset({target.facts.num_layers - 1})


def cache_specs(_raw: RawConfig, target: ModelDescription, page_size: int) -> tuple[CacheSpec, ...]:
    return _layer_spec(target).mixer.cache_specs(
        layer_id=0, page_size=page_size, dtype=getattr(torch, target.facts.dtype)
    )


def own_name(_raw: RawConfig, key: str) -> str | None:
    name = key.removeprefix("model.")
    return name.removeprefix("mtp.") if name.startswith("mtp.") else None


def _layer_spec(target: ModelDescription) -> LayerSpec:
    for layer in target.spec.layers:
        if isinstance(layer.mixer.attention_geometry(1), AttentionGeometry):
            return layer
    raise ConfigError(
        "the target has no full-attention layer, whose form its MTP layer needs", field="draft"
    )

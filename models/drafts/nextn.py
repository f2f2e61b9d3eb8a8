"""NextN drafts of DeepSeek-V3, V3.2, GLM-5 and GLM4-MoE: layers after the target's last layer.

They are in the target's files. There may be several, one per token that is drafted ahead. Each has
the form of the target's sparse layers. With DSA, each has its own indexer, independent of the
sharing of other layers, and selects keys if none are carried to it. With
`index_share_for_mtp_iteration`, the steps of a round of one layer carry them. The files repeat
embedding and head for each layer; the target's are used.
"""

import re

import torch

from engine.memory.layout import CacheSpec
from models.blocks.config import RawConfig, architecture_of
from models.blocks.mla import MlaSpec
from models.blocks.spec import LayerSpec
from models.drafts.mtp import Mtp, MtpNames, MtpShared, check_target
from models.drafts.weights import DraftFiles
from models.loader import ModelDescription
from models.registry import read_decoder
from runtime.errors import ConfigError

_KEY = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_COPIES = ("embed_tokens.", "shared_head.head.")
_ALONE = "NextN"  # suffix of the architecture of a folder that holds only the draft, as its layer 0
ARCHITECTURES = tuple(
    name + ending
    for name in (
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeForCausalLM",
    )
    for ending in ("", _ALONE)
)


def build(*, files: DraftFiles) -> tuple[Mtp, ...]:
    """Return the layers in the order of their steps."""
    layer = _layer_spec(files.target)
    shared = MtpShared(files)
    return tuple(
        Mtp(files=files, shared=shared, layer=layer, names=_names(layer_id), layer_id=layer_id)
        for layer_id in range(num_layers(files.raw))
    )


def _names(layer_id: int) -> MtpNames:
    own = f"layers.{layer_id}."
    return MtpNames(
        embedding_norm=f"{own}enorm",
        hidden_norm=f"{own}hnorm",
        fuse=f"{own}eh_proj",
        norm=f"{own}shared_head.norm",
    )


def num_layers(raw: RawConfig) -> int:
    return raw.integer("num_nextn_predict_layers", 0)


def capture_layers(raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    """Return the target's last layer.

    Raises:
        ConfigError: there are no draft layers, or they differ from the layers of this target.
    """
    num_layers(raw)
    check_target(raw, target)
    described = read_decoder(target.facts.architecture, raw)
    expected = target.spec
    theirs = described.draft_layer
    ours = _layer_spec(target)
    assert theirs is not None, "a config that the target's family reads describes a draft layer too"
    parts = {
        "rope": (described.rope, expected.rope),
        "norm": (described.norm, expected.norm),
        "attention": (theirs.mixer, ours.mixer),
        "experts": (theirs.feed_forward, ours.feed_forward),
    }
    differing = [name for name, (one, other) in parts.items() if one != other]
    if differing:
        raise ConfigError(
            f"the draft's layer is not like the target's: {' and '.join(differing)} differ",
            field="draft",
        )
    return frozenset({target.facts.num_layers - 1})


def cache_specs(raw: RawConfig, target: ModelDescription, page_size: int) -> tuple[CacheSpec, ...]:
    mixer = _layer_spec(target).mixer
    dtype = getattr(torch, target.facts.dtype)
    return tuple(
        spec
        for layer_id in range(num_layers(raw))
        for spec in mixer.cache_specs(layer_id=layer_id, page_size=page_size, dtype=dtype)
    )


def num_shared_keys(raw: RawConfig, target: ModelDescription) -> int:
    if num_layers(raw) > 1:
        return 0  # every layer selects its own keys
    mixer = _layer_spec(target).mixer
    return mixer.max_selected if isinstance(mixer, MlaSpec) and mixer.takes_carried else 0


def own_name(raw: RawConfig, key: str) -> str | None:
    """Return the draft's name of a tensor. The draft counts its own layers from 0."""
    found = _KEY.fullmatch(key)
    count = num_layers(raw)
    first = 0 if architecture_of(raw).endswith(_ALONE) else raw.integer("num_hidden_layers")
    if found is None or found[2].startswith(_COPIES) or not 0 <= int(found[1]) - first < count:
        return None
    return f"layers.{int(found[1]) - first}.{found[2]}"


def _layer_spec(target: ModelDescription) -> LayerSpec:
    if target.spec.draft_layer is None:
        raise ConfigError(f"a NextN draft does not fit {target.facts.architecture}", field="draft")
    return target.spec.draft_layer

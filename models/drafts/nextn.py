"""NextN: the draft of DeepSeek-V3, V3.2, GLM-5 and GLM4-MoE, a layer behind the target's last in the same files.

It is one of the target's sparse layers. With DSA it has an indexer of its own, whatever the layers before it share, and
selects keys wherever none are carried to it; under `index_share_for_mtp_iteration` the steps of a round carry them. The
files repeat embedding and head beside it; the target's are used.
"""

import re

import torch

from engine.memory.layout import CacheSpec
from models.blocks.config import RawConfig, architecture_of
from models.blocks.mla import MlaSpec
from models.blocks.spec import LayerSpec
from models.drafts.mtp import Mtp, MtpNames, check_target
from models.drafts.weights import DraftFiles
from models.loader import ModelDescription
from models.registry import read_decoder
from runtime.errors import ConfigError

_NAMES = MtpNames(embedding_norm="layers.0.enorm", hidden_norm="layers.0.hnorm", fuse="layers.0.eh_proj",
                  norm="layers.0.shared_head.norm")
_KEY = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_COPIES = ("embed_tokens.", "shared_head.head.")
_ALONE = "NextN"  # how the architecture of a folder ends that holds the draft alone, as its layer 0
ARCHITECTURES = tuple(name + ending for name in ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
                                                 "GlmMoeDsaForCausalLM", "Glm4MoeForCausalLM")
                      for ending in ("", _ALONE))


def build(*, files: DraftFiles) -> Mtp:
    return Mtp(files=files, layer=_layer_spec(files.target), names=_NAMES)


def capture_layers(raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    """The target's last layer.

    Raises:
        ConfigError: another number of draft layers than one, or a layer that is not like those of this target.
    """
    raw.require("num_nextn_predict_layers", only=1, default=0)
    check_target(raw, target)
    described, expected = read_decoder(target.facts.architecture, raw), target.spec
    theirs, ours = described.draft_layer, _layer_spec(target)
    assert theirs is not None, "a config that the target's family reads describes a draft layer too"
    parts = {"rope": (described.rope, expected.rope), "norm": (described.norm, expected.norm),
             "attention": (theirs.mixer, ours.mixer), "experts": (theirs.feed_forward, ours.feed_forward)}
    differing = [name for name, (one, other) in parts.items() if one != other]
    if differing:
        raise ConfigError(f"the draft's layer is not like the target's: {' and '.join(differing)} differ",
                          field="draft")
    return frozenset({target.facts.num_layers - 1})


def cache_specs(_raw: RawConfig, target: ModelDescription, page_size: int) -> tuple[CacheSpec, ...]:
    return _layer_spec(target).mixer.cache_specs(layer_id=0, page_size=page_size,
                                                 dtype=getattr(torch, target.facts.dtype))


def num_shared_keys(target: ModelDescription) -> int:
    mixer = _layer_spec(target).mixer
    return mixer.max_selected if isinstance(mixer, MlaSpec) and mixer.takes_carried else 0


def own_name(raw: RawConfig, key: str) -> str | None:
    """The draft's layer is `layers.0` to itself."""
    found = _KEY.fullmatch(key)
    layer_id = 0 if architecture_of(raw).endswith(_ALONE) else raw.integer("num_hidden_layers")
    if found is None or int(found[1]) != layer_id or found[2].startswith(_COPIES):
        return None
    return f"layers.0.{found[2]}"


def _layer_spec(target: ModelDescription) -> LayerSpec:
    if target.spec.draft_layer is None:
        raise ConfigError(f"a NextN draft is no draft of {target.facts.architecture}", field="draft")
    return target.spec.draft_layer

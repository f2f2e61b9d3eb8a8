"""Opens a draft's folder and builds the draft it describes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.core.numerics import HOST, Numerics
from engine.memory.layout import CacheSpec
from engine.speculative.draft_model import DraftModel
from models.blocks.config import RawConfig, architecture_of, dtype_name, read_config_file, text_config
from models.checkpoint import Checkpoint, WeightEntry
from models.drafts import eagle1, eagle3, nextn, qwen3_5_mtp
from models.drafts.weights import DraftFiles, DraftWeights, draft_weights
from models.loader import ModelDescription, description_digest
from models.quantised_formats import open_checkpoint
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError
from runtime.model_folder import check_model_folder


@dataclass(frozen=True)
class DraftDescription:
    """A draft of `target`, of which no weight is loaded yet. `revision`: digest of its config and of its tensors'
    names, types and shapes."""

    raw: RawConfig
    entries: dict[str, WeightEntry] | None  # None: weights are random
    target: ModelDescription
    revision: str = "random"

    @property
    def capture_layers(self) -> frozenset[int]:
        """Global ids of the target's layers whose outputs the draft reads."""
        return _family(self.raw).capture_layers(self.raw, self.target)

    @property
    def vocab_size(self) -> int:
        """Tokens it can propose."""
        return self.raw.integer("draft_vocab_size", self.target.facts.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Width of the state that one step of the draft hands to the next."""
        return self.raw.integer("hidden_size")

    @property
    def num_shared_keys(self) -> int:
        """Most keys of a choice that the steps of its chains share; 0 for drafts that share none."""
        return _family(self.raw).num_shared_keys(self.raw, self.target)

    @property
    def num_layers(self) -> int:
        """More than one where every step of a chain has a layer of its own."""
        return len({spec.layer_id for spec in self.cache_specs(1)})

    @property
    def weight_bytes(self) -> int:
        """Of its own weights in the type that the draft runs in; 0 where they are random."""
        item_bytes: int = getattr(torch, dtype_name(self.raw)).itemsize
        return sum(math.prod(entry.shape) for entry in (self.entries or {}).values()) * item_bytes

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """What the draft's layers cache, by its own layer ids."""
        return _family(self.raw).cache_specs(self.raw, self.target, page_size)

    def load(self, *, numerics: Numerics, device: torch.device = HOST, digest: WeightsDigest | None = None,
             target_digest: WeightsDigest | None = None) -> DraftModel:
        """`load_layers` of a draft with one."""
        (draft,) = self.load_layers(numerics=numerics, device=device, digest=digest, target_digest=target_digest)
        return draft

    def load_layers(self, *, numerics: Numerics, device: torch.device = HOST, digest: WeightsDigest | None = None,
                    target_digest: WeightsDigest | None = None) -> Sequence[DraftModel]:
        """The draft, whole, with copies of what it shares with the target, on `device`: one model that takes all steps
        of a round, or one for each step. `digest` takes up every byte of the draft's own tensors, `target_digest` of
        those of the target.

        Raises:
            ConfigError: tensors are missing, unexpected or of the wrong shape; all of them are in one message.
        """
        source = DraftWeights(self.entries, self.target, digest or WeightsDigest(), target_digest or WeightsDigest())
        weights = draft_weights(source, dtype=dtype_name(self.raw), numerics=numerics, device=device)
        layers = _family(self.raw).build(files=DraftFiles(self.raw, weights, self.target))
        source.finish()
        return layers


@dataclass(frozen=True)
class _Family:
    """How one architecture is read and built. `own_name`: a file's name of a tensor to the draft's, None if it is not
    the draft's."""

    build: Callable[..., Sequence[DraftModel]]
    capture_layers: Callable[[RawConfig, ModelDescription], frozenset[int]]
    cache_specs: Callable[[RawConfig, ModelDescription, int], tuple[CacheSpec, ...]]
    own_name: Callable[[RawConfig, str], str | None]
    num_shared_keys: Callable[[RawConfig, ModelDescription], int] = lambda raw, target: 0


def _eagle_name(_raw: RawConfig, key: str) -> str | None:
    """Files of EAGLE-3 call the layer `midlayer` or `layers.0`; `t2d` only repeats `d2t` the other way round."""
    name = key.removeprefix("model.")
    if name == "t2d":
        return None
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


_EAGLE1 = _Family(eagle1.build, eagle1.capture_layers, eagle1.cache_specs, _eagle_name)
_EAGLE3 = _Family(eagle3.build, eagle3.capture_layers, eagle3.cache_specs, _eagle_name)
_MTP = _Family(qwen3_5_mtp.build, qwen3_5_mtp.capture_layers, qwen3_5_mtp.cache_specs, qwen3_5_mtp.own_name)
_NEXTN = _Family(nextn.build, nextn.capture_layers, nextn.cache_specs, nextn.own_name, nextn.num_shared_keys)
_FAMILIES = {
    "LlamaForCausalLMEagle": _EAGLE1,
    "Qwen2ForCausalLMEagle": _EAGLE1,
    "LlamaForCausalLMEagle3": _EAGLE3,
    "Qwen3_5ForCausalLM": _MTP,
    "Qwen3_5ForConditionalGeneration": _MTP,
    "Qwen3_5MoeForCausalLM": _MTP,
    "Qwen3_5MoeForConditionalGeneration": _MTP,
    **dict.fromkeys(nextn.ARCHITECTURES, _NEXTN),
}


def read_draft(folder: Path, target: ModelDescription) -> DraftDescription:
    """Describe the draft in `folder`; of a target with MTP or NextN layers in its checkpoint that is its own folder.

    Raises:
        ConfigError: the folder is no draft, its architecture or a variant is not supported, or it is not a draft of
            this target.
    """
    check_model_folder(folder, field="draft")
    raw = text_config(read_config_file(folder / "config.json"))
    checkpoint = open_checkpoint(folder, raw)
    entries = _entries(raw, checkpoint)
    return _describe(raw, entries, target, description_digest(raw, entries))


def random_draft(config: dict[str, object], target: ModelDescription, *, numerics: Numerics) -> DraftModel:
    """A draft of this config with repeatable random weights."""
    return _describe(RawConfig(config), None, target).load(numerics=numerics)


def _describe(raw: RawConfig, entries: dict[str, WeightEntry] | None, target: ModelDescription,
              revision: str = "random") -> DraftDescription:
    description = DraftDescription(raw, entries, target, revision)
    assert description.capture_layers, "a draft reads some layer"
    return description


def _family(raw: RawConfig) -> _Family:
    architecture = architecture_of(raw)
    if architecture not in _FAMILIES:
        raise ConfigError(f"draft architecture {architecture!r} is not supported; known are "
                          f"{', '.join(sorted(_FAMILIES))}", field="draft")
    return _FAMILIES[architecture]


def _entries(raw: RawConfig, checkpoint: Checkpoint) -> dict[str, WeightEntry]:
    """By the names the draft classes use."""
    own_name = _family(raw).own_name
    found = {name: entry for key, entry in checkpoint.entries.items() if (name := own_name(raw, key)) is not None}
    if not found:
        raise ConfigError(f"the checkpoint of {architecture_of(raw)} has no tensors of a draft", field="draft")
    return found

"""Opens a draft's folder and builds the draft it describes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from engine.core.numerics import HOST, Numerics
from engine.memory.layout import CacheSpec
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.drafters.frozen import FrozenModel
from models.blocks.config import (
    RawConfig,
    architecture_of,
    dtype_name,
    read_config_file,
    text_config,
)
from models.checkpoint import Checkpoint, WeightEntry
from models.drafts import eagle1, eagle3, gemma4_assistant, nextn, qwen3_5_mtp
from models.drafts.weights import DraftFiles, DraftWeights, draft_weights
from models.loader import ModelDescription, description_digest, kept_bytes, notices_of, with_dtype
from models.quantised_formats import open_checkpoint
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError, InternalError
from runtime.model_files.model_folder import check_model_folder

Built = TypeVar("Built")


@dataclass(frozen=True)
class DraftDescription:
    """A draft of `target`, of which no weight is loaded yet. `revision`: digest of its config and
    of its tensors' names, types and shapes."""

    raw: RawConfig
    entries: dict[str, WeightEntry] | None  # None: weights are random
    target: ModelDescription
    revision: str = "random"
    notices: tuple[str, ...] = ()  # what an operator has to know of how its files were read

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
        """Most keys of a choice that the steps of its chains share; 0 for drafts that share
        none."""
        return _family(self.raw).num_shared_keys(self.raw, self.target)

    @property
    def is_frozen(self) -> bool:
        """Whether it has no cache of its own, and reads the target's."""
        return _family(self.raw).build_frozen is not None

    @property
    def read_layers(self) -> frozenset[int]:
        """Global ids of the target's layers whose cache a frozen draft reads."""
        return _family(self.raw).read_layers(self.raw, self.target)

    @property
    def num_layers(self) -> int:
        """More than one where every step of a chain has a layer of its own."""
        return len({spec.layer_id for spec in self.cache_specs(1)})

    @property
    def weight_bytes(self) -> int:
        """Of its own weights in the type that the draft runs in, or like the target's in eight
        bits; 0 where they are random."""
        return sum(
            kept_bytes(entry.shape, dtype_name(self.raw), in_bytes=self.target.in_bytes)
            for entry in (self.entries or {}).values()
        )

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """What the draft's layers cache, by its own layer ids."""
        return _family(self.raw).cache_specs(self.raw, self.target, page_size)

    def load(
        self,
        *,
        numerics: Numerics,
        device: torch.device = HOST,
        digest: WeightsDigest | None = None,
        target_digest: WeightsDigest | None = None,
    ) -> DraftModel:
        """`load_layers` of a draft with one."""
        (draft,) = self.load_layers(
            numerics=numerics, device=device, digest=digest, target_digest=target_digest
        )
        return draft

    def load_layers(
        self,
        *,
        numerics: Numerics,
        device: torch.device = HOST,
        digest: WeightsDigest | None = None,
        target_digest: WeightsDigest | None = None,
    ) -> Sequence[DraftModel]:
        """The draft, whole, with copies of what it shares with the target, on `device`: one model
        that takes all steps of a round, or one for each step. `digest` takes up every byte of the
        draft's own tensors, `target_digest` of those of the target.

        Raises:
            ConfigError: tensors are missing, unexpected or of the wrong shape; all of them are in
                one message.
        """
        return self._built(_family(self.raw).build, numerics, device, digest, target_digest)

    def load_frozen(
        self,
        *,
        numerics: Numerics,
        device: torch.device = HOST,
        digest: WeightsDigest | None = None,
        target_digest: WeightsDigest | None = None,
    ) -> FrozenModel:
        """Likewise a draft that reads the target's cache."""
        build = _family(self.raw).build_frozen
        if build is None:
            raise InternalError(f"{architecture_of(self.raw)} has a cache of its own")
        return self._built(build, numerics, device, digest, target_digest)

    def _built(
        self,
        build: Callable[..., Built],
        numerics: Numerics,
        device: torch.device,
        digest: WeightsDigest | None,
        target_digest: WeightsDigest | None,
    ) -> Built:
        source = DraftWeights(
            self.entries, self.target, digest or WeightsDigest(), target_digest or WeightsDigest()
        )
        weights = draft_weights(
            source,
            dtype=dtype_name(self.raw),
            numerics=numerics,
            device=device,
            in_bytes=self.target.in_bytes,
        )
        built = build(files=DraftFiles(self.raw, weights, self.target))
        source.finish()
        return built


@dataclass(frozen=True)
class _Family:
    """How one architecture is read and built. `own_name`: a file's name of a tensor to the draft's,
    None if it is not the draft's."""

    build: Callable[..., Sequence[DraftModel]]
    capture_layers: Callable[[RawConfig, ModelDescription], frozenset[int]]
    cache_specs: Callable[[RawConfig, ModelDescription, int], tuple[CacheSpec, ...]]
    own_name: Callable[[RawConfig, str], str | None]
    num_shared_keys: Callable[[RawConfig, ModelDescription], int] = lambda raw, target: 0
    build_frozen: Callable[..., FrozenModel] | None = None
    read_layers: Callable[[RawConfig, ModelDescription], frozenset[int]] = lambda raw, target: (
        frozenset()
    )


def _eagle_name(_raw: RawConfig, key: str) -> str | None:
    """Files of EAGLE-3 call the layer `midlayer` or `layers.0`; `t2d` only repeats `d2t` the other
    way round."""
    name = key.removeprefix("model.")
    if name == "t2d":
        return None
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _no_layers(*, files: DraftFiles) -> Sequence[DraftModel]:
    raise InternalError(f"{architecture_of(files.raw)} has no cache of its own")


_EAGLE1 = _Family(eagle1.build, eagle1.capture_layers, eagle1.cache_specs, _eagle_name)
_EAGLE3 = _Family(eagle3.build, eagle3.capture_layers, eagle3.cache_specs, _eagle_name)
_MTP = _Family(
    qwen3_5_mtp.build, qwen3_5_mtp.capture_layers, qwen3_5_mtp.cache_specs, qwen3_5_mtp.own_name
)
_NEXTN = _Family(
    nextn.build, nextn.capture_layers, nextn.cache_specs, nextn.own_name, nextn.num_shared_keys
)
_FROZEN = _Family(
    _no_layers,
    gemma4_assistant.capture_layers,
    gemma4_assistant.cache_specs,
    gemma4_assistant.own_name,
    build_frozen=gemma4_assistant.build,
    read_layers=gemma4_assistant.read_layers,
)
_FAMILIES = {
    "Gemma4AssistantForCausalLM": _FROZEN,
    "LlamaForCausalLMEagle": _EAGLE1,
    "Qwen2ForCausalLMEagle": _EAGLE1,
    "LlamaForCausalLMEagle3": _EAGLE3,
    "Qwen3_5ForCausalLM": _MTP,
    "Qwen3_5ForConditionalGeneration": _MTP,
    "Qwen3_5MoeForCausalLM": _MTP,
    "Qwen3_5MoeForConditionalGeneration": _MTP,
    "Qwen3NextForCausalLM": _MTP,
    **dict.fromkeys(nextn.ARCHITECTURES, _NEXTN),
}


def read_draft(folder: Path, target: ModelDescription) -> DraftDescription:
    """Describe the draft in `folder`; of a target with MTP or NextN layers in its checkpoint that
    is its own folder.

    Raises:
        ConfigError: the folder is no draft, its architecture or a variant is not supported, or it
            is not a draft of this target.
    """
    check_model_folder(folder, field="draft")
    raw = text_config(read_config_file(folder / "config.json"))
    checkpoint = open_checkpoint(folder, raw)
    entries = _entries(raw, checkpoint)
    description = _describe(
        with_dtype(raw, checkpoint), entries, target, description_digest(raw, entries)
    )
    return replace(description, notices=notices_of(folder, raw, checkpoint))


def random_draft(
    config: dict[str, object], target: ModelDescription, *, numerics: Numerics
) -> DraftModel:
    """A draft of this config with repeatable random weights."""
    return _describe(RawConfig(config), None, target).load(numerics=numerics)


def _describe(
    raw: RawConfig,
    entries: dict[str, WeightEntry] | None,
    target: ModelDescription,
    revision: str = "random",
) -> DraftDescription:
    description = DraftDescription(raw, entries, target, revision)
    assert description.capture_layers, "a draft reads some layer"
    return description


def _family(raw: RawConfig) -> _Family:
    architecture = architecture_of(raw)
    if architecture not in _FAMILIES:
        raise ConfigError(
            f"draft architecture {architecture!r} is not supported; known are "
            f"{', '.join(sorted(_FAMILIES))}",
            field="draft",
        )
    return _FAMILIES[architecture]


def _entries(raw: RawConfig, checkpoint: Checkpoint) -> dict[str, WeightEntry]:
    """By the names the draft classes use."""
    own_name = _family(raw).own_name
    found = {
        name: entry
        for key, entry in checkpoint.entries.items()
        if (name := own_name(raw, key)) is not None
    }
    if not found:
        raise ConfigError(
            f"the checkpoint of {architecture_of(raw)} has no tensors of a draft", field="draft"
        )
    return found

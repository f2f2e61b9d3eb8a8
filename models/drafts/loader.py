"""Drafts: opening their folders and building them."""

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
from models.drafts import eagle1, eagle3, gemma4_assistant, nextn, qwen3_5_mtp, small_model
from models.drafts.weights import DraftFiles, DraftWeights, draft_weights
from models.loader import ModelDescription, description_digest, notices_of, with_dtype
from models.quantized_formats import open_checkpoint
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError, InternalError
from runtime.model_files.model_folder import check_model_folder

Built = TypeVar("Built")


@dataclass(frozen=True)
class DraftDescription:
    """A draft of `target`, before any weight is loaded.

    `revision` is a digest of its config and of its tensors' names, dtypes and shapes.
    """

    raw: RawConfig
    entries: dict[str, WeightEntry] | None  # None if weights are random
    target: ModelDescription
    revision: str = "random"
    notices: tuple[str, ...] = ()  # messages for the operator about how its files were read

    @property
    def capture_layers(self) -> frozenset[int]:
        """Return the global ids of the target's layers whose outputs the draft reads."""
        return _family(self.raw).capture_layers(self.raw, self.target)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens that the draft can propose."""
        return self.raw.integer("draft_vocab_size", self.target.facts.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Return the width of the state that one step of the draft passes to the next."""
        return self.raw.integer("hidden_size")

    @property
    def num_shared_keys(self) -> int:
        """Return the most keys of a selection that the steps of its chains share, or 0."""
        return _family(self.raw).num_shared_keys(self.raw, self.target)

    @property
    def is_frozen(self) -> bool:
        """Return whether the draft has no cache and reads the target's."""
        return _family(self.raw).build_frozen is not None

    @property
    def read_layers(self) -> frozenset[int]:
        """Return the global ids of the target's layers whose cache a frozen draft reads."""
        return _family(self.raw).read_layers(self.raw, self.target)

    @property
    def num_chain_layers(self) -> int:
        """Return the number of layers if every step of a chain has its own, else 1."""
        if self.is_ordinary:
            return 1
        return len({spec.layer_id for spec in self.cache_specs(1)})

    @property
    def is_ordinary(self) -> bool:
        """Return whether it is a model that also answers alone, with a vocabulary of its own."""
        return _family(self.raw) is _SMALL

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the draft's own weights.

        They are in its dtype, or in the target's format. Random weights count as 0.
        """
        dtype: torch.dtype = getattr(torch, dtype_name(self.raw))
        return sum(
            self.target.coded_bytes(name, entry.shape, dtype)
            for name, entry in (self.entries or {}).items()
        )

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """Return the cache specs of the draft's layers, by its own layer ids."""
        return _family(self.raw).cache_specs(self.raw, self.target, page_size)

    def load(
        self,
        *,
        numerics: Numerics,
        device: torch.device = HOST,
        digest: WeightsDigest | None = None,
        target_digest: WeightsDigest | None = None,
    ) -> DraftModel:
        """Load a draft with one layer; see `load_layers`."""
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
        """Load the whole draft on `device`, with copies of weights that the target shares.

        It is one model that runs all steps of a round, or one model per step. `digest` gets every
        byte of the draft's own tensors, `target_digest` every byte of the target's.

        Raises:
            ConfigError: tensors are missing, unexpected or of the wrong shape. One message lists
                all of them.
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
        """Load a draft that reads the target's cache, as `load_layers` loads others.

        Raises:
            InternalError: the draft has its own cache.
        """
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
            weight_format=self.target.weight_format,
        )
        built = build(files=DraftFiles(self.raw, weights, self.target))
        source.finish()
        return built


@dataclass(frozen=True)
class _DraftArchitecture:
    """The functions that read and build the drafts of one architecture.

    `own_name` converts a file's name of a tensor to the draft's. It returns None if the tensor does
    not belong to the draft.
    """

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
    """Return the draft's name of a tensor in EAGLE files.

    Files of EAGLE-3 call the layer `midlayer` or `layers.0`. `t2d` is the inverse of `d2t` and is
    not needed.
    """
    name = key.removeprefix("model.")
    if name == "t2d":
        return None
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _no_layers(*, files: DraftFiles) -> Sequence[DraftModel]:
    raise InternalError(f"{architecture_of(files.raw)} has no cache of its own")


_EAGLE1 = _DraftArchitecture(eagle1.build, eagle1.capture_layers, eagle1.cache_specs, _eagle_name)
_EAGLE3 = _DraftArchitecture(eagle3.build, eagle3.capture_layers, eagle3.cache_specs, _eagle_name)
_MTP = _DraftArchitecture(
    qwen3_5_mtp.build, qwen3_5_mtp.capture_layers, qwen3_5_mtp.cache_specs, qwen3_5_mtp.own_name
)
_NEXTN = _DraftArchitecture(
    nextn.build,
    nextn.capture_layers,
    nextn.cache_specs,
    nextn.own_name,
    nextn.num_shared_keys,
)
_SMALL = _DraftArchitecture(
    small_model.build, small_model.capture_layers, small_model.cache_specs, small_model.own_name
)
_FROZEN = _DraftArchitecture(
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
    **dict.fromkeys(small_model.ARCHITECTURES, _SMALL),
}


def read_draft(folder: Path, target: ModelDescription) -> DraftDescription:
    """Describe the draft in `folder`.

    A target with MTP or NextN layers in its checkpoint has its draft in its own folder.

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
    """Return a draft of this config with repeatable random weights."""
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


def _family(raw: RawConfig) -> _DraftArchitecture:
    architecture = architecture_of(raw)
    if architecture not in _FAMILIES:
        raise ConfigError(
            f"draft architecture {architecture!r} is not supported; known are "
            f"{', '.join(sorted(_FAMILIES))}",
            field="draft",
        )
    return _FAMILIES[architecture]


def _entries(raw: RawConfig, checkpoint: Checkpoint) -> dict[str, WeightEntry]:
    """Return the draft's tensors, by the names that the draft classes use."""
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

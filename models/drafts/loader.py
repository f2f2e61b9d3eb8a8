"""Opens a draft's folder and builds the draft it describes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.memory.layout import CacheSpec
from engine.numerics import Numerics
from engine.speculative.draft_model import DraftModel
from models.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from models.config import RawConfig, architecture_of, dtype_name, read_config_file, text_config
from models.drafts import eagle1, eagle3
from models.drafts.weights import DraftFiles, DraftWeights, draft_weights
from models.loader import ModelDescription
from runtime.errors import ConfigError


@dataclass(frozen=True)
class DraftDescription:
    """A draft of `target`, of which no weight is loaded yet."""

    raw: RawConfig
    entries: dict[str, TensorEntry] | None  # None: weights are random
    target: ModelDescription

    @property
    def capture_layers(self) -> frozenset[int]:
        """Global ids of the target's layers whose outputs the draft reads."""
        return _family(self.raw).capture_layers(self.raw, self.target)

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """What the draft's layers cache, by its own layer ids."""
        return _family(self.raw).cache_specs(self.raw, page_size)

    def load(self, *, numerics: Numerics) -> DraftModel:
        """The draft, whole, with copies of what it shares with the target.

        Raises:
            ConfigError: tensors are missing, unexpected or of the wrong shape; all of them are in one message.
        """
        source = DraftWeights(self.entries, self.target)
        weights = draft_weights(source, dtype=dtype_name(self.raw), numerics=numerics)
        draft = _family(self.raw).build(files=DraftFiles(self.raw, weights, self.target))
        source.finish()
        return draft


@dataclass(frozen=True)
class _Family:
    """How one architecture is read and built."""

    build: Callable[..., DraftModel]
    capture_layers: Callable[[RawConfig, ModelDescription], frozenset[int]]
    cache_specs: Callable[[RawConfig, int], tuple[CacheSpec, ...]]


_EAGLE1 = _Family(eagle1.Eagle1, eagle1.capture_layers, eagle1.cache_specs)
_FAMILIES = {
    "LlamaForCausalLMEagle": _EAGLE1,
    "Qwen2ForCausalLMEagle": _EAGLE1,
    "LlamaForCausalLMEagle3": _Family(eagle3.Eagle3, eagle3.capture_layers, eagle3.cache_specs),
}


def read_draft(folder: Path, target: ModelDescription) -> DraftDescription:
    """Describe the draft in `folder`.

    Raises:
        ConfigError: the folder is no draft, its architecture or a variant is not supported, or it is not a draft of
            this target.
    """
    return _describe(text_config(read_config_file(folder / "config.json")), _entries(open_checkpoint(folder)), target)


def random_draft(config: dict[str, object], target: ModelDescription, *, numerics: Numerics) -> DraftModel:
    """A draft of this config with repeatable random weights."""
    return _describe(RawConfig(config), None, target).load(numerics=numerics)


def _describe(raw: RawConfig, entries: dict[str, TensorEntry] | None, target: ModelDescription) -> DraftDescription:
    description = DraftDescription(raw, entries, target)
    assert description.capture_layers, "a draft reads some layer"
    return description


def _family(raw: RawConfig) -> _Family:
    architecture = architecture_of(raw)
    if architecture not in _FAMILIES:
        raise ConfigError(f"draft architecture {architecture!r} is not supported; known are "
                          f"{', '.join(sorted(_FAMILIES))}", field="draft")
    return _FAMILIES[architecture]


def _entries(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """By the names the draft classes use. `t2d` only repeats `d2t` the other way round."""
    found = {}
    for key, entry in checkpoint.entries.items():
        name = key.removeprefix("model.")
        name = f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
        if name != "t2d":
            found[name] = entry
    return found

"""Opens a draft's folder and builds the draft it describes."""

from collections.abc import Callable
from pathlib import Path

from engine.numerics import Numerics
from engine.speculative.draft_model import DraftModel
from models.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from models.config import RawConfig, architecture_of, dtype_name, read_config_file, text_config
from models.drafts.eagle3 import Eagle3
from models.drafts.weights import DraftFiles, DraftWeights, draft_weights
from models.loader import ModelDescription
from runtime.errors import ConfigError

_DRAFTS: dict[str, Callable[..., DraftModel]] = {
    "LlamaForCausalLMEagle3": Eagle3,
}


def load_draft(folder: Path, target: ModelDescription, *, numerics: Numerics) -> DraftModel:
    """The draft in `folder`, whole, with copies of what it shares with `target`.

    Raises:
        ConfigError: the folder is no draft, its architecture or a variant is not supported, or it is not a draft of
            this target.
    """
    raw = text_config(read_config_file(folder / "config.json"))
    return _build(raw, _entries(open_checkpoint(folder)), target, numerics)


def random_draft(config: dict[str, object], target: ModelDescription, *, numerics: Numerics) -> DraftModel:
    """A draft of this config with repeatable random weights."""
    return _build(RawConfig(config), None, target, numerics)


def _build(raw: RawConfig, entries: dict[str, TensorEntry] | None, target: ModelDescription,
           numerics: Numerics) -> DraftModel:
    architecture = architecture_of(raw)
    build = _DRAFTS.get(architecture)
    if build is None:
        raise ConfigError(f"draft architecture {architecture!r} is not supported; known are "
                          f"{', '.join(sorted(_DRAFTS))}", field="draft")
    source = DraftWeights(entries, target)
    weights = draft_weights(source, dtype=dtype_name(raw), numerics=numerics)
    draft = build(files=DraftFiles(raw, weights, target))
    source.finish()
    return draft


def _entries(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """By the names the draft classes use. `t2d` only repeats `d2t` the other way round."""
    found = {}
    for key, entry in checkpoint.entries.items():
        name = key.removeprefix("model.")
        name = f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
        if name != "t2d":
            found[name] = entry
    return found

"""What a router has of the model it serves without loading it: limits to check requests against."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.text.tokenise import Tokeniser, load_tokeniser, read_json
from runtime.errors import ConfigError
from runtime.grammar import Grammars, load_grammars
from runtime.model_folder import check_model_folder, eos_token_ids, most, text_fields
from runtime.tokenizer_files import tokenizer_digest

_CONTEXT = ("max_position_embeddings", "model_max_length")  # the latter in Kimi-Linear's files


@dataclass(frozen=True)
class ModelLimits:
    """Limits of the served model. `max_context_tokens` counts prompt plus completion."""

    name: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    num_layers: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str = ""  # of `runtime.tokenizer_files`


@dataclass(frozen=True)
class ServedModel:
    """The facts, and the tokeniser if the model directory has one. `grammars` is None where structured output cannot be
    offered."""

    facts: ModelLimits
    tokeniser: Tokeniser | None
    grammars: Grammars | None = None


def load_served_model(model_dir: Path, name: str = "") -> ServedModel:
    """Reads `config.json`, `generation_config.json` and the tokenizer files. The name defaults to the directory's.

    Raises:
        ConfigError: `config.json` is missing or lacks a needed number, or another file cannot be used.
    """
    check_model_folder(model_dir, needs_weights=False)
    config = read_json(model_dir / "config.json")
    text_config = text_fields(config)
    generation_config = read_json(model_dir / "generation_config.json")
    architectures = config.get("architectures")
    context = next((name for name in _CONTEXT if name in text_config), _CONTEXT[0])
    facts = ModelLimits(
        name=name or model_dir.resolve().name,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        vocab_size=_positive(text_config, "vocab_size"),
        max_context_tokens=_positive(text_config, context),
        num_layers=_positive(text_config, "num_hidden_layers"),
        eos_token_ids=eos_token_ids((generation_config, text_config, config), text_config["vocab_size"]),
        tokenizer_digest=tokenizer_digest(model_dir),
    )
    return ServedModel(facts, load_tokeniser(model_dir),
                       load_grammars(model_dir, facts.eos_token_ids, computes_masks=False))


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= most(name):
        raise ConfigError(f"config.json: {name} must be an integer from 1 to {most(name)}, is {value!r}", field="model")
    return value

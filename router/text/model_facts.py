"""What a router has of the model it serves without loading it: limits to check requests against."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.text.tokenise import Tokeniser, load_tokeniser, read_json
from runtime.errors import ConfigError
from runtime.grammar import Grammars, load_grammars
from runtime.model_folder import check_model_folder
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
    text_config = config.get("text_config", config)  # models that also see images nest the language part
    generation_config = read_json(model_dir / "generation_config.json")
    stated = [source["eos_token_id"] for source in (generation_config, text_config, config)
              if source.get("eos_token_id") is not None]
    eos = stated[0] if stated else []
    architectures = config.get("architectures") or [""]
    context = next((name for name in _CONTEXT if name in text_config), _CONTEXT[0])
    facts = ModelLimits(
        name=name or model_dir.resolve().name,
        architecture=str(architectures[0]),
        vocab_size=_positive(text_config, "vocab_size"),
        max_context_tokens=_positive(text_config, context),
        num_layers=_positive(text_config, "num_hidden_layers"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (int(eos),),
        tokenizer_digest=tokenizer_digest(model_dir),
    )
    return ServedModel(facts, load_tokeniser(model_dir), 
                       load_grammars(model_dir, facts.eos_token_ids, computes_masks=False))


def _positive(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json must give a positive {name}, got {value!r}", field="model")
    return value

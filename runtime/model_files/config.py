"""Fields of the language model in a config.json, with defaults for the fields that the file omits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.model_files.defaults import CONFIG_DEFAULTS, OTHER_NAMES
from runtime.model_files.model_folder import most, read_object

# Fields that wrappers of a text model keep at their top level although they belong to the text
# model.
_WRAPPER_FIELDS = (
    "architectures",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "quantization_config",
    "compression_config",
    "backbone_hidden_size",
    "use_ordered_embeddings",
)
_CONTEXT = ("max_position_embeddings", "model_max_length")  # Kimi-Linear's files use the latter
_ROPE = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class TextModelFacts:
    """Limits against which routers check requests. `max_context_tokens` is prompt plus completion."""

    architecture: str
    vocab_size: int
    num_layers: int
    max_context_tokens: int


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's fields of a config.json; multimodal models nest them.

    Omitted fields have the defaults of the architecture (`runtime.model_files.defaults`). An
    explicit null stays null: in transformers, too, a default applies only to an absent field.

    Raises:
        ConfigError: `text_config` is not an object.
    """
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise ConfigError(
            f"config.json: text_config must be an object, is {nested!r}", field="text_config"
        )
    fields = dict(config)
    if nested is not None:
        kept = {name: config[name] for name in _WRAPPER_FIELDS if config.get(name) is not None}
        fields = {**nested, **kept}
    defaults = CONFIG_DEFAULTS.get(architecture_of(fields), {})
    return {
        **{name: value for name, value in defaults.items() if OTHER_NAMES.get(name) not in fields},
        **fields,
    }


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first architecture that a config names, or "" if it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def read_facts(config: Mapping[str, Any]) -> TextModelFacts:
    """Return the facts of the language model in a config.json.

    Raises:
        ConfigError: a number is missing or out of range.
    """
    fields = text_fields(config)
    return TextModelFacts(
        architecture=architecture_of(config),
        vocab_size=_positive(fields, "vocab_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        max_context_tokens=context_of(fields)[0],
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json. Raises ConfigError."""
    return read_object(folder / "config.json")


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file does not exist.

    Raises:
        ConfigError: the file does not contain a JSON object.
    """
    return read_object(path) if path.is_file() else {}


def context_of(fields: Mapping[str, Any]) -> tuple[int, str]:
    """Return the longest context in tokens, and the name of the field that sets it.

    With YaRN this is the original context times the factor, if that exceeds
    `max_position_embeddings`; users of YaRN are advised to leave that field unchanged. vLLM uses
    the product as well. `fields` are those of the text model.

    Raises:
        ConfigError: a number is missing or out of range.
    """
    name = next((name for name in _CONTEXT if fields.get(name) is not None), _CONTEXT[0])
    stated = _positive(fields, name)
    section = next((name for name in _ROPE if isinstance(fields.get(name), dict)), None)
    stretched = 0 if section is None else _yarn_context(fields[section], fields, stated)
    if section is None or stretched <= stated:
        return stated, name
    if stretched > most(name):
        raise ConfigError(
            f"config.json: {section} gives a context of {stretched} tokens, the limit is {most(name)}",
            field=section,
        )
    return stretched, section


def _yarn_context(rope: Mapping[str, Any], fields: Mapping[str, Any], stated: int) -> int:
    """Return the context in tokens that YaRN gives.

    Returns 0 for other kinds of rope, and for invalid parameters, which the reader of rope rejects
    by name.
    """
    original = rope.get(
        "original_max_position_embeddings", fields.get("original_max_position_embeddings", stated)
    )
    factor = rope.get("factor", 0)
    if (
        rope.get("rope_type", rope.get("type")) != "yarn"
        or not _is_number(original)
        or not _is_number(factor)
    ):
        return 0
    return int(original * factor)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value <= most(_CONTEXT[0])


def _positive(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 1 <= value <= most(name):
        raise ConfigError(
            f"config.json: {name} must be an integer from 1 to {most(name)}, is {value!r}",
            field=name,
        )
    return value

"""End-of-sequence tokens of a checkpoint's files.

    tokenizer_config.json     `eos_token`, a text or an object; special_tokens_map.json if the former has no such field
    generation_config.json    `eos_token_id`
    config.json               `eos_token_id`, of the whole model or else of its text model, if generation_config.json
                              states none: an absent one, null and [] are equivalent

A response ends at the tokenizer's token and at those of the other two. Fine-tuning tools often save
a new chat template with its end token in the first file alone. vLLM ends responses at the same
tokens (docs/models.md compares them).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.model_files.config import read_if_there
from runtime.model_files.model_folder import read_object
from runtime.model_files.tokenizer_files import find_tokenizer

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_NONE = (
    "no file of the model states an end-of-sequence token (eos_token_id of generation_config.json or config.json, "
    "eos_token of tokenizer_config.json): responses end at a token limit or a stop string, and structured "
    "output is rejected"
)


@dataclass(frozen=True)
class EndTokens:
    """End-of-sequence tokens of a checkpoint.

    `sources` has each file with its ids. `notice` is a message for the operator, or "".
    """

    ids: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...] = ()
    notice: str = ""

    def __str__(self) -> str:
        return (
            ", ".join(f"{' '.join(map(str, ids))} ({file})" for file, ids in self.sources) or "none"
        )


def read_end_tokens(folder: Path, config: Mapping[str, Any], vocab_size: int) -> EndTokens:
    """Return the end-of-sequence tokens of the checkpoint in `folder`.

    `config` is the content of its config.json.

    Raises:
        ConfigError: a file cannot be read, `eos_token` is not a text, or an `eos_token_id` is not
            in the vocabulary.
    """
    generation = read_if_there(folder / GENERATION_CONFIG)
    sources = list(_stated_ids(((GENERATION_CONFIG, generation), *_of_config(config)), vocab_size))
    file, text = _eos_token(folder)
    notice = ""
    if text:
        token_id = _id_of(folder, text)
        if token_id is None or token_id >= vocab_size:
            what = (
                "the tokenizer has no such token"
                if token_id is None
                else (f"it is token {token_id}, and the model has {vocab_size}")
            )
            notice = f"{file} states the eos_token {text!r}, at which no response ends: {what}"
        else:
            sources.append((file, (token_id,)))
    ids = tuple(dict.fromkeys(token_id for _, stated in sources for token_id in stated))
    return EndTokens(ids, tuple(sources), notice if ids or notice else _NONE)


def stated_end_tokens(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens of a config.json alone.

    Raises ConfigError for ids that are not in the vocabulary.
    """
    return next((ids for _, ids in _stated_ids(_of_config(config), vocab_size)), ())


def _of_config(config: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Return the sources in the order of transformers: the whole model, then its text model."""
    nested = config.get("text_config")
    return (CONFIG, config), (CONFIG, nested if isinstance(nested, dict) else {})


def _stated_ids(
    sources: Sequence[tuple[str, Mapping[str, Any]]], vocab_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the first source that states ids, if any. Raises ConfigError."""
    for file, source in sources:
        stated = source.get("eos_token_id")
        if stated is None or stated == []:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
            raise ConfigError(
                f"{file}: eos_token_id must be ids from 0 to {vocab_size - 1}, got {stated!r}",
                field="eos_token_id",
            )
        yield file, tuple(dict.fromkeys(ids))
        return


def _eos_token(folder: Path) -> tuple[str, str]:
    """Return the file that states an `eos_token`, and its text; "" if none does.

    Raises ConfigError.
    """
    for file in (_TOKENIZER_CONFIG, _SPECIAL_TOKENS):
        fields = read_if_there(folder / file)
        if "eos_token" not in fields:
            continue
        stated = fields["eos_token"]
        text = stated.get("content") if isinstance(stated, dict) else stated
        if text is not None and not isinstance(text, str):
            raise ConfigError(
                f"{file}: eos_token must be a text, or an object with one as content, is {stated!r}",
                field="eos_token",
            )
        return file, text or ""
    return "", ""


def _id_of(folder: Path, text: str) -> int | None:
    """Return the id of a token, or None if the tokenizer does not have it.

    tokenizer_config.json may list it, which is faster: a tokenizer.json of 30 MB takes half a
    second to read. Raises ConfigError for a damaged file.
    """
    listed = read_if_there(folder / _TOKENIZER_CONFIG).get("added_tokens_decoder")
    if isinstance(listed, dict):
        for token_id, token in listed.items():
            if isinstance(token, dict) and token.get("content") == text and token_id.isdecimal():
                return int(token_id)
    path = find_tokenizer(folder)
    return None if path is None else _id_in(read_object(path), text)


def _id_in(tokenizer: Mapping[str, Any], text: str) -> int | None:
    """Return the id of a token in a tokenizer.json.

    Searches the added tokens, then the model's vocabulary, which is a table, or a list in Unigram
    models.
    """
    added = tokenizer.get("added_tokens")
    model = tokenizer.get("model")
    for token in added if isinstance(added, list) else ():
        if (
            isinstance(token, dict)
            and token.get("content") == text
            and isinstance(token.get("id"), int)
        ):
            return int(token["id"])
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        found = vocabulary.get(text)
        return found if isinstance(found, int) else None
    places = vocabulary if isinstance(vocabulary, list) else ()
    return next(
        (
            place
            for place, entry in enumerate(places)
            if isinstance(entry, list) and entry[:1] == [text]
        ),
        None,
    )

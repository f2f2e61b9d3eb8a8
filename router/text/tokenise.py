"""Text and chat to token ids, from the files a model directory carries.

`tokenizer.json` is required for text; the chat template comes from `chat_template.jinja` or `tokenizer_config.json`
and is rendered in a sandbox, with the names that templates written for transformers expect. A directory without a
tokenizer serves token ids only.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from router.text.detokenise import Detokenisers
from runtime.errors import ConfigError, FieldViolation, InvalidRequestError
from runtime.model_files.config import read_if_there
from runtime.tokenizer_files import find_tokenizer

# Longer texts are encoded on a thread, so that one long prompt does not hold up the tokens of all requests.
INLINE_CHARACTERS = 4096
# What a message weighs beside its texts: rendering it takes as long as encoding so many characters.
MESSAGE_CHARACTERS = 16


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str

    @property
    def num_characters(self) -> int:
        return len(self.role) + len(self.content)


class ChatTemplate:
    """A model's rule for writing a conversation as one text."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises ConfigError if `source` is no template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be parsed: {error}", field="model") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the assistant's next turn begins.

        Raises:
            InvalidRequestError: the template refuses these messages.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, tools=None, documents=None,
                                         **self._special_tokens)
        except (jinja2.TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError,
                ValueError) as error:
            raise InvalidRequestError(FieldViolation("chat.messages", f"the chat template refuses them: {error}")
                                      ) from error


class Tokeniser:
    """The tokenizer of one model, with its chat template if it has one."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.detokenisers = Detokenisers(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary: a text of n times as many needs at least n tokens."""
        return max(len(token) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Return the text of an entry of the vocabulary, "" if there is no such entry."""
        return self._tokenizer.id_to_token(token_id) or ""

    async def encode_text(self, text: str) -> list[int]:
        """The ids of `text`, with the special tokens the tokenizer puts around a text."""
        return await self._off_loop(len(text), lambda: self._encode(text, special=True))

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation; the template writes all special tokens itself.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses these messages.
        """
        template = self._chat_template
        if template is None:
            raise InvalidRequestError(FieldViolation("chat", "the model has no chat template"))
        return await self._off_loop(sum(message.num_characters + MESSAGE_CHARACTERS for message in messages),
                                    lambda: self._encode(template.render(messages), special=False))

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # As a batch of one, because `encode` keeps the interpreter to itself while it works, on whatever thread.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        token_ids: list[int] = encoding.ids
        return token_ids

    async def _off_loop(self, num_characters: int, work: Callable[[], list[int]]) -> list[int]:
        return work() if num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def load_tokeniser(model_dir: Path) -> Tokeniser | None:
    """The tokeniser of a model directory; None if it has none (`runtime.tokenizer_files`).

    Raises:
        ConfigError: a file is there but cannot be used.
    """
    path = find_tokenizer(model_dir)
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what the library raises has no narrower type
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    # Served prompts are neither cut nor padded, whatever the file was saved with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokeniser(tokenizer, _load_chat_template(model_dir))


def _load_chat_template(model_dir: Path) -> ChatTemplate | None:
    config = read_if_there(model_dir / "tokenizer_config.json")
    path = model_dir / "chat_template.jinja"
    source = _read_text(path) if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry.get("template") for entry in source if isinstance(entry, dict)
                       and entry.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError("chat_template of tokenizer_config.json must be a text", field="model")
    return ChatTemplate(source, _special_tokens(config))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like; written as a text or as an object with `content`."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,  # noqa: ANN401, FBT001, FBT002
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # noqa: FBT001, FBT002
    """Plain JSON: jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; for serving it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the type is jinja's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

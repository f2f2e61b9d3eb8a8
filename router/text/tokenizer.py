"""Tokenization of text and chats with the files of a model directory.

`tokenizer.json` is required for text. Chat templates come from `chat_template.jinja`,
`tokenizer_config.json` or `chat_template.json`. A model without a tokenizer serves token ids only.
"""

import asyncio
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from router.text.chat import Chat
from router.text.chat_template import DEFAULT, ChatTemplate
from router.text.control_tokens import ControlTokens, UserControlTokens
from router.text.detokenizer import Detokenizers
from runtime.errors import ConfigError, FieldViolation, InvalidRequestError
from runtime.model_files.config import read_if_there
from runtime.model_files.tokenizer_files import find_tokenizer

# Longer texts are encoded on a thread, so that one long prompt does not delay the tokens of all
# requests.
INLINE_CHARACTERS = 4096


class TextTokenizer:
    """The tokenizer of one model, with its chat template if it has one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        control_tokens: ControlTokens | None = None,
    ) -> None:
        """Encode control tokens in a conversation's texts as text, given `control_tokens`."""
        self.tokenizer = tokenizer
        self._control_tokens = control_tokens
        self.chat_template = chat_template
        self.detokenizers = Detokenizers(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @cached_property
    def longest_token(self) -> int:
        """Return the number of characters of the longest vocabulary entry.

        A text of n times as many characters needs at least n tokens.
        """
        return max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Return the text of a vocabulary entry, "" if there is no such entry."""
        return self.tokenizer.id_to_token(token_id) or ""

    async def encode_text(self, text: str) -> list[int]:
        """Return the ids of `text`, including the special tokens that the tokenizer adds."""
        return await self._off_loop(len(text), lambda: self._encode(text, special=True))

    async def encode_chat(self, chat: Chat) -> list[int]:
        """Return the ids of a conversation; the template writes all special tokens itself.

        Raises:
            InvalidRequestError: the model has no chat template, or it rejects these messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError(FieldViolation("chat", "the model has no chat template"))
        template = self.chat_template
        return await self._off_loop(chat.num_characters, lambda: self._encode_chat(template, chat))

    def _encode_chat(self, template: ChatTemplate, chat: Chat) -> list[int]:
        if self._control_tokens is None:
            return self._encode(template.render(chat), special=False)
        return self._control_tokens.encode(template.render(self._control_tokens.mark(chat)))

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # `encode_batch` releases the interpreter lock while it works; `encode` does not, on any
        # thread.
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=special)
        token_ids: list[int] = encoding.ids
        return token_ids

    async def _off_loop(self, num_characters: int, work: Callable[[], list[int]]) -> list[int]:
        return work() if num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def load_text_tokenizer(
    model_dir: Path, user_control_tokens: UserControlTokens = UserControlTokens.TOKENS
) -> TextTokenizer | None:
    """Load the tokenizer of a model directory; None if it has none
    (`runtime.model_files.tokenizer_files`).

    Raises:
        ConfigError: a file exists but cannot be used.
    """
    path = find_tokenizer(model_dir)
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    # Served prompts are neither truncated nor padded, whatever the file specifies.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    template = _load_chat_template(model_dir)
    if template is None or user_control_tokens is UserControlTokens.TOKENS:
        return TextTokenizer(tokenizer, template)
    return TextTokenizer(tokenizer, template, ControlTokens(tokenizer, template))


def _load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """Load the model's templates as transformers does: separate files override the config."""
    config = read_if_there(model_dir / "tokenizer_config.json")
    sources = _named_templates(config.get("chat_template"), "tokenizer_config.json")
    if not sources:
        sources = _named_templates(
            read_if_there(model_dir / "chat_template.json").get("chat_template"),
            "chat_template.json",
        )
    if (path := model_dir / "chat_template.jinja").is_file():
        sources = {DEFAULT: _read_text(path)}
    if DEFAULT not in sources:
        return None
    sources |= {
        path.stem: _read_text(path)
        for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
    }
    return ChatTemplate(sources, _special_tokens(model_dir, config))


def _named_templates(given: object, file: str) -> dict[str, str]:
    """Return the templates of a file by name.

    Raises:
        ConfigError: the value is neither a text nor a list of named texts.
    """
    match given:
        case None:
            return {}
        case str(source):
            return {DEFAULT: source}
        case list(entries):
            named: list[tuple[Any, Any]] = [
                (entry.get("name"), entry.get("template"))
                for entry in entries
                if isinstance(entry, dict)
            ]
            if all(isinstance(part, str) for entry in named for part in entry):
                return dict(named)
    raise ConfigError(
        f"chat_template of {file} must be a text, or a list of texts with names", field="model"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error


def _special_tokens(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and the like, given as a text or as an object with `content`.

    Older model directories have them in a separate file.
    """
    tokens = {}
    for name, value in {**read_if_there(model_dir / "special_tokens_map.json"), **config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens

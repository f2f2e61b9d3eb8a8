"""Encoding of control tokens in users' texts as plain text.

A tokenizer treats `<|im_end|>` as one control token anywhere, so a user's text could end the user's
turn. Marks around control tokens in a conversation's texts distinguish them, after rendering, from
those that the template writes itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer

from router.text.chat import Chat
from router.text.chat_template import ChatTemplate
from runtime.errors import FieldViolation, InvalidRequestError


class UserControlTokens(StrEnum):
    """Treatment of a control token in the texts of a conversation."""

    TOKENS = "tokens"
    TEXT = "text"


# from a private-use plane; removed from users' texts
_START = "\U000f0000"
_END = "\U000f0001"
# Prepended to a piece of text, which then begins no text: SentencePiece puts a space before the
# first word of one.
_LINE = "\n"


class ControlTokens:
    """Control tokens of one model: its special tokens, and the added tokens that its template
    writes.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        written = template.literal_text()
        added = tokenizer.get_added_tokens_decoder().values()
        longest_first = sorted(
            (token.content for token in added if _is_control(token, written)), key=len, reverse=True
        )
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._tokenizer = tokenizer
        self._written = re.compile(pattern)
        self._marked = re.compile(f"{_START}({pattern}){_END}|[{_START}{_END}]")
        self._line_ids = self._encode([_LINE])[0]

    def mark(self, chat: Chat) -> Chat:
        """Return the conversation with marks around the control tokens in its texts."""
        return replace(
            chat,
            messages=tuple(map(self._mark, chat.messages)),
            tools=tuple(map(self._mark, chat.tools)),
            arguments=self._mark(chat.arguments),
        )

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of a marked conversation: marked tokens as text, all others as tokens.

        Raises:
            InvalidRequestError: the tokenizer cannot write one of them as text.
        """
        first, *pieces = self._marked.split(rendered)
        texts = iter(self._encode([first, *(_LINE + piece for piece in pieces[1::2] if piece)]))
        token_ids = next(texts)
        for index, piece in enumerate(pieces):
            if not piece:
                continue
            token_ids += (
                self._spell(piece) if index % 2 == 0 else self._without_line(next(texts), piece)
            )
        return token_ids

    def _mark(self, value: Any) -> Any:  # noqa: ANN401 - a value of JSON
        match value:
            case str(text):
                return self._written.sub(
                    f"{_START}\\g<0>{_END}", text.replace(_START, "").replace(_END, "")
                )
            case Mapping():
                return {name: self._mark(item) for name, item in value.items()}
            case list() | tuple():
                return [self._mark(item) for item in value]
        return value

    def _spell(self, token: str) -> list[int]:
        """Return the ids of a control token's name as text."""
        behind_line = list(self._plain_ids(_LINE + token))
        token_ids = behind_line[len(self._line_ids) :]
        if behind_line[: len(self._line_ids)] != self._line_ids:
            token_ids = list(self._plain_ids(token))
        if self._tokenizer.token_to_id(token) in token_ids:
            raise InvalidRequestError(
                FieldViolation(
                    "chat",
                    f"has the control token {token!r}, which the tokenizer cannot write as text",
                )
            )
        return token_ids

    def _plain_ids(self, text: str) -> Iterator[int]:
        """Yield the ids of a text by the tokenizer without its added tokens."""
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        words = [text]
        if tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        for word in words:
            yield from (token.id for token in tokenizer.model.tokenize(word))

    def _without_line(self, token_ids: list[int], piece: str) -> list[int]:
        if token_ids[: len(self._line_ids)] == self._line_ids:
            return token_ids[len(self._line_ids) :]
        return self._encode([piece])[0]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]


def _is_control(token: AddedToken, written: str) -> bool:
    content: str = token.content
    return bool(token.special) or (content in written and not content.isspace())

"""Bytes that each token of a tokenizer adds to a text.

Most tokenizers decode token by token. Byte-level BPE (GPT-2, Llama 3, Qwen) spells bytes as
printable characters. SentencePiece models (Llama 2, Mistral, Gemma) spell spaces as a bar and
missing characters as byte tokens. For these the text of a sequence is the UTF-8 decoding of its
tokens' bytes joined, except for spaces at its very beginning.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

_Decoding = Callable[[str], str | bytes]
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextStart:
    """State of dropping at the beginning of one text.

    That is a number of spaces, or all spaces of the first token.
    """

    def __init__(self, character: bytes = b" ", num_dropped: int | None = 0) -> None:
        """`num_dropped` is the maximum number dropped; None: all of the first token."""
        self._character = character
        self._left = num_dropped

    @property
    def is_over(self) -> bool:
        return self._left == 0

    def cut(self, data: bytes) -> bytes:
        """Return the bytes of the next token after dropping."""
        if self._left is None:
            data = data.replace(self._character, b"")
            self._left = 0
        while self._left and data.startswith(self._character):
            data = data[len(self._character) :]
            self._left -= 1
        if data:
            self._left = 0
        return data


@dataclass(frozen=True)
class Spelling:
    """Rule by which a decoder writes one token and begins a text (`TextStart`)."""

    steps: tuple[_Decoding, ...]
    character: bytes = b" "
    num_dropped: int | None = 0

    def bytes_of(self, token: str) -> bytes:
        for step in self.steps:
            changed = step(token)
            if isinstance(changed, bytes):
                return changed
            token = changed
        return token.encode()


class TokenBytes:
    """Bytes of every token of one tokenizer. Shared by all requests; filled as ids occur."""

    def __init__(self, tokenizer: Tokenizer, spelling: Spelling) -> None:
        self._tokenizer = tokenizer
        self._spelling = spelling
        self._known: dict[int, bytes] = dict.fromkeys(special_ids(tokenizer), b"")

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for special tokens and unknown ids."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spelling.bytes_of(
                self._tokenizer.id_to_token(token_id) or ""
            )
        return known

    def text_start(self) -> TextStart:
        """Return the state of dropping for a new text."""
        return TextStart(self._spelling.character, self._spelling.num_dropped)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of tokens that decoding leaves out."""
    return frozenset(
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    )


def token_bytes_of(tokenizer: Tokenizer) -> TokenBytes | None:
    """Return the tokens' bytes; None if the tokenizer's decoder needs more than one token at a
    time.
    """
    if tokenizer.decoder is None:
        return None
    decoder = json.loads(tokenizer.decoder.__getstate__())
    spelling = _spelling_of(decoder["decoders"] if decoder["type"] == "Sequence" else [decoder])
    return None if spelling is None else TokenBytes(tokenizer, spelling)


def _spelling_of(decoders: Sequence[Mapping[str, Any]]) -> Spelling | None:
    """Return the spelling of a sequence of decoders; None if one does not work token by token."""
    spelling = Spelling(())
    is_fused = False
    for decoder in decoders:
        match decoder:
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": content, "start": count, "stop": 0} if is_fused:
                if spelling.num_dropped != 0:
                    return None
                spelling = replace(spelling, character=content.encode(), num_dropped=count)
            case _ if is_fused or (steps := _steps_of(decoder)) is None:
                return None
            case {"type": "Metaspace", "prepend_scheme": scheme} if scheme != "never":
                spelling = replace(spelling, steps=(*spelling.steps, *steps), num_dropped=None)
            case _:
                spelling = replace(spelling, steps=(*spelling.steps, *steps))
                is_fused = decoder["type"] == "ByteLevel"
    return spelling


def _steps_of(decoder: Mapping[str, Any]) -> tuple[_Decoding, ...] | None:
    """Return the effect of a decoder on a single token; None for unknown decoders."""
    match decoder:
        case {"type": "Metaspace", "replacement": bar}:
            return (_replacing(bar, " "),)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return (_replacing(pattern, content),)
        case {"type": "ByteFallback"}:
            return (_byte_token,)
        case {"type": "ByteLevel"}:
            return (_byte_level,)
    return None


def _replacing(pattern: str, content: str) -> _Decoding:
    return lambda token: token.replace(pattern, content)


def _byte_token(token: str) -> str | bytes:
    """Return the byte of a token like <0xE2>, and other tokens unchanged."""
    matched = _BYTE_TOKEN.fullmatch(token)
    return token if matched is None else bytes.fromhex(matched[1])


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of the byte-level BPE alphabet.

    Printable Latin-1 bytes are written as themselves, the others as code points from 256 upwards in
    byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()  # an added token outside the alphabet is spelled as itself

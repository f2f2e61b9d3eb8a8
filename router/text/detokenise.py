"""Token ids to text while they arrive: whole characters only, at a cost linear in the number of tokens.

`Detokeniser` turns one id at a time into the text that is certain by now. `StopMatcher` finds stop strings in that
text across any borders and holds back what may still become one.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders


class Detokeniser(Protocol):
    """The text of one request's output. The pieces, joined, are what decoding all ids at once gives."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left when no more tokens come: an incomplete character becomes U+FFFD."""
        ...


class ByteVocabulary:
    """The bytes behind every token of a byte-level BPE tokenizer; shared by all requests, filled as ids are seen.

    Byte-level BPE writes each byte as one printable character: printable Latin-1 bytes as themselves, the others as
    code points from 256 upwards in byte order.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {token_id: b"" for token_id, token in added.items() if token.special}

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for special tokens and for ids that the tokenizer does not know."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(self._tokenizer.id_to_token(token_id) or "")
        return known

    def _spell(self, token: str) -> bytes:
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:
            return token.encode()  # an added token outside the alphabet stands for itself


class ByteLevelDetokeniser:
    """For byte-level BPE (GPT-2, Llama 3, Qwen): tokens are bytes, so an incremental UTF-8 decoder is enough."""

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokeniser:
    """For every other tokenizer: decode a short window and give out what it added.

    The window starts at tokens whose text is out already, because decoders treat the first token of a text
    differently (SentencePiece drops its leading space). A window that still ends in U+FFFD is waiting for the rest of a
    character; after `MAX_HELD_TOKENS` it is given out as it is, so that the cost stays bounded.
    """

    MAX_HELD_TOKENS = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # given out, kept for its effect on what follows
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith("\ufffd") and len(self._held) < self.MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def finish(self) -> str:
        return self._give_out(self._decode(self._context + self._held)) if self._held else ""

    def _give_out(self, text: str) -> str:
        new_text = text[len(self._decode(self._context)):]
        # Tokens without text (special ones) give no context, so what came before them must stay.
        self._context = self._held if new_text else self._context + self._held
        self._context, self._held = self._context[-self.MAX_HELD_TOKENS:], []
        return new_text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


class StopMatcher:
    """Finds the first of several strings in text that arrives in pieces.

    The match that *ends* first wins, the longest among those; so the outcome does not depend on how the text is
    cut. One automaton per string, whose state is the number of characters that must be held back.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._automata = tuple(_StopAutomaton(string) for string in stop_strings)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that can be part of no match any more, the stop string if one is complete).

        After a match the text ends just before it, and nothing more may be fed.
        """
        if not self._automata:
            return text, None
        buffer, offset = self._held + text, len(self._held)
        for index, character in enumerate(text):
            matched = self._advance(character)
            if matched is not None:
                self._held = ""
                return buffer[:offset + index + 1 - len(matched)], matched
        certain = len(buffer) - max(automaton.matched for automaton in self._automata)
        self._held = buffer[certain:]
        return buffer[:certain], None

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        longest: str | None = None
        for automaton in self._automata:
            automaton.advance(character)
            found = automaton.string if automaton.matched == len(automaton.string) else None
            if found is not None and (longest is None or len(found) > len(longest)):
                longest = found
        return longest


class _StopAutomaton:
    """Knuth-Morris-Pratt for one string, linear in the text. The failure function is worked out as far as a match has
    come, so that a long string costs nothing before the text follows it."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0  # characters of the string that the text ends in
        self._failure = [0]  # for each prefix, the length of its longest proper suffix that is a prefix too

    def advance(self, character: str) -> None:
        self.matched = self._longer(self.matched, character)
        if self.matched > len(self._failure):
            self._failure.append(self._longer(self._failure[-1], character))

    def _longer(self, length: int, character: str) -> int:
        """The longest prefix that a text ends in which ended in one of `length` before this character."""
        while length and self.string[length] != character:
            length = self._failure[length - 1]
        return length + (self.string[length] == character)


class Detokenisers:
    """Makes a detokeniser per request, of the kind the tokenizer needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._vocabulary = ByteVocabulary(tokenizer) if is_byte_level else None

    def new(self) -> Detokeniser:
        if self._vocabulary is None:
            return WindowDetokeniser(self._tokenizer)
        return ByteLevelDetokeniser(self._vocabulary)

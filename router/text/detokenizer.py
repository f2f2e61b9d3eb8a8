"""Incremental detokenization: whole characters only, at a cost linear in the number of tokens.

A detokenizer turns one id at a time into the text that is certain so far. The text of a response is
what its tokens add to the text of the prompt. Decoders drop a space where a text begins, but a
response begins no text. Bytes that are not UTF-8 become one U+FFFD for each maximal part of a
character, as the Unicode standard recommends (3.9, "U+FFFD Substitution of Maximal Subparts").
`StopMatcher` finds stop strings in that text across token boundaries and holds back text that may
become one.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from router.text.token_bytes import TokenBytes, special_ids, token_bytes_of

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4


class Detokenizer(Protocol):
    """Detokenizer of one request's output. The joined pieces are what the output adds to the
    prompt's text.
    """

    def add(self, token_id: int) -> str:
        """Return the text that became certain with this token; empty while a character is
        incomplete.
        """
        ...

    def finish(self) -> str:
        """Return the rest when no more tokens follow: an incomplete character becomes U+FFFD."""
        ...


class BytesDetokenizer:
    """Detokenizer for tokens that are bytes: an incremental UTF-8 decoder suffices."""

    def __init__(self, tokens: TokenBytes, prompt: Sequence[int]) -> None:
        self._tokens = tokens
        self._start = tokens.text_start()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pass_over(prompt)
        # Bytes of a character that the output may complete.
        self._before = _incomplete(self._last_bytes(prompt))

    def add(self, token_id: int) -> str:
        data = self._tokens.of(token_id)
        if data and not self._start.is_over:
            data = self._start.cut(data)
        if self._before and data:
            return self._continue(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _continue(self, data: bytes) -> str:
        """Return the text of the first bytes after a prompt that ended inside a character."""
        before = self._before
        self._before = b""
        self._decoder.decode(before)
        text = self._decoder.decode(data)
        is_broken = text.startswith(REPLACEMENT) and not (before + data).startswith(
            REPLACEMENT.encode()
        )
        # The U+FFFD of the prompt's broken character does not belong to the output.
        return text[1:] if is_broken else text

    def _pass_over(self, prompt: Iterable[int]) -> None:
        """Consume what the decoder drops at the beginning of the prompt, so that the output keeps
        it.
        """
        for token_id in prompt:
            if self._start.is_over:
                return
            if data := self._tokens.of(token_id):
                self._start.cut(data)

    def _last_bytes(self, prompt: Sequence[int]) -> bytes:
        """Return the last bytes of the prompt, fewer than a character can have."""
        last = b""
        for token_id in reversed(prompt):
            last = self._tokens.of(token_id) + last
            if len(last) >= MAX_CHARACTER_BYTES - 1:
                break
        return last[1 - MAX_CHARACTER_BYTES :]


def _incomplete(data: bytes) -> bytes:
    """Return the bytes at the end of `data` that begin an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return decoder.getstate()[0]


class WindowDetokenizer:
    """Detokenizer for any other tokenizer: decodes a short window and returns what it added.

    The window starts with tokens whose text was already returned, because decoders treat the first
    token of a text differently. A window that ends in U+FFFD waits for the rest of a character.
    After `MAX_HELD_TOKENS` it is returned as it is, so that the cost is bounded.
    """

    MAX_HELD_TOKENS = 16

    def __init__(
        self, tokenizer: Tokenizer, silent_ids: frozenset[int], prompt: Sequence[int]
    ) -> None:
        """`silent_ids` are the ids of special tokens, which decoding leaves out."""
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._context = self._last_spoken(prompt)  # already returned; affects the following tokens
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        if token_id in self._silent_ids:
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < self.MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def finish(self) -> str:
        return self._give_out(self._decode(self._context + self._held)) if self._held else ""

    def _give_out(self, text: str) -> str:
        new_text = text[len(self._decode(self._context)) :]
        # Tokens without text give no context, so the tokens before them are kept.
        self._context = self._held if new_text else self._context + self._held
        self._context = self._context[-self.MAX_HELD_TOKENS :]
        self._held = []
        return new_text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _last_spoken(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt that are not special."""
        last: list[int] = []
        for token_id in reversed(prompt):
            if len(last) == self.MAX_HELD_TOKENS:
                break
            if token_id not in self._silent_ids:
                last.append(token_id)
        return last[::-1]


class StopMatcher:
    """Finds the first of several strings in text that arrives in pieces.

    The match that *ends* first wins, the longest among those, so the result does not depend on how
    the text is split. Each string has one automaton, whose state is the number of characters that
    must be held back.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._automata = tuple(_StopAutomaton(string) for string in stop_strings)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that can no longer be part of a match, and the stop string if one is
        complete.

        After a match the text ends just before it, and no more text may be fed.
        """
        if not self._automata:
            return text, None
        buffer = self._held + text
        offset = len(self._held)
        for index, character in enumerate(text):
            matched = self._advance(character)
            if matched is not None:
                self._held = ""
                return buffer[: offset + index + 1 - len(matched)], matched
        certain = len(buffer) - max(automaton.matched for automaton in self._automata)
        self._held = buffer[certain:]
        return buffer[:certain], None

    def finish(self) -> str:
        """Return the text held back, when no more text follows."""
        held = self._held
        self._held = ""
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
    """Knuth-Morris-Pratt automaton for one string, linear in the text.

    The failure function is computed lazily, up to the longest match so far, so that a long string
    costs nothing before the text follows it.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0  # length of the string's longest prefix that the text ends with
        # For each prefix, the length of its longest proper suffix that is also a prefix.
        self._failure = [0]

    def advance(self, character: str) -> None:
        self.matched = self._longer(self.matched, character)
        if self.matched > len(self._failure):
            self._failure.append(self._longer(self._failure[-1], character))

    def _longer(self, length: int, character: str) -> int:
        """Return the length of the longest prefix that the text ends with after `character`.

        `length` is that length before it.
        """
        while length and self.string[length] != character:
            length = self._failure[length - 1]
        return length + (self.string[length] == character)


class Detokenizers:
    """Factory of detokenizers of the kind that the tokenizer needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = token_bytes_of(tokenizer)
        self._silent_ids = special_ids(tokenizer)

    def new(self, prompt: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for the output that follows the tokens of `prompt`."""
        if self._tokens is None:
            return WindowDetokenizer(self._tokenizer, self._silent_ids, prompt)
        return BytesDetokenizer(self._tokens, prompt)

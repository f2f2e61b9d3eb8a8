"""Use of llguidance: compile grammars, follow texts, compute masks.

Only grammar processes import it. Other processes import llguidance just to check that it supports a
tokenizer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runtime.grammar.language import (
    OPTIONS,
    Grammar,
    GrammarKind,
    schema_of,
    shown,
    whitespace_is_flexible,
)
from runtime.grammar.messages import path_to

# Whitespace between JSON tokens. Without a limit a weak model may indent until its tokens run out.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"


def library_limits() -> LLParserLimits:
    """Return limits that keep a mask within about 10 ms at a vocabulary of 128,000.

    The library's defaults allow 65 ms and 500 MB of states.
    """
    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=30_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class Unfollowable(Exception):
    """The text has left its grammar, or the grammar has become too complex to follow."""


def compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar, which may take very long. Raises InvalidRequestError."""
    matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=library_limits())
    if matcher.is_error():
        raise grammar.refused(first_line(matcher.get_error()))
    return matcher


@dataclass
class Text:
    """One text that a grammar follows token by token.

    All tokens are allowed after an end-of-sequence token. The library never gets the end token or
    any token after it: a complete grammar does not record the token that ends it, so a rollback of
    drafted tokens would remove one too many.
    """

    automaton: LLMatcher  # in its start state, shared by all texts
    end_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    _num_followed: int = 0  # tokens before the one that ends the text
    _mask_bytes: int = 0  # known after the first mask

    def __post_init__(self) -> None:
        self.matcher = self.automaton.deep_copy()

    def move(self, kept: int, token_ids: Sequence[int]) -> None:
        """Keep the first `kept` tokens and append `token_ids`. Raises Unfollowable."""
        known = self.token_ids[kept:]
        common = sum(
            1
            for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, token_ids, strict=False))
        )
        self._cut(kept + common)
        for token_id in token_ids[common:]:
            if not self._has_ended and not self._follow(token_id):
                raise self._unfollowable()
            self.token_ids.append(token_id)

    def mask(self) -> bytes:
        """Return a bit per token of the tokenizer's vocabulary, lowest first. Raises Unfollowable."""
        if self._has_ended and self._mask_bytes:
            return b"\xff" * self._mask_bytes
        packed = self.matcher.compute_bitmask()
        self._mask_bytes = len(packed)
        if self._has_ended:
            return b"\xff" * self._mask_bytes
        if self.matcher.is_error():
            raise self._unfollowable()
        return packed

    def masks(
        self, token_ids: Sequence[int], parents: Sequence[int]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (node, mask) for the text's end, node 0, and for each reachable node of a tree.

        A node is reachable if the grammar allows the path to it.

        Raises:
            Unfollowable: at node 0. A further node that cannot be followed is left out, because it may
                never be sampled.
        """
        base = len(self.token_ids)
        found: dict[int, bytes] = {}
        for node in range(len(parents)):
            if node:
                before = found.get(parents[node])
                if before is None or not _has_bit(before, token_ids[node]):
                    continue
            try:
                self.move(base, path_to(node, token_ids, parents))
                found[node] = self.mask()
            except Unfollowable:
                if not node:
                    raise
                known = self.token_ids[:base]
                self.matcher = self.automaton.deep_copy()
                self.token_ids = []
                self._num_followed = 0
                self.move(0, known)  # uses a new matcher, because one that failed stays failed
                continue
            yield node, found[node]

    def forced(self, limit: int, is_late: Callable[[], bool]) -> list[int]:
        """Return the next tokens of a text with only one continuation, at most `limit`.

        The walk is one mask per token, because the library's own search for forced tokens has no
        limit. It ends early if `is_late` returns True.

        Raises:
            Unfollowable: the grammar has become too complex to follow.
        """
        base = len(self.token_ids)
        found: list[int] = []
        while len(found) < limit and not is_late():
            only = _only_bit(self.mask())
            if only is None:
                break
            self.move(base + len(found), (only,))
            found.append(only)
        self.move(base, ())
        return found

    @property
    def _has_ended(self) -> bool:
        return self._num_followed < len(self.token_ids)

    def _follow(self, token_id: int) -> bool:
        """Advance the matcher by one token; return whether the grammar allows it."""
        if token_id in self.end_token_ids:
            return bool(self.matcher.is_accepting())
        is_followed = bool(self.matcher.consume_token(token_id))
        self._num_followed += is_followed
        return is_followed

    def _cut(self, length: int) -> None:
        if length < self._num_followed:
            self.matcher.rollback(self._num_followed - length)
            self._num_followed = length
        del self.token_ids[length:]

    def _unfollowable(self) -> Unfollowable:
        return Unfollowable(
            f"cannot be followed beyond {len(self.token_ids)} tokens: "
            f"{first_line(self.matcher.get_error())}"
        )


def first_line(text: str) -> str:
    """Return the problem in one of the library's messages.

    The messages also show the source, quote it at any length, and name the library's own options.
    """
    lines = [line.strip() for line in text[:4096].splitlines() if line.strip()]
    problem = next(
        (line for line in lines if line.startswith("error: ")),
        lines[0] if lines else "no reason given",
    )
    return shown(problem.removeprefix("error: ").partition(". Enable ")[0])


def _source(grammar: Grammar) -> str:
    """Return the grammar in the library's format. Raises InvalidRequestError for invalid JSON."""
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    schema = schema_of(grammar)
    is_flexible = whitespace_is_flexible(schema)
    schema.pop(OPTIONS, None)  # clients may not set the compiler's other options
    return LLMatcher.grammar_from_json_schema(
        schema,
        defaults={"whitespace_pattern": JSON_WHITESPACE}
        if is_flexible
        else {"whitespace_flexible": False},
    )


def _only_bit(packed: bytes) -> int | None:
    """Return the number of the bit that is set, or None if there are several or none."""
    bits = int.from_bytes(packed, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _has_bit(packed: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(packed) and bool(packed[token_id >> 3] >> (token_id & 7) & 1)

"""Output that follows a JSON schema or a regular expression: which tokens may come next.

    grammars = load_grammars(model_dir, eos_token_ids)          None without a tokenizer or end-of-sequence tokens
    await grammars.check(grammar)                               compiles off the event loop; refuses what cannot work
    matcher = grammars.matcher(grammar)                         at the start of the text
    matcher.move_to((17, 4)); matcher.allowed(vocab_size)       [vocab_size] bool: what may follow these tokens

The automata are llguidance's. A grammar is compiled in milliseconds and explored as it is used; the library's fuel
limits bound every step of both.
"""

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from runtime.errors import CapacityError, FieldViolation, InvalidRequestError

logger = logging.getLogger(__name__)

# Between JSON tokens. Without a bound a weak model may indent until its tokens run out.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
MAX_GRAMMAR_BYTES = 1 << 16
MAX_COMPILED, MAX_COMPILING = 256, 32
COMPILE_TIMEOUT_S = 5.0


class GrammarKind(StrEnum):
    """Values are the fields of `StructuredOutput` in protos/types.proto."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True)
class Grammar:
    """What a text must look like as a whole, from its first token to its end."""

    kind: GrammarKind
    text: str

    @property
    def field(self) -> str:
        """Where a request says it."""
        return f"structured_output.{self.kind}"

    def refused(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(FieldViolation(self.field, problem))


class GrammarMatcher:
    """One text on its way through a grammar. Belongs to one thread."""

    def __init__(self, automaton: LLMatcher, end_token_ids: frozenset[int]) -> None:
        self._automaton = automaton
        self._end_token_ids = end_token_ids
        self._consumed: list[int] = []

    def move_to(self, token_ids: Sequence[int]) -> None:
        """Stand behind exactly these tokens, forgetting what was consumed beyond their common beginning.

        Raises:
            InvalidRequestError: the grammar does not allow them, or has become too complex to follow.
        """
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1],
                                          zip(self._consumed, token_ids, strict=False)))
        if common < len(self._consumed):
            self._automaton.rollback(len(self._consumed) - common)
            del self._consumed[common:]
        for token_id in token_ids[common:]:
            if not self._automaton.consume_token(token_id):
                raise self._given_up()
            self._consumed.append(token_id)

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """[vocab_size]: the tokens that may come next. End-of-sequence is allowed where the text may be over, and
        whatever follows it counts for nothing, so everything is.

        Raises:
            InvalidRequestError: the grammar has become too complex to follow.
        """
        if self._consumed and self._consumed[-1] in self._end_token_ids:
            return np.ones(vocab_size, np.bool_)
        packed = np.frombuffer(self._automaton.compute_bitmask(), np.uint8)
        if self._automaton.is_error():
            raise self._given_up()
        allowed = np.zeros(vocab_size, np.bool_)
        bits = np.unpackbits(packed, bitorder="little")[:vocab_size]
        allowed[:len(bits)] = bits
        return allowed

    def _given_up(self) -> InvalidRequestError:
        return InvalidRequestError(FieldViolation(
            "structured_output", f"cannot be followed beyond {len(self._consumed)} tokens: "
                                 f"{_first_line(self._automaton.get_error())}"))


class Grammars:
    """Compiled grammars over one vocabulary, the most recently used ones kept. Any thread."""

    def __init__(self, tokenizer: LLTokenizer, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset(end_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._num_compiling = 0

    async def check(self, grammar: Grammar) -> None:
        """Compile it on a thread, so that `matcher` finds it ready.

        Raises:
            InvalidRequestError: naming the field, if it is no grammar, is not supported, or takes too long.
            CapacityError: too many others wait to be compiled, or its turn has not come in time.
        """
        with self._lock:
            if grammar in self._compiled:
                return
            if self._num_compiling >= MAX_COMPILING:
                raise CapacityError(f"{MAX_COMPILING} grammars wait to be compiled, which is the limit",
                                    resource="grammar compiler")
            self._num_compiling += 1
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def compile_in_turn() -> None:
            loop.call_soon_threadsafe(begun.set)
            self._compile(grammar)

        compiling = self._compiler.submit(compile_in_turn)
        compiling.add_done_callback(lambda _: self._done_compiling())
        try:
            if not await _within(COMPILE_TIMEOUT_S, begun.wait()):
                raise CapacityError(f"other grammars kept the compiler busy for {COMPILE_TIMEOUT_S:g} s, the limit of "
                                    "waiting", resource="grammar compiler")
            if not await _within(COMPILE_TIMEOUT_S, asyncio.wrap_future(compiling)):
                raise grammar.refused(f"could not be compiled within {COMPILE_TIMEOUT_S:g} s")
        finally:
            compiling.cancel()  # gives its place back, if it has not begun

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A text that has not begun. Raises InvalidRequestError as `check` does."""
        return GrammarMatcher(self._compile(grammar).deep_copy(), self._end_token_ids)

    def _done_compiling(self) -> None:
        with self._lock:
            self._num_compiling -= 1

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        automaton = LLMatcher(self._tokenizer, _source(grammar), log_level=0,
                              limits=LLParserLimits(verbose_errors=False))
        if automaton.is_error():
            raise grammar.refused(_first_line(automaton.get_error()))
        with self._lock:
            self._compiled[grammar] = automaton
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return automaton


async def _within(limit_s: float, work: Awaitable[Any]) -> bool:
    """Whether it ended in time."""
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError:
        return False
    return True


def load_grammars(model_dir: Path, eos_token_ids: Sequence[int]) -> Grammars | None:
    """For the vocabulary of `tokenizer.json`; None where structured output cannot be offered: without a tokenizer, or
    without end-of-sequence tokens in its vocabulary, with which a text could end."""
    path = model_dir / "tokenizer.json"
    if not path.is_file() or not eos_token_ids:
        return None
    try:
        return Grammars(LLTokenizer(str(path), eos_token=list(eos_token_ids)), eos_token_ids)
    except ValueError as error:
        logger.warning("structured output is not offered, %s does not serve for it: %s", path, error)
        return None


def _source(grammar: Grammar) -> str:
    """The grammar in the library's terms. Raises InvalidRequestError for a schema that is not JSON."""
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise grammar.refused(f"is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise grammar.refused("must be a JSON object")
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_WHITESPACE})


def _first_line(text: str) -> str:
    """The library's messages draw the source below the problem."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    problem = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "no reason given")
    return problem.removeprefix("error: ")

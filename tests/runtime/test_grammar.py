"""One compiler for all grammars: a client hears whether its grammar is bad or others are in its way."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime import grammar as module
from runtime.errors import CapacityError, InvalidRequestError
from runtime.grammar import MAX_COMPILING, Grammar, GrammarKind, Grammars, load_grammars
from tests.router.harness import byte_level_tokenizer

WORD = Grammar(GrammarKind.REGEX, "[a-z]+")


@pytest.fixture
def grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grammars:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    grammars = load_grammars(tmp_path, (0,))
    assert grammars is not None
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.1)
    return grammars


@pytest.fixture
def hold() -> Iterator[Callable[..., None]]:
    """Work that keeps the compiler's thread until the test is over."""
    over = threading.Event()

    def work(*_: object) -> None:
        over.wait(timeout=30)

    yield work
    over.set()


async def test_a_grammar_whose_turn_does_not_come_is_not_called_bad(grammars: Grammars,
                                                                    hold: Callable[..., None]) -> None:
    grammars._compiler.submit(hold)
    for _ in range(2):  # the places of the first round are free again
        ends = await asyncio.gather(*(grammars.check(WORD) for _ in range(MAX_COMPILING)), return_exceptions=True)
        for end in ends:
            assert isinstance(end, CapacityError)
            assert "other grammars" in str(end)
            assert end.resource == "grammar compiler"


async def test_a_grammar_that_takes_too_long_itself_is_refused(grammars: Grammars, hold: Callable[..., None],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(grammars, "_compile", hold)
    with pytest.raises(InvalidRequestError, match=r"structured_output.regex: could not be compiled within 1 s"):
        await grammars.check(WORD)

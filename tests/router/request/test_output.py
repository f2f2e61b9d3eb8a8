"""Tokens to what the client gets: stop strings, stop tokens, minimum lengths."""

import pytest

from protos import generation_pb2, types_pb2
from router.request.output import Output
from router.text.detokenise import Detokenisers
from tests.router.harness import byte_level_tokenizer

DETOKENISERS = Detokenisers(byte_level_tokenizer())


def ids(text: str) -> list[int]:
    """One token per character."""
    return [token_id for character in text for token_id in byte_level_tokenizer().encode(character).ids]


def run(text: str, *, stops: tuple[str, ...] = (), chunk: int = 1, **engine: object) -> tuple[str, list[int], Output]:
    """(text given out, ids given out, the output) for these tokens in chunks."""
    request = types_pb2.EngineRequest(prompt_token_ids=[1, 2], **engine)  # type: ignore[arg-type]
    output = Output(request, stops, DETOKENISERS.new())
    given_text, tokens = "", ids(text)
    given_ids: list[int] = []
    for start in range(0, len(tokens), chunk):
        part = output.add(types_pb2.TokenChunk(token_ids=tokens[start:start + chunk]))
        given_text += part.text
        given_ids += part.token_ids
        if output.stop_string is not None:
            return given_text, given_ids, output
    return given_text + output.finish(), given_ids, output


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_a_stop_string_cuts_text_and_ids_whatever_the_chunks(chunk: int) -> None:
    text, token_ids, output = run("one two three", stops=("two", "three"), chunk=chunk)
    assert (text, output.stop_string) == ("one ", "two")
    assert token_ids == ids("one two")
    assert output.usage() == generation_pb2.Usage(prompt_tokens=2, completion_tokens=7)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (2, "a"), (3, "abca"), (5, "abca"), (6, "abcabc")])
def test_stop_strings_count_from_the_shortest_allowed_length(min_tokens: int, expected: str) -> None:
    assert run("abcabc", stops=("b",), min_tokens=min_tokens)[0] == expected


def test_a_stop_token_is_sent_but_is_no_text() -> None:
    text, token_ids, _ = run("ab!", stop_token_ids=ids("!"))
    assert text == "ab"
    assert token_ids == ids("ab!")


def test_a_stop_string_can_end_in_a_broken_character() -> None:
    """What is left of a character when the tokens end is text too."""
    output = Output(types_pb2.EngineRequest(), ("\ufffd",), DETOKENISERS.new())
    assert output.add(types_pb2.TokenChunk(token_ids=ids("é")[:1])).text == ""
    assert output.finish() == ""
    assert output.stop_string == "\ufffd"

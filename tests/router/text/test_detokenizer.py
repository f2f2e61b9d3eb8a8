"""Incremental text equals decoding everything at once; stop strings do not depend on how the text
is cut."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from router.text.detokenizer import BytesDetokenizer, Detokenizers, StopMatcher
from tests.router.harness import byte_level_tokenizer

stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
LLAMA_2 = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
WORDS = ["▁the", "▁red", "▁mill", "s", "ö", "<unk>", "▁", "▁▁two", "<s>", "</s>"]
FIRST_BYTE = len(WORDS)
SPECIAL = (WORDS.index("<s>"), WORDS.index("</s>"))
RED, BOS = WORDS.index("▁red"), SPECIAL[0]
BORDERS = [
    0x20,
    0x41,
    0x80,
    0x82,
    0x9F,
    0xA1,
    0xAC,
    0xC3,
    0xE2,
    0xED,
    0xF0,
    0xF4,
    0xFF,
]  # of UTF-8's ranges
word_ids = st.lists(st.integers(0, FIRST_BYTE - 1), max_size=8)
mixed_ids = st.lists(
    st.integers(0, FIRST_BYTE - 1) | st.sampled_from([FIRST_BYTE + byte for byte in BORDERS]),
    max_size=12,
)


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    detokenizer = Detokenizers(tokenizer).new(prompt)
    return "".join(detokenizer.add(token_id) for token_id in token_ids) + detokenizer.finish()


def sentencepiece_like(decoder: Any) -> Tokenizer:  # noqa: ANN401
    """Build words with a leading bar, special tokens, and bytes for the rest."""
    words = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def spelled(token_ids: Sequence[int]) -> bytes:
    """Return the text of these tokens of `sentencepiece_like`, by hand."""
    return b"".join(
        bytes([token_id - FIRST_BYTE])
        if token_id >= FIRST_BYTE
        else WORDS[token_id].replace("▁", " ").encode()
        for token_id in token_ids
        if token_id not in SPECIAL
    )


def byte_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    assert text_of(tokenizer, tokenizer.encode(text).ids) == text


@given(st.lists(st.integers(0, 600), max_size=40))
def test_any_ids_decode_as_by_the_tokenizer(token_ids: list[int]) -> None:
    """Also ids that are no valid UTF-8 together, special ones, and ids beyond the vocabulary."""
    tokenizer = byte_level_tokenizer()
    known = [token_id for token_id in token_ids if tokenizer.id_to_token(token_id) is not None]
    assert text_of(tokenizer, token_ids) == tokenizer.decode(known)


@given(st.text(min_size=1))
def test_only_whole_characters_come_out(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    detokenizer, so_far = Detokenizers(tokenizer).new(()), ""
    for token_id in tokenizer.encode(text).ids:
        so_far += detokenizer.add(token_id)
        assert text.startswith(so_far)


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = byte_level_tokenizer()
    detokenizer = Detokenizers(tokenizer).new(())
    token_ids = tokenizer.encode("\U0001f4a1").ids
    assert len(token_ids) > 1
    pieces = [detokenizer.add(token_id) for token_id in token_ids]
    assert pieces == [*[""] * (len(token_ids) - 1), "\U0001f4a1"]


def test_added_tokens_speak_for_themselves_and_special_ones_are_silent() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken("<a b>", special=False)])
    token_ids = tokenizer.encode("x<a b>y<bot>z").ids
    assert isinstance(Detokenizers(tokenizer).new(()), BytesDetokenizer)
    assert text_of(tokenizer, token_ids) == "x<a b>yz" == tokenizer.decode(token_ids)


@given(mixed_ids)
def test_byte_fallback_gives_one_replacement_per_maximal_part(token_ids: list[int]) -> None:
    """Python's decoder has them as Unicode recommends; tokenizers gives one for each byte of the
    run."""
    text = spelled(token_ids).decode(errors="replace")
    assert text_of(sentencepiece_like(GEMMA), token_ids) == text
    assert text_of(sentencepiece_like(LLAMA_2), token_ids) == text.removeprefix(" ")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xf0\x9f\x92", "\ufffd"),
        (b"\xf0\x9f\x92\xf0\x9f\x92\xa1", "\ufffd\U0001f4a1"),
        (b"\xe2\x82A", "\ufffdA"),
        (b"\xff\xff", "\ufffd\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"\xc3\xb6\xc3", "ö\ufffd"),
    ],
)
def test_a_cut_character_is_one_replacement(data: bytes, text: str) -> None:
    """The examples are those of the Unicode standard's tables 3-8 to 3-11 in kind: cut, cut again,
    surrogates."""
    assert text_of(sentencepiece_like(LLAMA_2), byte_ids(data)) == text


@given(word_ids)
@pytest.mark.parametrize(
    "decoder",
    [
        LLAMA_2,
        GEMMA,
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="first"),
        decoders.Metaspace(prepend_scheme="never"),
    ],
    ids=str,
)
def test_sentencepiece_words_decode_as_by_the_tokenizer(
    decoder: Any,  # noqa: ANN401
    token_ids: list[int],
) -> None:
    tokenizer = sentencepiece_like(decoder)
    assert isinstance(Detokenizers(tokenizer).new(()), BytesDetokenizer)
    assert text_of(tokenizer, token_ids) == tokenizer.decode(token_ids)


@given(word_ids, word_ids)
@pytest.mark.parametrize(
    "decoder",
    [
        LLAMA_2,
        GEMMA,
        decoders.Metaspace(),
        decoders.WordPiece(cleanup=False),
        decoders.BPEDecoder(),
        None,
    ],
    ids=str,
)
def test_a_text_continues_its_prompt(
    decoder: Any,  # noqa: ANN401
    prompt: list[int],
    token_ids: list[int],
) -> None:
    tokenizer = sentencepiece_like(decoder or LLAMA_2)
    if decoder is None:
        tokenizer.decoder = None
    assert tokenizer.decode(prompt) + text_of(tokenizer, token_ids, prompt) == tokenizer.decode(
        prompt + token_ids
    )


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ((WORDS.index("s"),), " red"),
        ((BOS, RED), " red"),
        ((BOS,), "red"),
        ((), "red"),
        ((BOS, WORDS.index("▁")), " red"),
    ],
)
def test_the_first_space_is_dropped_only_at_the_start_of_a_text(
    prompt: tuple[int, ...], text: str
) -> None:
    assert text_of(sentencepiece_like(LLAMA_2), [RED], prompt) == text


@pytest.mark.parametrize("decoder", [LLAMA_2, decoders.WordPiece(cleanup=False)], ids=str)
def test_many_special_tokens_in_a_row_lose_no_space(decoder: Any) -> None:  # noqa: ANN401
    tokenizer = sentencepiece_like(decoder)
    token_ids = [RED, *SPECIAL * 20, RED]
    assert text_of(tokenizer, token_ids) == tokenizer.decode(token_ids)
    before = tokenizer.decode([RED])
    assert before + text_of(tokenizer, [RED], [RED, *SPECIAL * 20]) == tokenizer.decode([RED, RED])


@given(st.text(max_size=4), st.integers(0, 16))
def test_an_output_completes_the_last_character_of_its_prompt(text: str, cut: int) -> None:
    data = text.encode()
    whole_before = data[:cut].decode(errors="ignore")
    assert (
        text_of(sentencepiece_like(GEMMA), byte_ids(data[cut:]), byte_ids(data[:cut]))
        == text[len(whole_before) :]
    )


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (b"\xe2\x82", b"\xac", "€"),
        (b"\xef\xbf", b"\xbd", "\ufffd"),
        (b"\xe2\x82", b"A", "A"),
        (b"\xe2\x82", b"", ""),
        (b"\xe2\x82", b"\xff", "\ufffd"),
        (b"\xf0\x9f", b"\x92", "\ufffd"),
        (b"\xf0\x9f", b"\x92A", "\ufffdA"),
        (b"A\xe2\x82\xac", b"\x82", "\ufffd"),
    ],
)
def test_a_broken_character_of_the_prompt_is_not_in_the_output(
    prompt: bytes, answer: bytes, text: str
) -> None:
    assert text_of(sentencepiece_like(GEMMA), byte_ids(answer), byte_ids(prompt)) == text


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level_tokenizer(), sentencepiece_like(LLAMA_2), sentencepiece_like(decoders.WordPiece())],
    ids=["bytes", "fallback", "window"],
)
def test_cost_is_linear(tokenizer: Tokenizer) -> None:
    def seconds(count: int) -> float:
        detokenizer, began = Detokenizers(tokenizer).new(()), time.thread_time()
        for i in range(count):
            detokenizer.add(200 if i % 3 else 3)  # also bytes that never become a character
        return time.thread_time() - began

    seconds(1000)
    assert min(seconds(16000) for _ in range(3)) < 64 * min(seconds(1000) for _ in range(3))


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the match that ends first, the longest among those, one character at a time."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.text("abc", max_size=40), stop_lists, st.lists(st.integers(0, 40), max_size=10))
def test_stop_strings_are_found_at_any_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    matcher, given_out, matched = StopMatcher(stops), "", None
    for start, end in itertools.pairwise(borders):
        piece, matched = matcher.feed(text[start:end])
        given_out += piece
        expected, _ = reference(text[:end], stops)
        assert expected.startswith(given_out), "text that may still be part of a match came out"
        if matched is not None:
            break
    else:
        given_out += matcher.finish()
    assert (given_out, matched) == reference(text, stops)


def test_no_more_than_needed_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.feed("a < b </e") == ("a < b ", None)
    assert matcher.feed("x") == ("</ex", None)


def test_a_long_stop_string_costs_nothing_before_the_text_follows_it() -> None:
    class Counted(str):
        num_reads = 0

        def __getitem__(self, key: Any) -> str:  # noqa: ANN401
            self.num_reads += 1
            return super().__getitem__(key)

    stop = Counted("a" * 1_000_000)
    matcher = StopMatcher([stop])
    assert matcher.feed("xxaab") == ("xxaab", None)
    assert stop.num_reads < 20

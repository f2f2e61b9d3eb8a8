"""Incremental text equals decoding everything at once; stop strings do not depend on how the text is cut."""

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from router.text.detokenise import ByteLevelDetokeniser, Detokeniser, Detokenisers, StopMatcher, WindowDetokeniser
from tests.router.harness import byte_level_tokenizer

stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def all_at_once(detokeniser: Detokeniser, token_ids: list[int]) -> str:
    return "".join(detokeniser.add(token_id) for token_id in token_ids) + detokeniser.finish()


def sentencepiece_like() -> Tokenizer:
    """Words with a leading bar, single characters, and bytes for the rest, decoded as Llama 2 does."""
    words = ["▁the", "▁red", "▁mill", "s", "ö", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>",
                                     byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return tokenizer


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    assert all_at_once(Detokenisers(tokenizer).new(), tokenizer.encode(text).ids) == text


@given(st.lists(st.integers(0, 600), max_size=40))
def test_any_ids_give_what_the_tokenizer_gives(token_ids: list[int]) -> None:
    """Also ids that are no valid UTF-8 together, special ones, and ids beyond the vocabulary."""
    tokenizer = byte_level_tokenizer()
    known = [token_id for token_id in token_ids if tokenizer.id_to_token(token_id) is not None]
    assert all_at_once(Detokenisers(tokenizer).new(), token_ids) == tokenizer.decode(known)


@given(st.text(min_size=1))
def test_only_whole_characters_come_out(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    detokeniser, so_far = Detokenisers(tokenizer).new(), ""
    for token_id in tokenizer.encode(text).ids:
        so_far += detokeniser.add(token_id)
        assert text.startswith(so_far)


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = byte_level_tokenizer()
    detokeniser = Detokenisers(tokenizer).new()
    token_ids = tokenizer.encode("\U0001f4a1").ids
    assert len(token_ids) > 1
    pieces = [detokeniser.add(token_id) for token_id in token_ids]
    assert pieces == [*[""] * (len(token_ids) - 1), "\U0001f4a1"]


def test_added_tokens_speak_for_themselves_and_special_ones_are_silent() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken("<a b>", special=False)])
    token_ids = tokenizer.encode("x<a b>y<bot>z").ids
    assert isinstance(Detokenisers(tokenizer).new(), ByteLevelDetokeniser)
    assert all_at_once(Detokenisers(tokenizer).new(), token_ids) == "x<a b>yz" == tokenizer.decode(token_ids)


@pytest.mark.parametrize("token_ids", [[0, 1, 2, 3], [1, 3, 1], [0, 6 + 0xC3, 6 + 0xB6, 2], [4, 1],
                                       [6 + 0xF0, 6 + 0x9F, 6 + 0x92, 6 + 0xA1, 0, 3]])
def test_other_tokenizers_decode_in_a_window(token_ids: list[int]) -> None:
    tokenizer = sentencepiece_like()
    detokeniser = Detokenisers(tokenizer).new()
    assert isinstance(detokeniser, WindowDetokeniser)
    assert all_at_once(detokeniser, token_ids) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentencepiece_like()], ids=["bytes", "window"])
def test_cost_is_linear(tokenizer: Tokenizer) -> None:
    def seconds(count: int) -> float:
        detokeniser, began = Detokenisers(tokenizer).new(), time.thread_time()
        for i in range(count):
            detokeniser.add(200 if i % 3 else 3)  # also bytes that never become a character
        return time.thread_time() - began

    seconds(1000)
    assert min(seconds(16000) for _ in range(3)) < 64 * min(seconds(1000) for _ in range(3))


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """One character at a time, by definition: the match that ends first, the longest among those."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[:end - len(longest)], longest
    return text, None


@given(st.text("abc", max_size=40), stop_lists, st.lists(st.integers(0, 40), max_size=10))
def test_stop_strings_are_found_wherever_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
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

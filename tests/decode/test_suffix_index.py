"""Earlier occurrences of the newest tokens, against a search by brute force."""

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode import suffix_index
from decode.suffix_index import (
    MAX_ALIKE,
    MAX_MATCH,
    MAX_SINGLE_TOKENS,
    MAX_VISITS,
    NO_OCCURRENCES,
    ORDERS,
    Occurrences,
    SuffixIndex,
)

SHORTEST = min(ORDERS)


def matching(tokens: Sequence[int], end: int) -> int:
    """Return how many tokens before `end` equal the newest ones."""
    length = 0
    while length < min(end, MAX_MATCH) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def index_of(tokens: Sequence[int], size: int) -> SuffixIndex:
    """Return an index to which the tokens were added in parts of this size."""
    index = SuffixIndex()
    for start in range(0, len(tokens), size):
        index.extend(tokens[start : start + size])
    return index


@given(st.lists(st.integers(0, 3), max_size=MAX_VISITS), st.integers(1, 7))
def test_a_short_text_is_searched_in_full(tokens: list[int], size: int) -> None:
    lengths = {end: matching(tokens, end) for end in range(1, len(tokens))}
    longest = max(lengths.values(), default=0)
    ends = tuple(end for end in reversed(lengths) if lengths[end] == longest)
    expected = Occurrences(ends, longest) if longest >= SHORTEST else NO_OCCURRENCES
    assert index_of(tokens, size).find() == expected


@given(st.lists(st.integers(0, 2), min_size=40, max_size=400), st.integers(1, 200))
def test_what_is_found_matches_and_has_one_length(tokens: list[int], size: int) -> None:
    found = index_of(tokens, size).find()
    assert {matching(tokens, end) for end in found.ends} <= {found.length}
    assert list(found.ends) == sorted(found.ends, reverse=True)
    assert len(found.ends) <= MAX_VISITS
    assert found == index_of(tokens, len(tokens)).find()


def test_tokens_added_one_by_one_are_found_like_many_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All visits are made, because collisions, which take some, depend on the table's size."""
    monkeypatch.setattr(suffix_index, "MAX_VISITS", 3000)
    rng = random.Random(0)
    tokens = [rng.choice((0, 1, 5, 2**31, 10**6)) for _ in range(3000)]
    singly, at_once = index_of(tokens, 1), index_of(tokens, MAX_SINGLE_TOKENS + 1)
    for _ in range(200):
        assert singly.find() == at_once.find()
        token = rng.choice(tokens)
        singly.extend([token])
        at_once.extend([token])


def test_a_long_match_wins_over_a_newer_short_one() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 4, 5, 8, 1, 2, 3, 4, 5]
    assert SuffixIndex(tokens).find() == Occurrences((5,), 5)
    assert SuffixIndex(tokens).following(5, 0) == 9


def test_a_text_is_assumed_to_repeat_beyond_its_end() -> None:
    index = SuffixIndex([7, 1, 2, 3, 1, 2, 3])
    assert index.find() == Occurrences((4,), 3)
    assert [index.following(4, depth) for depth in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_equal_hashes_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "_FACTOR", 0)
    index = index_of([1, 2, 3, 4, 5, 6, 7, 8], 1)
    assert index.find() == NO_OCCURRENCES
    index.extend([2, 3])
    assert index.find() == Occurrences((3,), 2)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [*range(40)]], ids=["one", "two", "forty"])
def test_a_text_that_repeats_visits_a_bounded_number(
    tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(tokens * (4000 // len(tokens)), 4000)
    visits = 0
    matches = SuffixIndex._matching

    def counting(self: SuffixIndex, at: int, newest: list[int]) -> int:
        nonlocal visits
        visits += 1
        return matches(self, at, newest)

    monkeypatch.setattr(SuffixIndex, "_matching", counting)
    assert index.find().length == MAX_MATCH
    assert visits <= MAX_VISITS
    assert len(index.find().ends) <= MAX_ALIKE


def test_a_token_takes_at_most_fifty_bytes() -> None:
    """The numbers of the tokens themselves belong to the request."""
    rng = random.Random(0)
    prompt, output = ([rng.randrange(50_000) for _ in range(count)] for count in (20_000, 10_000))
    tracemalloc.start()
    index = SuffixIndex(prompt)
    for token in output:
        index.extend([token])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used <= 50 * len(index)

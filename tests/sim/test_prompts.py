"""Names of pages against digests of their tokens."""

import itertools
import random

import pytest

from baton.workload import BLOCK_TOKENS, Planned
from router.workers.prefix_index import RoutedPrompt
from runtime.digests import NAME_BYTES
from sim.prompts import VOCAB_SIZE, PromptBook, TracedTokens

OWN = VOCAB_SIZE - 1 - 3


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (Planned(0.0, 5, 1), [OWN] * 5),
        (Planned(0.0, BLOCK_TOKENS + 2, 1, (0, 300)), [1] * BLOCK_TOKENS + [301] * 2),
        (
            Planned(0.0, 2 * BLOCK_TOKENS + 1, 1, (126, 127)),
            [127] * BLOCK_TOKENS + [128] * BLOCK_TOKENS + [OWN],
        ),
        (Planned(0.0, 3, 1, (7, 8)), [8] * 3),
    ],
)
def test_tokens_are_those_of_the_blocks(planned: Planned, expected: list[int]) -> None:
    tokens = TracedTokens(3, planned)
    assert list(tokens) == expected
    assert list(tokens[:2]) == expected[:2]


@pytest.mark.parametrize("page_size", [16, 64, 96, 512, 1000])
def test_names_are_equal_if_digests_are(page_size: int) -> None:
    """Of prompts that fork, end within blocks, or within what is of no block: every page of each
    against all others."""
    rng, book = random.Random(page_size), PromptBook()
    loads = [
        Planned(
            0.0,
            rng.randrange(1, 4 * BLOCK_TOKENS),
            1,
            tuple(rng.choices(range(2), k=rng.randrange(4))),
        )
        for _ in range(40)
    ]
    names, digests = dict[tuple[int, int], bytes](), dict[tuple[int, int], bytes]()
    for number, planned in enumerate(loads):
        prompt = book.prompt(number, planned)
        real = RoutedPrompt(list(TracedTokens(number, planned)))
        whole = RoutedPrompt([*real.token_ids, 1]).block_names(page_size, "m")
        assert len(prompt.page_names(page_size)) == len(whole) == prompt.num_tokens // page_size
        reusable = len(real.block_names(page_size, "m"))
        assert prompt.block_names(page_size, "m") == prompt.page_names(page_size)[:reusable]
        assert prompt.block_names(page_size, "m") is prompt.block_names(page_size, "m"), (
            "an index keeps what it found"
        )
        for page, (name, digest) in enumerate(
            zip(prompt.page_names(page_size), whole, strict=True)
        ):
            names[number, page], digests[number, page] = name, digest
    assert {len(name) for name in names.values()} == {NAME_BYTES}
    for first, second in itertools.combinations(names, 2):
        assert (names[first] == names[second]) == (digests[first] == digests[second]), (
            first,
            second,
        )


def test_the_whole_prompt_has_a_digest() -> None:
    book, blocks = PromptBook(), (1, 2)
    first, again, longer, other = (
        book.prompt(number, Planned(0.0, count, 1, of)).digest
        for number, (count, of) in enumerate(
            [(600, blocks), (600, blocks), (700, blocks), (600, ())]
        )
    )
    assert first == again
    assert len({first, longer, other}) == 3


@pytest.mark.parametrize("num_tokens", [1, 2, 1000, (1 << 17) + 5])
def test_a_request_is_as_long_as_its_prompt(num_tokens: int) -> None:
    assert len(PromptBook().request(num_tokens).prompt_token_ids) == num_tokens

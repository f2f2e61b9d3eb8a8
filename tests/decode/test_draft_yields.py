"""What is known of a draft model's trees: how far they were right, by depth."""

import random

import pytest

from decode.draft_yields import (
    FIRST_GUESS,
    MEMORY,
    POOL_MEMORY,
    DraftYield,
    GrownTree,
    matching_depth,
    tree_depth,
)
from engine.core.draft_trees import NO_TREE, TokenTree

# 7 and 8 follow the known token, 1 and 2 follow 8, and 3 follows 2
TREE = TokenTree((7, 8, 1, 2, 3), (-1, -1, 1, 1, 3))


def chain(*token_ids: int) -> TokenTree:
    return TokenTree.chain(token_ids)


@pytest.mark.parametrize(
    ("token_ids", "depth"),
    [((), 0), ((9,), 0), ((7,), 1), ((7, 1), 1), ((8, 2), 2), ((8, 2, 3), 3), ((8, 2, 3, 4), 3)],
)
def test_the_path_of_the_output_through_a_tree(token_ids: tuple[int, ...], depth: int) -> None:
    assert matching_depth(TREE, token_ids) == depth


def test_of_equal_children_the_first_counts_as_in_verification() -> None:
    assert matching_depth(TokenTree((7, 7, 5), (-1, -1, 1)), (7, 5)) == 1


def test_the_depth_of_a_tree() -> None:
    assert [tree_depth(tree) for tree in (NO_TREE, chain(4), chain(4, 5, 6), TREE)] == [0, 1, 3, 3]


def test_before_a_measurement_each_depth_is_a_guess() -> None:
    assert DraftYield(MEMORY).expected(0) == 0
    assert DraftYield(MEMORY).expected(2) == FIRST_GUESS + FIRST_GUESS**2


@pytest.mark.parametrize("memory", [MEMORY, POOL_MEMORY])
def test_the_expectation_is_the_mean_of_what_was_accepted(memory: float) -> None:
    measured, rng = DraftYield(memory), random.Random(0)
    accepted = [rng.choice((0, 1, 1, 3)) for _ in range(3000)]
    found = []
    for right in accepted:
        measured.add(3, right, right + 1)
        found.append(measured.expected(3))
    assert sum(found[1000:]) / 2000 == pytest.approx(sum(accepted) / 3000, rel=0.05)


def test_depths_of_which_nothing_is_known_keep_their_value() -> None:
    measured = DraftYield(MEMORY)
    measured.add(4, 2, 2)  # two tokens came, and both were right
    deeper = measured.expected(4) - measured.expected(2)
    assert deeper == pytest.approx(FIRST_GUESS**3 + FIRST_GUESS**4)
    assert measured.expected(2) > FIRST_GUESS + FIRST_GUESS**2
    measured.add(4, 1, 2)  # the second was wrong, so the third and fourth are wrong, too
    assert measured.expected(4) - measured.expected(2) == pytest.approx(MEMORY * deeper)


def test_a_request_begins_with_the_measurements_of_all() -> None:
    typical = DraftYield(POOL_MEMORY)
    for _ in range(1000):
        typical.add(2, 0, 1)
    grown = GrownTree(typical.of_request())
    grown.follow(chain(5, 6), [1], typical)
    assert grown.expected < 0.01
    for number in range(1, 30):
        outputs = [1, *[5, 6, 4] * number]
        grown.follow(chain(5, 6), outputs, typical)
    assert grown.expected > 1.8
    assert typical.expected(2) < 1.5


def test_a_tree_is_compared_though_another_was_verified() -> None:
    """Only with the tokens that came since, and not with those before."""
    typical = DraftYield(POOL_MEMORY)
    grown = GrownTree(typical.of_request())
    before = typical.expected(3)
    grown.follow(chain(5, 6, 7), [9, 5, 6, 7], typical)
    assert typical.expected(3) == before
    grown.follow(NO_TREE, [9, 5, 6, 7, 5, 6, 7], typical)
    after = typical.expected(3)
    assert after > before
    grown.follow(NO_TREE, [9, 5, 6, 7, 5, 6, 7, 8], typical)
    assert typical.expected(3) == after

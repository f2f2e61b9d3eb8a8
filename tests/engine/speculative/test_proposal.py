"""Draft trees: shape, order and score against a tree grown by brute force."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.core.draft_trees import TokenTree, ancestors, node_depths
from engine.speculative.trees.proposal import Proposal

VOCAB = 40


def distribution(path: tuple[int, ...]) -> Tensor:
    """Return the toy draft's log probabilities [vocab] after a path of tokens."""
    seed = hash(path) % 2**31
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)


def grow(
    roots: list[int], *, width: int, steps: int, num_nodes: int
) -> tuple[list[TokenTree], list[Tensor]]:
    """Drive a Proposal over the toy draft as a drafter does; also the frontiers' parent places."""

    def best(paths: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        found = torch.stack([distribution(path) for path in paths]).topk(width)
        return found.values, found.indices

    proposal = Proposal(*best([(root,) for root in roots]))
    paths: list[list[tuple[int, ...]]] = [
        [(root, int(token)) for token in proposal.frontier_tokens[row]]
        for row, root in enumerate(roots)
    ]
    origins = []
    for _ in range(steps - 1):
        values, indices = best([path for row in paths for path in row])
        shape = (len(roots), width, width)
        origin = proposal.expand(values.view(shape), indices.view(shape))
        origins.append(origin)
        paths = [
            [
                (*paths[row][int(place)], int(token))
                for place, token in zip(origin[row], proposal.frontier_tokens[row], strict=True)
            ]
            for row in range(len(roots))
        ]
    return proposal.candidates().trees([num_nodes] * len(roots)), origins


def score(root: int, tree: TokenTree, node: int) -> float:
    path = [tree.token_ids[i - 1] for i in ancestors(tree.rooted_parents, node + 1)[1:]]
    return sum(float(distribution((root, *path[:i]))[token]) for i, token in enumerate(path))


@settings(max_examples=40, deadline=None)
@given(
    roots=st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
    width=st.integers(1, 4),
    steps=st.integers(1, 5),
    num_nodes=st.integers(0, 20),
)
def test_trees_are_well_formed(roots: list[int], width: int, steps: int, num_nodes: int) -> None:
    trees, _ = grow(roots, width=width, steps=steps, num_nodes=num_nodes)
    candidates = width + (steps - 1) * width**2
    for root, tree in zip(roots, trees, strict=True):
        assert len(tree) == min(num_nodes, candidates)
        depths = node_depths(tree.rooted_parents)
        assert max(depths) <= steps
        assert list(depths) == sorted(depths), "creation order is level by level"
        assert len(set(zip(tree.parents, tree.token_ids, strict=True))) == len(tree), (
            "siblings differ"
        )
        for node, parent in enumerate(tree.parents):
            assert parent < node
            if parent >= 0:
                assert score(root, tree, node) <= score(root, tree, parent) + 1e-5


@settings(max_examples=20, deadline=None)
@given(root=st.integers(0, 10**6), steps=st.integers(1, 5))
def test_width_one_is_the_greedy_chain(root: int, steps: int) -> None:
    (tree,), _ = grow([root], width=1, steps=steps, num_nodes=steps)
    path: tuple[int, ...] = (root,)
    for token in tree.token_ids:
        assert token == int(distribution(path).argmax())
        path = (*path, token)
    assert tree.parents == tuple(range(-1, steps - 1))


def test_first_level_is_the_drafts_best_tokens() -> None:
    (tree,), _ = grow([7], width=4, steps=3, num_nodes=20)
    assert list(tree.token_ids[:4]) == distribution((7,)).topk(4).indices.tolist()


def test_the_best_nodes_of_all_levels_keep_their_creation_order() -> None:
    """By hand: after a, children x (p 0.9) and y (0.1); below x: u 0.9 and v 0.1; below y: w 0.6
    and z 0.4."""
    proposal = Proposal(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[1, 2]]))
    origin = proposal.expand(
        torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log(), torch.tensor([[[3, 4], [5, 6]]])
    )
    assert proposal.frontier_tokens.tolist() == [[3, 4]]
    assert origin.tolist() == [[0, 0]]
    assert proposal.candidates().trees([3]) == [TokenTree((1, 2, 3), (-1, -1, 0))]
    assert proposal.candidates().trees([4]) == [TokenTree((1, 2, 3, 4), (-1, -1, 0, 0))]
    assert proposal.candidates().trees([2]) == [TokenTree((1, 3), (-1, 0))]


def test_a_parent_is_kept_before_a_child_of_the_same_score() -> None:
    proposal = Proposal(torch.zeros(1, 1), torch.tensor([[1]]))
    proposal.expand(torch.zeros(1, 1, 1), torch.tensor([[[2]]]))
    proposal.expand(torch.full((1, 1, 1), 1e-7), torch.tensor([[[3]]]))  # rounding above certainty
    assert proposal.candidates().trees([1]) == [TokenTree((1,), (-1,))]
    assert proposal.candidates().trees([2]) == [TokenTree((1, 2), (-1, 0))]


TREES = st.lists(st.integers(0, 99), max_size=12).flatmap(
    lambda tokens: st.tuples(*(st.integers(-1, i - 1) for i in range(len(tokens)))).map(
        lambda parents: TokenTree(tuple(tokens), parents)
    )
)


@given(tree=TREES, depth=st.integers(0, 6), count=st.integers(0, 12))
def test_cut_trees_keep_their_paths(tree: TokenTree, depth: int, count: int) -> None:
    def paths(of: TokenTree) -> list[tuple[int, ...]]:
        return [
            tuple(of.token_ids[i - 1] for i in ancestors(of.rooted_parents, node + 1)[1:])
            for node in range(len(of))
        ]

    assert paths(tree.within(depth)) == [path for path in paths(tree) if len(path) <= depth]
    assert paths(tree.first(count)) == paths(tree)[:count]

"""How far a draft model's trees are right, measured by depth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from engine.core.draft_trees import NO_TREE, TokenTree, node_depths

FIRST_GUESS = 0.7  # accepted tokens per drafted one of each depth, before a measurement
MEMORY = 0.9  # the weight of a request's earlier trees
POOL_MEMORY = 0.97  # the weight of earlier trees of all requests


@dataclass
class DraftYield:
    """The fractions of trees that were right up to each depth, with decaying weights."""

    memory: float
    _reached: list[float] = field(default_factory=list)

    def expected(self, depth: int) -> float:
        """Return how many tokens of a tree of this depth are accepted on average."""
        self._grow(depth)
        return sum(self._reached[:depth])

    @property
    def expected_of_most(self) -> float:
        """Return the same of the deepest tree so far; infinity before there is any."""
        return sum(self._reached) if self._reached else math.inf

    def add(self, depth: int, right: int, known: int) -> None:
        """Record a tree that is right up to depth `right`, of which `known` depths are known.

        If it is wrong within these, it is right no deeper.
        """
        self._grow(depth)
        reached, memory = self._reached, self.memory
        for level in range(depth if right < known else min(depth, known)):
            reached[level] = memory * reached[level] + (1 - memory if level < right else 0.0)

    def of_request(self) -> Self:
        """Return the same measurements, to be continued by one request."""
        return replace(self, memory=MEMORY, _reached=list(self._reached))

    def _grow(self, depth: int) -> None:
        for level in range(len(self._reached), depth):
            self._reached.append(FIRST_GUESS * (self._reached[level - 1] if level else 1.0))


@dataclass
class GrownTree:
    """The last tree that a draft model grew for a request, and what its trees yield.

    `depth` is that of its deepest node. `num_outputs` is the number of output tokens that the tree
    follows. `num_rests` counts the steps since trees ceased to pay.
    """

    yields: DraftYield
    tree: TokenTree = NO_TREE
    depth: int = 0
    num_outputs: int = 0
    num_rests: int = 0

    @property
    def expected(self) -> float:
        """Return how many of its tokens are accepted on average."""
        return self.yields.expected(self.depth)

    def follow(self, tree: TokenTree, outputs: Sequence[int], typical: DraftYield) -> None:
        """Compare the last tree with the output since, and take the next one.

        The tree need not have been verified. `typical` is of all requests.
        """
        if self.tree:
            actual = outputs[self.num_outputs :]
            right = matching_depth(self.tree, actual)
            for yields in (self.yields, typical):
                yields.add(self.depth, right, len(actual))
        self.tree, self.depth, self.num_outputs = tree, tree_depth(tree), len(outputs)


def tree_depth(tree: TokenTree) -> int:
    """Return the depth of the deepest node, 0 without nodes."""
    if _is_chain(tree):
        return len(tree)
    return max(node_depths(tree.rooted_parents))


def matching_depth(tree: TokenTree, token_ids: Sequence[int]) -> int:
    """Return how many of the first tokens are a path of the tree from its root."""
    if _is_chain(tree):
        depth = 0
        for drafted, actual in zip(tree.token_ids, token_ids, strict=False):
            if drafted != actual:
                break
            depth += 1
        return depth
    children: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        children.setdefault(edge, node)
    node = -1
    for depth, token_id in enumerate(token_ids):
        found = children.get((node, token_id))
        if found is None:
            return depth
        node = found
    return len(token_ids)


def _is_chain(tree: TokenTree) -> bool:
    return len(set(tree.parents)) == len(tree)  # parents precede children

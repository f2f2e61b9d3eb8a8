"""Growth of draft trees by the draft's own probabilities, one level at a time.

Each level expands the best nodes of the previous one by their most likely tokens. A node's score is
the sum of the log probabilities on its path (Li et al. 2024, "EAGLE-2"). Finally the best nodes of
all levels are kept, in the order of creation, so that parents precede their children. With one
child per node this is a chain.

Legend: R rows, K children per node and nodes per frontier.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.draft_trees import TokenTree


@dataclass(frozen=True)
class Candidates:
    """All nodes of all rows, in the order of creation.

    Each tensor is [R, n], with n the nodes of all levels. `parents` are indices within the row, or
    -1 for children of the row's known token.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor

    def trees(self, num_nodes: Sequence[int]) -> list[TokenTree]:
        """Return the best `num_nodes[r]` candidates of each row, in the order of creation."""
        # Equal scores stay in the order of creation, so a parent is kept before a child with the
        # same score.
        ranked = self.scores.sort(dim=1, descending=True, stable=True).indices.tolist()
        tokens = self.tokens.tolist()
        parents = self.parents.tolist()
        return [
            _keep(sorted(ranked[row][:count]), tokens[row], parents[row])
            for row, count in enumerate(num_nodes)
        ]


@dataclass(frozen=True)
class Chains:
    """Chains of tokens, [R, n] int64."""

    tokens: Tensor

    def trees(self, num_nodes: Sequence[int]) -> list[TokenTree]:
        """Return the first `num_nodes[r]` tokens of each row as a tree."""
        kept = [
            tuple(tokens[:count])
            for tokens, count in zip(self.tokens.tolist(), num_nodes, strict=True)
        ]
        return [TokenTree.chain(tokens) for tokens in kept]


class Proposal:
    """The candidates of all rows so far. `expand` adds a level below the frontier."""

    def __init__(self, log_p: Tensor, token_ids: Tensor) -> None:
        """Create the first level: log probabilities and tokens [R, K] after the known tokens."""
        self._width = log_p.shape[1]
        log_p = log_p.clamp(max=0.0)
        self._scores = [log_p]
        self._tokens = [token_ids]
        self._parents = [torch.full_like(token_ids, -1)]
        self._num_candidates = self._width
        self._frontier_scores = log_p
        self._frontier_nodes = torch.arange(self._width, device=token_ids.device).expand_as(
            token_ids
        )
        self.frontier_tokens = token_ids

    def expand(self, log_p: Tensor, token_ids: Tensor) -> Tensor:
        """Add children [R, K, K] of the frontier's nodes. The best K of them are the next frontier.

        Return [R, K] int64: for each node of the new frontier, the index of its parent in the old
        one.
        """
        rows = log_p.shape[0]
        width = self._width
        # A log probability is never positive. Rounding must not make a child better than its
        # parent.
        scores = (self._frontier_scores[..., None] + log_p.clamp(max=0.0)).flatten(1)
        tokens = token_ids.flatten(1)
        self._scores.append(scores)
        self._tokens.append(tokens)
        self._parents.append(self._frontier_nodes[..., None].expand(-1, -1, width).flatten(1))
        if width == 1:  # a chain has no alternatives
            self._frontier_scores = scores
            self.frontier_tokens = tokens
            self._frontier_nodes = self._frontier_nodes + 1
            return torch.zeros_like(tokens)
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
        self._frontier_scores = scores.gather(1, best)
        self._frontier_nodes = self._num_candidates + best
        self.frontier_tokens = tokens.gather(1, best)
        self._num_candidates += scores.shape[1]
        assert rows == self.frontier_tokens.shape[0]
        return best // width

    def candidates(self) -> Candidates:
        """Return all nodes so far."""
        return Candidates(
            torch.cat(self._scores, 1), torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        )


def _keep(nodes: list[int], tokens: list[int], parents: list[int]) -> TokenTree:
    place = {old: new for new, old in enumerate(nodes)} | {-1: -1}
    return TokenTree(
        tuple(tokens[node] for node in nodes), tuple(place[parents[node]] for node in nodes)
    )

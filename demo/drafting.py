"""Tokens per target pass with a draft tree, measured without an engine.

Greedy verification accepts exactly the longest path of the tree that the target's own continuation
follows. So the continuation is generated once, and only the draft runs step by step. The counts
equal those of real speculation.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.draft import DraftHead, DraftKV


@dataclass(frozen=True)
class TreeShape:
    """Children per node, levels, and drafted nodes kept in total. Width 1 is a chain."""

    width: int
    depth: int
    nodes: int


@dataclass(frozen=True)
class Node:
    token: int
    parent: int  # index in the tree, -1 below the root
    score: float  # sum of log-probabilities from the root


@dataclass(frozen=True)
class _Frontier:
    """The nodes that a level expands, the hidden states that predicted them, and their past."""

    nodes: list[int]
    hidden: Tensor  # [nodes, 1, hidden_size]
    past: DraftKV


@torch.no_grad()
def propose(
    head: DraftHead, embedding: Tensor, hidden: Tensor, past: DraftKV, shape: TreeShape
) -> list[Node]:
    """Return a tree of likely continuations; parents come before their children.

    Args:
        embedding: the target's, [vocab_size, hidden_size].
        hidden: [1, 1, hidden_size], the draft's state at the last true slot.
        past: keys and values of all true slots.
    """
    tree = _children(head.logits(hidden)[0], [(-1, 0.0)], shape.width)
    origin = torch.zeros(len(tree), dtype=torch.long)
    frontier = _Frontier(list(range(len(tree))), hidden[origin], past.select(origin))
    true_slots = past.keys.shape[2]
    for level in range(shape.depth - 1):
        tokens = torch.tensor([[tree[i].token] for i in frontier.nodes])
        mask = torch.ones(1, true_slots + level + 1, dtype=torch.bool)
        hidden, fresh = head(
            F.embedding(tokens, embedding),
            frontier.hidden,
            torch.tensor([true_slots + level]),
            past=frontier.past,
            mask=mask,
        )
        parents = [(i, tree[i].score) for i in frontier.nodes]
        grown = _children(head.logits(hidden)[:, 0], parents, shape.width)
        best = sorted(range(len(grown)), key=lambda i: (-grown[i].score, i))[: shape.width]
        rows = torch.tensor([frontier.nodes.index(grown[i].parent) for i in best])
        frontier = _Frontier(
            [len(tree) + i for i in best], hidden[rows], frontier.past.append(fresh).select(rows)
        )
        tree += grown
    return _prune(tree, shape.nodes)


def _children(logits: Tensor, parents: list[tuple[int, float]], width: int) -> list[Node]:
    """Return the `width` best tokens after each parent (index, score).

    logits: [parents, vocab_size].
    """
    scores, tokens = logits.log_softmax(-1).topk(width)
    return [
        Node(token, parent, base + score)
        for (parent, base), row, row_scores in zip(
            parents, tokens.tolist(), scores.tolist(), strict=True
        )
        for token, score in zip(row, row_scores, strict=True)
    ]


def _prune(tree: list[Node], count: int) -> list[Node]:
    """Return the best `count` nodes in creation order.

    A parent never scores below its child, so no node loses its parent.
    """
    kept = sorted(sorted(range(len(tree)), key=lambda i: (-tree[i].score, i))[:count])
    place = {old: new for new, old in enumerate(kept)} | {-1: -1}
    return [Node(tree[i].token, place[tree[i].parent], tree[i].score) for i in kept]


def accepted(tree: list[Node], continuation: list[int]) -> int:
    """Return the number of draft tokens that the target's own continuation confirms."""
    at = -1
    count = 0
    for token in continuation:
        found = [i for i, node in enumerate(tree) if node.parent == at and node.token == token]
        if not found:
            break
        at = found[0]
        count = count + 1
    return count


@torch.no_grad()
def target_passes(
    head: DraftHead,
    embedding: Tensor,
    ids: Tensor,
    features: Tensor,
    prompt_length: int,
    shape: TreeShape,
) -> int:
    """Return the number of target passes that decode `ids[prompt_length + 1:]`.

    Prefill samples the token at `prompt_length`. ids: [1, T]; features: [1, T, 3 * hidden], from
    `demo.train_draft.target_features`.
    """
    slots = ids.shape[1] - 1
    hidden, past = head(
        F.embedding(ids[:, 1:], embedding),
        head.fc(features[:, :slots]),
        torch.arange(slots),
        past=None,
        mask=torch.ones(slots, slots, dtype=torch.bool).tril(),
    )
    tokens = ids[0].tolist()
    at = prompt_length
    passes = 0
    while at < slots:  # tokens[at] is the newest token that the client has
        tree = propose(head, embedding, hidden[:, at - 1 : at], past.first(at), shape)
        at += accepted(tree, tokens[at + 1 :]) + 1
        passes += 1
    return passes

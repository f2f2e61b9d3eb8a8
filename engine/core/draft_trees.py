"""Token trees, and the speculation data of a batch.

The pool's batches carry `SpecInfo`; a draft's batches carry `CarriedKeys`. Both are plain data,
which drafting, attention, recurrence and frames read.

A row under verification holds its newest known token (the root), followed by the drafted tokens.
Nodes are numbered in row order: the root is 0, and parents precede children.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens after a known token.

    `parents[i]` is an index below i, or -1 for a child of the known token.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(
                f"{len(self.token_ids)} tokens need as many parents, got {len(self.parents)}"
            )
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents must come before their children, got {self.parents}")

    @classmethod
    def chain(cls, token_ids: tuple[int, ...]) -> Self:
        """Return a tree in which each token follows the one before it."""
        return cls(token_ids, tuple(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def rooted_parents(self) -> tuple[int, ...]:
        """Return the parents of root and nodes in row numbering.

        The root's parent is -1. Node i of the tree is node i + 1 of the row.
        """
        return (-1, *(parent + 1 for parent in self.parents))

    def first(self, count: int) -> "TokenTree":
        """Return the tree of the first `count` nodes.

        No node loses its parent, because parents precede children.
        """
        if count >= len(self):
            return self
        return TokenTree(self.token_ids[:count], self.parents[:count])

    def within(self, depth: int) -> "TokenTree":
        """Return the tree of the nodes of at most this depth.

        Children of the known token have depth 1.
        """
        if depth >= len(self):
            return self
        depths = node_depths(self.rooted_parents)[1:]
        accepted = [node for node, found in enumerate(depths) if found <= depth]
        place = {old: new for new, old in enumerate(accepted)} | {-1: -1}
        return TokenTree(
            tuple(self.token_ids[node] for node in accepted),
            tuple(place[self.parents[node]] for node in accepted),
        )


NO_TREE = TokenTree()


def node_depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the depth of each node; a node whose parent is -1 has depth 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return tuple(depths)


@dataclass(frozen=True)
class AcceptedNodes:
    """The accepted nodes of a row's previous verification.

    `nodes` is in depth order, the root first. Their cache entries belong directly after the
    `context_len` tokens that were cached before.
    """

    context_len: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class SpecRow:
    """One row's part of `SpecInfo`.

    Attributes:
        parents: VERIFY: for each token of the row the index of its parent within the row; -1 for
            the root.
        accepted: nodes that every stage commits before the row runs; None if its last step verified
            nothing.
        next_token_id: the token after the row's last one, if the batch does not sample it; else
            None.
        draft_start: the first position with a valid draft cache. The entries from this position on
            are in the row's own pages, which no other request reads.
        num_draft_tokens: the maximum number of nodes of the next tree. With 0 the draft processes
            the row and grows no tree; with None it skips the row.
        scratch: the record in which recurrent layers keep the states of the row's nodes, from a
            verification until its accepted nodes are committed; 0, the null record, if there are
            none.
    """

    parents: tuple[int, ...] = ()
    accepted: AcceptedNodes | None = None
    next_token_id: int | None = None
    draft_start: int = 0
    num_draft_tokens: int | None = None
    scratch: int = 0


@dataclass(frozen=True)
class SpecInfo:
    """`spec_info` of the batches of a pool that speculates.

    `token_ids` [T] int64 are the batch's tokens, for a draft on the last stage. `rows` is parallel
    to the batch's rows.
    """

    token_ids: Tensor
    rows: tuple[SpecRow, ...]

    @cached_property
    def depths(self) -> tuple[tuple[int, ...], ...]:
        """Return the depth of each node, per row."""
        return tuple(node_depths(row.parents) for row in self.rows)

    @cached_property
    def is_chain(self) -> bool:
        """Return whether every node's parent is the node before it.

        The tree's order is then the plain causal order.
        """
        return all(
            parent == node - 1 for row in self.rows for node, parent in enumerate(row.parents)
        )


@dataclass
class CarriedKeys:
    """`spec_info` of a draft's batch whose steps share one selection of keys (DSA).

    A step that finds no selection selects keys and stores them here. A model whose steps do not
    share overwrites the selection at each step. The object lives as long as its batch: nothing
    remains after a round, also if it fails. A batch whose membership changes has none.

    Attributes:
        selected: [T, n] int32 key positions of the batch's tokens, padded with -1.
    """

    selected: Tensor | None = None

    @classmethod
    def chosen_by(cls, keys: Tensor | None) -> "CarriedKeys":
        """Return the start of a round that continues tokens with the selection `keys` [R, n].

        A step selects for all its tokens or for none. So if one token has no key, the whole round
        selects again. Positions count a row's own keys, independent of its pages, so they need no
        translation.
        """
        return cls(keys if keys is not None and (keys >= 0).any(1).all() else None)


@dataclass(frozen=True)
class Verified:
    """The result of verifying one sampling row.

    `accepted` are the accepted nodes, root first. The row sampled one token per accepted node. A
    row that was not under verification accepts only its last token; a row of a PREBUILT batch
    accepts nothing. `draft` is the next tree to verify; if `is_forced`, the request's grammar
    allows no other tokens.
    """

    accepted: tuple[int, ...] = (0,)
    draft: TokenTree = NO_TREE
    is_forced: bool = False


def ancestors(parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    """Return the path to a node, from the root to the node itself."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return tuple(reversed(path))

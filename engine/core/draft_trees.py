"""Token trees and what a batch carries of speculation: `SpecInfo` the pool's batches, `CarriedKeys`
those of a draft. Plain data: drafting, attention, recurrence and frames all read it.

A row under verification brings its newest known token (the root) and the drafted tokens behind it.
Nodes are numbered in the order they lie in the row, parents before children, the root 0.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens after a token that is known. `parents[i]` is an index before i, or -1 below
    the known token."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(
                f"{len(self.token_ids)} tokens need as many parents, got {len(self.parents)}"
            )
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents must come before their children, got {self.parents}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def rooted_parents(self) -> tuple[int, ...]:
        """Parents of root and nodes as a row numbers them: the root's is -1, node i of the tree is
        i + 1."""
        return (-1, *(parent + 1 for parent in self.parents))

    def first(self, count: int) -> "TokenTree":
        """The tree of the first `count` nodes; no node loses its parent."""
        if count >= len(self):
            return self
        return TokenTree(self.token_ids[:count], self.parents[:count])

    def within(self, depth: int) -> "TokenTree":
        """The nodes of at most this depth; those below the known token have depth 1."""
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
    """Depth of each node, 0 where the parent is -1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return tuple(depths)


@dataclass(frozen=True)
class AcceptedNodes:
    """What remains of a row's previous verification: `nodes`, the root first, in depth order. Their
    cache entries belong right behind the `context_len` tokens that were cached before it."""

    context_len: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class SpecRow:
    """One row's share of `SpecInfo`.

    parents           VERIFY: per token of the row the index of its parent within the row; -1 for the root
    accepted          to be committed on every stage before the row runs; None if its last step verified nothing
    next_token_id     the token after the row's last one where the batch does not draw it, else None
    draft_start       tokens before this position have no draft cache that counts; those from there on have theirs in
                      the row's pages from that of this position on, where nobody else reads
    num_draft_tokens  how many nodes the next tree may have; 0: the draft follows and grows none; None: it leaves this
                      row out
    scratch           where recurrent layers keep the states of the row's nodes, from one verification until what was
                      accepted of it is committed; 0, the null record, where there are none to keep
    """

    parents: tuple[int, ...] = ()
    accepted: AcceptedNodes | None = None
    next_token_id: int | None = None
    draft_start: int = 0
    num_draft_tokens: int | None = None
    scratch: int = 0


@dataclass(frozen=True)
class SpecInfo:
    """`spec_info` of the batches of a pool that speculates. `token_ids` [T] int64 are the batch's
    tokens, which a draft on the last stage reads; `rows` is parallel to the batch's rows."""

    token_ids: Tensor
    rows: tuple[SpecRow, ...]

    @cached_property
    def depths(self) -> tuple[tuple[int, ...], ...]:
        """Per row the depth of each node."""
        return tuple(node_depths(row.parents) for row in self.rows)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node's parent is the one before it, so that plain causal order is the
        tree's order."""
        return all(
            parent == node - 1 for row in self.rows for node, parent in enumerate(row.parents)
        )


@dataclass
class CarriedKeys:
    """`spec_info` of a draft's batch whose steps share one choice of keys (DSA). A step that finds
    none chooses and leaves its choice here; a model whose steps do not share overwrites it every
    time.

    It lives and dies with its batch: a round that ends, also by an error, leaves nothing behind,
    and a batch that changes membership has none.

    selected  [T, n] int32 key positions of the batch's tokens, -1 where there are fewer
    """

    selected: Tensor | None = None

    @classmethod
    def chosen_by(cls, keys: Tensor | None) -> "CarriedKeys":
        """What a round begins with that continues tokens that chose `keys` [R, n]. One token
        without any key and the whole round chooses anew: a step either chooses for all its tokens
        or for none. Positions count a row's own keys, wherever its pages are, so they need no
        translation."""
        return cls(keys if keys is not None and (keys >= 0).any(1).all() else None)


@dataclass(frozen=True)
class Verified:
    """What came of one drawing row: the nodes that were accepted, root first, and the tree to
    verify next.

    The row drew one token per accepted node. A row that was not under verification accepted its
    last token only, a row of a PREBUILT batch nothing.
    """

    accepted: tuple[int, ...] = (0,)
    draft: TokenTree = NO_TREE


def ancestors(parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    """The path to a node, the root first, the node last."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return tuple(reversed(path))

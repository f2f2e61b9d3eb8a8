"""What stage 0 keeps of a request's speculation between its steps, and how it shapes the next
one."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.draft_trees import NO_TREE, AcceptedNodes, SpecRow, TokenTree
from engine.memory.layout import NULL_INDEX

# Running requests -> how many nodes their next trees may have; None: drafts do not even follow what
# is drawn.
DraftLength = Callable[[int], int | None]
MAX_DRAFT_TOKENS = 1 << 16  # as many as the pool is built for


@dataclass(frozen=True)
class VerifiedStep:
    """One verification that came back. `accepted`: drafted tokens accepted, per row that drew and
    was to have drafts; `num_declined` rows were not. `seconds`: since the result before it, or
    since its launch after a pause."""

    num_drafted: int
    accepted: tuple[int, ...]
    seconds: float
    num_declined: int = 0

    @property
    def num_tokens(self) -> int:
        """Drawn in all: the accepted ones and one more per row."""
        return sum(self.accepted) + len(self.accepted) + self.num_declined


VerifiedListener = Callable[[VerifiedStep, int], None]  # the step, running requests


@dataclass
class DraftState:
    """Of one request.

    tree      proposed by the last stage, to be verified with the request's newest token
    accepted  what the last verification accepted; the stages commit it before the request's next step
    start     the draft's cache counts from this position on
    followed  whether the draft has followed all steps since `start`
    landed    its state came with the prompt, and no tree was grown from it yet
    """

    tree: TokenTree = NO_TREE
    accepted: AcceptedNodes | None = None
    start: int = 0
    followed: bool = False
    landed: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the draft's cache has every token that the request's has."""
        return self.followed and self.start == 0

    def begin(self, num_draft_tokens: int | None) -> SpecRow:
        """To grow the first tree from what has landed."""
        self.landed = False
        return SpecRow(num_draft_tokens=num_draft_tokens)

    def verify(
        self,
        context_len: int,
        *,
        max_nodes: int,
        max_depth: int,
        num_draft_tokens: int | None,
        scratch: int,
    ) -> tuple[TokenTree, SpecRow]:
        """The tree to verify, cut to what there is room and use for, and the row's share of the
        batch."""
        tree = self.tree.within(max(0, max_depth)).first(max(0, max_nodes))
        self.tree = NO_TREE
        return tree, self._row(context_len, tree.rooted_parents, None, num_draft_tokens, scratch)

    def replay(
        self,
        context_len: int,
        num_tokens: int,
        next_token_id: int,
        *,
        num_draft_tokens: int | None,
        scratch: int,
    ) -> SpecRow:
        """Tokens that are known to stand, as a chain, with the token after them."""
        return self._row(
            context_len, tuple(range(-1, num_tokens - 1)), next_token_id, num_draft_tokens, scratch
        )

    def prefill(
        self, context_len: int, next_token_id: int | None, num_draft_tokens: int | None
    ) -> SpecRow:
        """Prompt tokens; `next_token_id` is None where the batch draws it."""
        return self._row(context_len, (), next_token_id, num_draft_tokens)

    def _row(
        self,
        context_len: int,
        parents: tuple[int, ...],
        next_token_id: int | None,
        num_draft_tokens: int | None,
        scratch: int = NULL_INDEX,
    ) -> SpecRow:
        """A draft that was left out of a step has lost its thread: its cache begins anew where it
        comes back."""
        follows = num_draft_tokens is not None
        if follows and not self.followed:
            self.start = context_len
        self.followed, self.landed = follows, False
        accepted, self.accepted = self.accepted, None
        return SpecRow(parents, accepted, next_token_id, self.start, num_draft_tokens, scratch)

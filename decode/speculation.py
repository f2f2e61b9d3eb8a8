"""What stage 0 remembers of a request's speculation between its steps, and how it shapes the next one."""

from dataclasses import dataclass, field

from engine.trees import Kept, SpecRow, TokenTree


@dataclass
class DraftState:
    """Of one request.

    tree   proposed by the last stage, to be verified with the request's newest token
    kept   what the last verification accepted; the stages commit it before the request's next step
    start  tokens before this position never passed through this pool, so the draft has not seen them
    """

    tree: TokenTree = field(default_factory=TokenTree)
    kept: Kept | None = None
    start: int = 0

    def verify(self, *, max_nodes: int, max_depth: int, num_draft_tokens: int) -> tuple[TokenTree, SpecRow]:
        """The tree to verify, cut to what there is room and use for, and the row's share of the batch."""
        tree = self.tree.within(max(0, max_depth)).first(max(0, max_nodes))
        self.tree = TokenTree()
        return tree, SpecRow(tree.rooted_parents, self._take_kept(), None, self.start, num_draft_tokens)

    def replay(self, num_tokens: int, next_token_id: int) -> SpecRow:
        """Tokens that are known to stand, as a chain, with the token after them."""
        return SpecRow(tuple(range(-1, num_tokens - 1)), self._take_kept(), next_token_id, self.start)

    def prefill(self, next_token_id: int | None, num_draft_tokens: int) -> SpecRow:
        """Prompt tokens; `next_token_id` is None where the batch draws it."""
        return SpecRow((), None, next_token_id, self.start, num_draft_tokens)

    def _take_kept(self) -> Kept | None:
        kept, self.kept = self.kept, None
        return kept

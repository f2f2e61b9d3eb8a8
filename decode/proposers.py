"""The choice of a request's next drafts, between a draft model's tree and its own text.

A step of R requests with d drafted tokens takes a + b d seconds (`decode.draft_costs`). So a request
with n drafted tokens, of which E are expected to be accepted, gets (1 + E) / (1 + p n) times the
tokens per second of plain steps, with p = b R / a. The proposer with the higher value drafts. E is
measured for each request: for its own text by the length of the match, for the model by depth. Both
learn from every step, because drafts that were not verified are compared with the output as well.

While the text repeats for certain, the model only follows and grows no tree. Belongs to the engine
thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from decode.draft_costs import DraftCosts
from decode.draft_yields import POOL_MEMORY, DraftYield, GrownTree
from decode.entry import DecodeEntry, DecodeLimits
from decode.suffix_draft import LikelyChain
from engine.core.draft_trees import NO_TREE

# Probability of a whole chain from which the model grows no tree for the step after it.
SURE = 0.7


@dataclass(frozen=True)
class Proposers:
    """The proposers of a pool.

    `draft_tokens(entry)` is the largest number of nodes of the model's next tree; None if the draft
    model does not follow. Without a draft model, it is that of the text's chain.
    """

    limits: DecodeLimits
    costs: DraftCosts
    draft_tokens: Callable[[DecodeEntry], int | None]
    _typical: DraftYield = field(default_factory=lambda: DraftYield(POOL_MEMORY))

    def propose(self, entry: DecodeEntry) -> int | None:
        """Set the drafts of the entry's next step; return `draft_tokens` for the tree after it."""
        num_drafted = self.draft_tokens(entry)
        if "suffix" not in self.limits.proposers:
            return num_drafted
        draft = entry.draft
        is_forced = draft.proposer == "grammar" and bool(draft.tree)
        if "model" in self.limits.proposers:
            return self._choose(entry, num_drafted, is_forced=is_forced)
        if not is_forced:
            draft.proposer = "suffix"
            if num_drafted:
                draft.tree = self._chain(entry, num_drafted).tree
        return num_drafted

    def _choose(
        self, entry: DecodeEntry, num_drafted: int | None, *, is_forced: bool
    ) -> int | None:
        """Replace the model's tree if the chain of the request's text is worth more.

        Tokens that a grammar forces are never replaced.
        """
        draft = entry.draft
        if not entry.may_draft:
            return num_drafted
        if entry.grown is None:
            entry.grown = GrownTree(self._typical.of_request())
        grown = entry.grown
        grown.follow(NO_TREE if is_forced else draft.tree, entry.outputs, self._typical)
        if is_forced:
            return num_drafted
        chain = self._chain(entry, self.limits.num_draft_tokens)
        by_model = self._worth(grown.expected, len(draft.tree))
        if not chain.tree or self._worth(chain.expected, len(chain.tree)) <= by_model:
            return num_drafted
        draft.tree, draft.proposer = chain.tree, "suffix"
        return 0 if num_drafted and chain.whole >= SURE else num_drafted

    def _chain(self, entry: DecodeEntry, max_nodes: int) -> LikelyChain:
        return entry.suffixes.propose(
            entry.request.prompt_token_ids,
            entry.outputs,
            max_nodes,
            self.costs.least_probability(),
        )

    def _worth(self, expected: float, num_nodes: int) -> float:
        """Return the tokens per second with such drafts, relative to plain steps."""
        return (1 + expected) / (1 + self.costs.least_probability() * num_nodes)

"""The choice of a request's next drafts, between a draft model's tree and its own text.

A step of R requests with d drafted tokens takes a + b d seconds (`decode.draft_costs`). So a request
with n drafted tokens, of which E are expected to be accepted, gets (1 + E) / (1 + p n) times the
tokens per second of plain steps, with p = b R / a. The proposer with the higher value drafts. E is
measured for each request: for its own text by the length of the match, for the model by depth. Both
learn from every step, because drafts that were not verified are compared with the output as well.

While the text repeats for certain, the model only follows and grows no tree. If the pool adapts to
what pays, it also grows none for a request whose trees clearly cost more than they yield, but for
some probes. If these fail, it no longer follows the request. Belongs to the engine thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from decode.draft_costs import DraftCosts
from decode.draft_yields import POOL_MEMORY, DraftYield, GrownTree
from decode.entry import DecodeEntry, DecodeLimits
from decode.suffix_draft import NO_CHAIN, LikelyChain
from engine.core.draft_trees import NO_TREE

# Probability of a whole chain from which the model grows no tree for the step after it.
SURE = 0.7
# A tree clearly does not pay if its cost, p n tokens, is that many times what is accepted of it.
CLEAR_LOSS = 2.0
PROBE_STEPS = 16  # of a model whose trees do not pay, one in that many steps grows one
MAX_PROBES = 3  # after that many the model no longer follows the request


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
        if not entry.may_draft:
            return num_drafted  # 0 or None
        draft = entry.draft
        draft.proposer = "grammar" if draft.is_forced else "model"
        if "model" not in self.limits.proposers:
            if not draft.is_forced:  # forced tokens are never replaced
                least = self.costs.least_probability()
                _draft(entry, _chain(entry, num_drafted, least) if num_drafted else NO_CHAIN)
            return num_drafted
        if not self.limits.adapts and "suffix" not in self.limits.proposers:
            return num_drafted  # there is no choice
        if entry.grown is None:
            entry.grown = GrownTree(self._typical.of_request())
        grown = entry.grown
        grown.follow(NO_TREE if draft.is_forced else draft.tree, entry.outputs, self._typical)
        least = self.costs.least_probability()
        growth = self._growth(grown, num_drafted, least) if num_drafted else num_drafted
        if "suffix" in self.limits.proposers and not draft.is_forced:
            chain = _chain(entry, self.limits.num_draft_tokens, least)
            if chain.tree and (
                _worth(chain.expected, len(chain.tree), least)
                > _worth(grown.expected, len(draft.tree), least)
            ):
                _draft(entry, chain)
                if growth and chain.whole >= SURE:
                    return 0
        return growth

    def _growth(self, grown: GrownTree, num_nodes: int, least_probability: float) -> int | None:
        """Return the nodes of the model's next tree; None if it need not follow any longer."""
        if not self.limits.adapts:
            return num_nodes
        cost = least_probability * num_nodes
        if cost < CLEAR_LOSS * grown.yields.expected_of_most:
            grown.num_rests = 0
            return num_nodes
        grown.num_rests += 1
        if grown.num_rests > MAX_PROBES * PROBE_STEPS:
            return None
        return num_nodes if grown.num_rests % PROBE_STEPS == 0 else 0


def _chain(entry: DecodeEntry, max_nodes: int, least_probability: float) -> LikelyChain:
    return entry.suffixes.propose(
        entry.request.prompt_token_ids, entry.outputs, max_nodes, least_probability
    )


def _draft(entry: DecodeEntry, chain: LikelyChain) -> None:
    entry.draft.tree, entry.draft.proposer = chain.tree, "suffix"


def _worth(expected: float, num_nodes: int, least_probability: float) -> float:
    """Return the tokens per second with such drafts, relative to plain steps."""
    return (1 + expected) / (1 + least_probability * num_nodes)

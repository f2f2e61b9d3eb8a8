"""Speculation state of a request on stage 0 between its steps, and the row of the next step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from engine.core.batch import ForwardBatch
from engine.core.draft_trees import NO_TREE, AcceptedNodes, SpecRow, TokenTree
from engine.memory.layout import NULL_INDEX
from engine.pipeline.results import StepResult
from engine.speculative.contracts.config import Proposer

# Maps the number of running requests to the largest number of nodes of their next trees. None: the
# draft model does not follow the sampled tokens.
DraftLength = Callable[[int], int | None]
MAX_DRAFT_TOKENS = 1 << 16  # no limit: every tree that the pool is built for


@dataclass(frozen=True)
class VerifiedRow:
    """The numbers of a row's draft tokens that were verified, and that were accepted."""

    num_drafted: int
    num_accepted: int
    proposer: Proposer = "model"


@dataclass(frozen=True)
class VerifiedStep:
    """One verified step.

    rows          sampling rows that were to have drafts
    num_declined  sampling rows without drafts
    seconds       since the previous result, or since the launch after a pause
    """

    rows: tuple[VerifiedRow, ...]
    seconds: float
    num_declined: int = 0

    @classmethod
    def of(
        cls,
        batch: ForwardBatch,
        result: StepResult,
        proposer_of: Callable[[int], Proposer | None],
        seconds: float,
    ) -> Self:
        """Return the step of a batch.

        `proposer_of` is called with the keys of its sampling rows; None is a row without drafts.
        """
        sampled = [
            (key, length)
            for key, length, sampling in zip(
                batch.request_keys, batch.query_lens, batch.sampling, strict=True
            )
            if sampling is not None
        ]
        rows = tuple(
            VerifiedRow(length - 1, len(row.accepted) - 1, proposer)
            for (key, length), row in zip(sampled, result.verified, strict=True)
            if (proposer := proposer_of(key)) is not None
        )
        return cls(rows, seconds, len(sampled) - len(rows))

    @property
    def num_drafted(self) -> int:
        """Return the number of draft tokens that were verified."""
        return sum(row.num_drafted for row in self.rows)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Return the number of accepted draft tokens of each row."""
        return tuple(row.num_accepted for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Return the number of sampled tokens: the accepted ones and one more per row."""
        return sum(self.accepted) + len(self.rows) + self.num_declined


# called with the step and the number of running requests
VerifiedListener = Callable[[VerifiedStep, int], None]


@dataclass
class DraftState:
    """The speculation state of one request.

    tree              to be verified with the request's newest token: the last stage's, until
                      another proposer's replaces it
    is_forced         whether the request's grammar allows no other tokens than the tree's
    proposer          of the last step's tree
    accepted          nodes that the last verification accepted; the stages commit them before the
                      request's next step
    start             position at which the draft model's cache starts
    followed          whether the draft model has followed all steps since `start`
    has_prompt_state  whether its state arrived with the prompt and no tree was grown from it yet
    """

    tree: TokenTree = NO_TREE
    is_forced: bool = False
    proposer: Proposer = "model"
    accepted: AcceptedNodes | None = None
    start: int = 0
    followed: bool = False
    has_prompt_state: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether the draft model's cache has every token that the request's has."""
        return self.followed and self.start == 0

    def begin(self, num_draft_tokens: int | None) -> SpecRow:
        """Return the row that grows the first tree from the prompt's draft state."""
        self.has_prompt_state = False
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
        """Return the tree to verify, cut to `max_nodes` and `max_depth`, and the row's speculation
        part.
        """
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
        """Return the row for known tokens as a chain, followed by the known `next_token_id`."""
        return self._row(
            context_len, tuple(range(-1, num_tokens - 1)), next_token_id, num_draft_tokens, scratch
        )

    def prefill(
        self, context_len: int, next_token_id: int | None, num_draft_tokens: int | None
    ) -> SpecRow:
        """Return the row for prompt tokens; `next_token_id` is None if the batch samples it."""
        return self._row(context_len, (), next_token_id, num_draft_tokens)

    def _row(
        self,
        context_len: int,
        parents: tuple[int, ...],
        next_token_id: int | None,
        num_draft_tokens: int | None,
        scratch: int = NULL_INDEX,
    ) -> SpecRow:
        """Return a row, and restart the draft's cache if the draft model has missed a step."""
        follows = num_draft_tokens is not None
        if follows and not self.followed:
            self.start = context_len
        self.followed = follows
        self.has_prompt_state = False
        accepted = self.accepted
        self.accepted = None
        return SpecRow(parents, accepted, next_token_id, self.start, num_draft_tokens, scratch)

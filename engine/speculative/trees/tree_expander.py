"""The steps in which a draft extends its trees, computed on its device only."""

import torch
from torch import Tensor

from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch
from engine.speculative.attention.draft_attention import RoundPlanner
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.trees.proposal import Chains, Proposal


class TreeExpander:
    """A draft over the attention of a round. `topk` is 1 for chains."""

    def __init__(
        self, *, model: DraftModel, rounds: RoundPlanner, context: ForwardContext, topk: int
    ) -> None:
        self._model = model
        self._rounds = rounds
        self._context = context
        self._topk = min(topk, model.vocab_size)

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens: log probabilities and target ids, [n, topk] each.

        `hidden` is [n, hidden].
        """
        log_p, ids = self._model.logits(hidden).log_softmax(-1).topk(self._topk)
        return log_p, self._model.target_ids(ids)

    def chains(
        self, batch: ForwardBatch, first: Tensor, hidden: Tensor, positions: Tensor
    ) -> Chains:
        """Return chains of the first tokens [R] and the most likely tokens after them.

        The result equals `expand` with `topk` 1, without scores, which a chain does not need.
        `batch` and `hidden` are as in `expand`; `positions` is [steps - 1, R], those of the slots.
        """
        tokens = [first]
        for batch.positions in positions:
            batch.token_ids = tokens[-1]
            hidden = self._model.forward(batch, hidden, self._context)
            tokens.append(self.most_likely(hidden))
        return Chains(torch.stack(tokens, 1))

    def most_likely(self, hidden: Tensor) -> Tensor:
        """Return the target ids [n] of the most likely tokens. `hidden` is [n, hidden]."""
        return self._model.target_ids(self._model.logits(hidden).argmax(-1))

    def expand(self, proposal: Proposal, batch: ForwardBatch, hidden: Tensor, steps: int) -> None:
        """Add `steps` - 1 levels below the first.

        `batch` is planned, with the positions of the next slots. `hidden` is [R, hidden], at each
        row's last slot.
        """
        rows = batch.num_rows
        width = proposal.frontier_tokens.shape[1]
        hidden = hidden[:, None].expand(-1, width, -1).flatten(0, 1)
        for step in range(1, steps):
            batch.token_ids = proposal.frontier_tokens.flatten()
            hidden = self._model.forward(batch, hidden, self._context)
            log_p, tokens = self.best(hidden)
            parents = proposal.expand(log_p.view(rows, width, -1), tokens.view(rows, width, -1))
            if step + 1 < steps:
                batch.positions = batch.positions + 1
            if step + 1 < steps and width > 1:
                self._rounds.reorder(batch, parents)
                hidden = hidden[
                    (torch.arange(rows, device=parents.device)[:, None] * width + parents).flatten()
                ]

"""Drafting with a small model that reads the target's cache and has no own cache (frozen KV).

A chain begins at the newest token, which is sampled and not cached yet, from its embedding and the
target's hidden state before it. All steps are at its position and see the same cached keys. So one
plan serves them all and nothing is written. No draft state has to follow the target, be handed over
or be rolled back.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry, CachedAttention
from engine.contracts.model import ForwardContext, StageOutput
from engine.contracts.recurrent import NoStates
from engine.core.batch import ForwardBatch, ForwardMode, plan_where_needed
from engine.core.draft_trees import NO_TREE, TokenTree
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.trees.draft_batches import FollowedRow, followed_rows
from engine.speculative.trees.proposal import Candidates
from runtime.errors import InternalError


class FrozenModel(Protocol):
    """A draft on the target's last stage. `models/drafts/` implements it."""

    @property
    def capture_layers(self) -> frozenset[int]:
        """Return the global ids of the target's layers whose outputs the draft reads."""
        ...

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        """Return the geometry of the draft's queries over the target's keys."""
        ...

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """Return the inputs of the first step, [n, target hidden].

        `aux_hidden` is [T, target hidden] by layer id, `tokens` [n] int64 indices into T.
        """
        ...

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Run one step with one token per row, and return [R, own hidden].

        `hidden` is [R, target hidden].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token, [R, vocab] fp32. `hidden` is [R, own hidden]."""
        ...

    def onward(self, hidden: Tensor) -> Tensor:
        """Return the next step's input in place of the target's features, [R, target hidden]."""
        ...


class FrozenDrafter:
    """A `PoolDrafter` of chains of up to `steps` tokens. `attention` reads the target's pools."""

    def __init__(self, *, model: FrozenModel, attention: CachedAttention, steps: int) -> None:
        self._model = model
        self._attention = attention
        self._context = ForwardContext(None, NoStates(), cached_attention=attention)
        self._steps = steps
        self.num_plans = {"draft_extend": 0, "draft_round": 0}  # by path

    def follow(self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]) -> None:
        """Implement `PoolDrafter.follow` by doing nothing: only the target has a cache."""

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        """Implement `Drafter.begin`, which this drafter never supports."""
        raise InternalError("no draft state is handed over to this pool")

    @torch.inference_mode()
    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        """Implement `Drafter.propose`."""
        followed = [row for row in followed_rows(batch, runs) if row.num_nodes]
        if not followed:
            return [NO_TREE] * len(runs)
        num_nodes = [row.num_nodes for row in followed]
        hidden = self._model.features(
            output.aux_hidden, torch.tensor([row.features[-1] for row in followed])
        )
        grown = self._chains(
            _newest(batch, followed), hidden, min(self._steps, max(num_nodes))
        ).trees(num_nodes)
        trees = {row.row: tree for row, tree in zip(followed, grown, strict=True)}
        return [trees.get(run.row, NO_TREE) for run in runs]

    def _chains(self, batch: ForwardBatch, hidden: Tensor, steps: int) -> Candidates:
        """Return chains of `steps` tokens.

        `hidden` is [R, target hidden], before the newest tokens.
        """
        self.num_plans["draft_round"] += plan_where_needed(batch, self._attention)
        log_p = []
        tokens = []
        for _ in range(steps):
            own = self._model.forward(batch, hidden, self._context)
            best, batch.token_ids = self._model.logits(own).log_softmax(-1).max(-1)
            log_p.append(best)
            tokens.append(batch.token_ids)
            hidden = self._model.onward(own)
        parents = torch.arange(-1, steps - 1).expand(len(hidden), -1)
        return Candidates(
            torch.stack(log_p, 1).clamp(max=0.0).cumsum(1), torch.stack(tokens, 1), parents
        )


def _newest(batch: ForwardBatch, followed: Sequence[FollowedRow]) -> ForwardBatch:
    """Return a batch of each row's newest token, at its position.

    It sees the same keys as the token before it, which is the last cached one.
    """
    rows = torch.tensor([row.row for row in followed])
    cached = [row.position + len(row.features) for row in followed]
    return ForwardBatch(
        mode=ForwardMode.DRAFT,
        request_keys=tuple(batch.request_keys[row.row] for row in followed),
        query_lens=(1,) * len(followed),
        context_lens=tuple(count - 1 for count in cached),
        token_ids=torch.tensor([row.next_tokens[-1] for row in followed]),
        positions=torch.tensor(cached),
        page_tables=batch.page_tables[rows],
        slot_ids=batch.slot_ids[rows],
        sampling=(None,) * len(followed),
    )

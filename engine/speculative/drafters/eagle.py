"""Drafting with a small model that reads the target's hidden states (EAGLE, MTP heads and others).

After every target pass the draft follows with the true features of the accepted tokens. This
*draft-extend* is one forward over the draft's own paged cache, and also gives the first level of
the next tree. Each further level is one forward over the frontier. The draft's pages have the same
ids as the target's, so a lease of a request covers both.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, plan_where_needed
from engine.core.draft_trees import NO_TREE, CarriedKeys, SpecInfo, TokenTree
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.contracts.drafter import PoolDrafter
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.replay.draft_graphs import DraftGraphs
from engine.speculative.replay.recorded_drafts import RecordedDrafts
from engine.speculative.replay.round_graphs import RoundGraphs
from engine.speculative.trees.draft_batches import (
    FollowedRow,
    extend_batch,
    followed_rows,
    round_batch,
    row_ends,
)
from engine.speculative.trees.draft_handoff import DraftEnd, HandedEnds
from engine.speculative.trees.proposal import Proposal
from engine.speculative.trees.tree_expander import TreeExpander
from runtime.errors import InternalError


class PromptDrafter:
    """A `Drafter` that proposes nothing: on a prefill pool, a draft only reads the prompt.

    `on_followed(batch)` is called for each batch after its tokens are in the draft's cache.
    """

    def __init__(self, drafter: PoolDrafter, on_followed: Callable[[ForwardBatch], None]) -> None:
        self._drafter = drafter
        self._on_followed = on_followed

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        """Implement `Drafter.propose`."""
        self._drafter.follow(batch, output, runs)
        self._on_followed(batch)
        return [NO_TREE] * len(runs)

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        """Implement `Drafter.begin`. A prefill pool gets no such batches."""
        return [NO_TREE] * batch.num_rows


class SendingDrafter(PromptDrafter):
    """A `Drafter` of a pool that sends prompts to other pools and decodes as well.

    Prompts are only read, as on a prefill pool, so that their state can be sent. The first tree
    grows from that state, here as in the pool that it is sent to.
    """

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        """Implement `Drafter.propose`."""
        if batch.mode is ForwardMode.PREFILL:
            return super().propose(batch, output, runs)
        return self._drafter.propose(batch, output, runs)

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        """Implement `Drafter.begin`."""
        return self._drafter.begin(batch)


class EagleDrafter:
    """A `Drafter` that grows trees, or chains if `topk` is 1.

    `handed` holds the states that are transferred with prompts, if the pool transfers draft state.
    `graphs` and `rounds` run the batches that they have a bucket for. `recorded` runs whole steps
    if it can.
    """

    def __init__(
        self,
        *,
        model: DraftModel,
        attention: DraftAttention,
        topk: int,
        steps: int,
        handed: HandedEnds | None = None,
        graphs: DraftGraphs | None = None,
        rounds: RoundGraphs | None = None,
        recorded: RecordedDrafts | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._expander = TreeExpander(
            model=model, rounds=attention.round, context=attention.in_round, topk=topk
        )
        self._steps = steps
        self._handed = handed
        self._graphs = graphs
        self._rounds = rounds
        self._recorded = recorded
        self.num_plans = {"draft_extend": 0, "draft_round": 0}  # by path

    @torch.inference_mode()
    def follow(self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]) -> None:
        """Implement `PoolDrafter.follow`."""
        if followed := followed_rows(batch, runs):
            extend = extend_batch(batch, followed, self._attention.page_size)
            hidden = self._extend(extend, followed, output)
            ended = [index for index, row in enumerate(followed) if row.num_nodes]
            if self._handed is not None and ended:
                self._handed.put(
                    extend.slot_ids[ended].long(),
                    self._end(extend, hidden, row_ends(extend)[ended]),
                )

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        """Implement `Drafter.begin`. A prompt of n tokens has n slots, all handed over."""
        info = batch.spec_info
        if self._handed is None or not isinstance(info, SpecInfo):
            raise InternalError("no draft state is handed over to this pool")
        ends = self._handed.get(batch.slot_ids.long())
        num_nodes = [row.num_draft_tokens or 0 for row in info.rows]
        if self._recorded is not None:
            candidates = self._recorded.begin(batch, batch.context_lens, ends)
            if candidates is not None:
                self.num_plans["draft_round"] += 1
                return candidates.trees(num_nodes)
        return self._grow(
            batch, batch.context_lens, torch.tensor(batch.context_lens), ends, num_nodes
        )

    @torch.inference_mode()
    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        """Implement `Drafter.propose`."""
        followed = followed_rows(batch, runs)
        if not followed:
            return [NO_TREE] * len(runs)
        if self._recorded is not None:
            candidates = self._recorded.propose(batch, followed, output.aux_hidden)
            if candidates is not None:
                self.num_plans["draft_extend"] += 1
                self.num_plans["draft_round"] += any(row.num_nodes for row in followed)
                return _in_order_of(
                    runs, followed, candidates.trees([row.num_nodes for row in followed])
                )
        extend = extend_batch(batch, followed, self._attention.page_size)
        hidden = self._extend(extend, followed, output)
        growing = [index for index, row in enumerate(followed) if row.num_nodes]
        trees = list[TokenTree]()
        if growing:
            last = row_ends(extend)[growing]
            continued = extend if len(growing) == extend.num_rows else extend.filter(growing)
            slots = [
                a + b for a, b in zip(continued.context_lens, continued.query_lens, strict=True)
            ]
            trees = self._grow(
                continued,
                slots,
                extend.positions[last] + 1,
                self._end(extend, hidden, last),
                [followed[index].num_nodes for index in growing],
            )
        return _in_order_of(runs, [followed[index] for index in growing], trees)

    def _extend(
        self, extend: ForwardBatch, followed: list[FollowedRow], output: StageOutput
    ) -> Tensor:
        """Return the hidden states of all slots, [slots, hidden]."""
        device = next(iter(output.aux_hidden.values())).device
        tokens = torch.tensor([token for row in followed for token in row.features]).to(device)
        features = self._model.features(output.aux_hidden, tokens)
        bucket = None if self._graphs is None else self._graphs.bucket_for(extend)
        if self._graphs is not None and bucket is not None:
            self.num_plans["draft_extend"] += 1
            return self._graphs.run(extend, bucket, features)
        self.num_plans["draft_extend"] += plan_where_needed(extend, self._attention.pages)
        return self._model.forward(extend, features, self._attention.on_pages)

    def _end(self, extend: ForwardBatch, hidden: Tensor, last: Tensor) -> DraftEnd:
        """Return the draft's state after the rows' last slots.

        `hidden` is [slots, hidden] of the batch that was followed; `last` is [R] int64.
        """
        info = extend.spec_info
        chosen = info.selected if isinstance(info, CarriedKeys) else None
        return DraftEnd(
            *self._expander.best(hidden[last]),
            hidden[last],
            None if chosen is None else chosen[last],
        )

    def _grow(
        self,
        rows: ForwardBatch,
        slots: Sequence[int],
        positions: Tensor,
        ends: DraftEnd,
        num_nodes: list[int],
    ) -> list[TokenTree]:
        """Return trees after the `slots` of each row; `positions` [R] are of the next slots."""
        # A tree of n nodes is at most n deep.
        steps = min(self._steps, max(num_nodes))
        proposal = Proposal(ends.log_p, ends.tokens)
        if steps > 1:
            batch = round_batch(rows, slots, positions, ends.log_p.shape[1], ends.keys)
            bucket = None if self._rounds is None else self._rounds.bucket_for(batch, steps)
            if self._rounds is not None and bucket is not None:
                self.num_plans["draft_round"] += 1
                return self._rounds.run(batch, bucket, ends).trees(num_nodes)
            self.num_plans["draft_round"] += plan_where_needed(batch, self._attention.round)
            self._expander.expand(proposal, batch, ends.hidden, steps)
        return proposal.candidates().trees(num_nodes)


def _in_order_of(
    runs: Sequence[AcceptedRun], rows: Sequence[FollowedRow], trees: Sequence[TokenTree]
) -> list[TokenTree]:
    """Return the tree of each run's row, or an empty tree."""
    found = {row.row: tree for row, tree in zip(rows, trees, strict=True)}
    return [found.get(run.row, NO_TREE) for run in runs]

"""What a draft does behind a step on the host, from the target's features to the next candidates, as recordings: one
for each number of rows and of tokens in a row, made when the first such step runs.

Rows accept different numbers of nodes. So a row that stands shorter than it was verified repeats its last token: those
slots lie behind what stands, as the target's own keys of nodes that fell do, and no slot that stands sees them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch
from engine.graphs.recorded import Arena, CannotRecordError, OtherShapeError, Recording, record, refill, with_room
from engine.speculative.draft_attention import DraftAttention
from engine.speculative.draft_batches import FollowedRow, extend_batch, round_batch
from engine.speculative.draft_model import DraftModel
from engine.speculative.multistep_paged import PagedRoundPlan, PagedRounds
from engine.speculative.proposal import Candidates, Chains, Proposal
from engine.speculative.tree_expander import TreeExpander

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftStep:
    """What a recording reads. tokens: [n] int64, whose features the slots read; last: [R] int64, the slot of each
    row's last token that stands."""

    extend: ForwardBatch
    round: ForwardBatch
    tokens: Tensor
    last: Tensor
    aux_hidden: Mapping[int, Tensor]


@dataclass(frozen=True)
class RecordedDraft:
    step: DraftStep
    result: Candidates | Chains
    recording: Recording


class RecordedDrafts:
    """The recorded steps of one draft. What `propose` returns is valid until the next."""

    def __init__(self, *, model: DraftModel, attention: DraftAttention, rounds: PagedRounds, topk: int, steps: int,
                 max_nodes: int) -> None:
        """Steps whose rows have up to `max_nodes` tokens are recorded; candidates of `steps` levels, `topk` wide."""
        self._model, self._attention, self._rounds = model, attention, rounds
        self._expander = TreeExpander(model=model, rounds=rounds, topk=topk,
                                      context=ForwardContext(rounds, attention.on_pages.recurrent))
        self._topk, self._steps, self._max_nodes = min(topk, model.vocab_size), steps, max_nodes
        self._recorded: dict[tuple[int, int], RecordedDraft] = {}
        self._arena = Arena()
        self._is_off = False
        self.num_recorded, self.num_replays = 0, 0

    def propose(self, batch: ForwardBatch, followed: Sequence[FollowedRow],
                aux_hidden: Mapping[int, Tensor]) -> Candidates | Chains | None:
        """Candidates behind the rows of a batch, in their order; None where some are not followed, their lengths
        differ, or they are too many: nothing is done then. aux_hidden: [T, H] of the batch's tokens, by layer."""
        length, num_rows = batch.query_lens[0], len(followed)
        if (self._is_off or num_rows < batch.num_rows or length > self._max_nodes or len(set(batch.query_lens)) > 1
                or not self._rounds.has_room(num_rows * self._topk, self._steps - 1)):
            return None
        step = self._planned(batch, [_repeated(row, length) for row in followed],
                             [len(row.features) for row in followed], aux_hidden)
        recorded = self._recorded.get((num_rows, length))
        if recorded is not None and recorded.step.extend.page_tables.shape[1] >= batch.page_tables.shape[1]:
            try:
                _refill_step(recorded.step, step)
            except OtherShapeError as error:
                logger.warning("a draft's step runs eagerly: %s", error)
                return self._grown(step)
            recorded.recording.replay()
            self.num_replays += 1
            return recorded.result
        try:
            recorded = self._recorded[num_rows, length] = self._record(step)
        except CannotRecordError as error:
            logger.info("a draft's steps are not recorded: %s", error)
            self._is_off = True
            return None
        self.num_recorded += 1
        return recorded.result

    def _planned(self, batch: ForwardBatch, rows: Sequence[FollowedRow], num_standing: Sequence[int],
                 aux_hidden: Mapping[int, Tensor]) -> DraftStep:
        extend, length = extend_batch(batch, rows), batch.query_lens[0]
        standing = torch.tensor(num_standing)
        slots = [context + count for context, count in zip(extend.context_lens, num_standing, strict=True)]
        positions = torch.tensor([row.position for row in rows]) + standing
        grown = round_batch(extend, slots, positions, self._topk)
        self._attention.pages.plan(extend)
        self._rounds.plan(grown)
        return DraftStep(extend, grown, torch.tensor([token for row in rows for token in row.features]),
                         torch.arange(len(rows)) * length + standing - 1, aux_hidden)

    def _record(self, step: DraftStep) -> RecordedDraft:
        """Run the step on tensors of its own, with tables that have room."""
        extend, grown = (replace(batch, plan_mark=None, positions=batch.positions.clone(),
                                 page_tables=with_room(batch.page_tables)) for batch in (step.extend, step.round))
        own = replace(step, extend=extend, round=grown,
                      aux_hidden={layer_id: hidden.clone() for layer_id, hidden in step.aux_hidden.items()})
        self._attention.pages.plan(extend)
        self._rounds.plan(grown)
        results = list[Candidates | Chains]()
        recording = record(lambda: results.append(self._grown(own)), self._arena)
        return RecordedDraft(own, results[0], recording)

    def _grown(self, step: DraftStep) -> Candidates | Chains:
        features = self._model.features(step.aux_hidden, step.tokens)
        hidden = self._model.forward(step.extend, features, self._attention.on_pages)[step.last]
        growing = replace(step.round)  # which moves on; a recording begins with the positions that it is given
        if self._topk == 1:
            return self._expander.chains(growing, hidden, self._steps)
        proposal = Proposal(*self._expander.best(hidden))
        self._expander.expand(proposal, growing, hidden, self._steps)
        return proposal.candidates()


def _repeated(row: FollowedRow, length: int) -> FollowedRow:
    """Of so many tokens, the further ones its last."""
    missing = length - len(row.features)
    return replace(row, features=[*row.features, *row.features[-1:] * missing],
                   next_tokens=[*row.next_tokens, *row.next_tokens[-1:] * missing])


def _refill_step(kept: DraftStep, new: DraftStep) -> None:
    """Raises OtherShapeError."""
    plan, planned = kept.round.forward_metadata_plan, new.round.forward_metadata_plan
    assert isinstance(plan, PagedRoundPlan)
    assert isinstance(planned, PagedRoundPlan)
    for old, value in ((kept.tokens, new.tokens), (kept.last, new.last), (dict(kept.aux_hidden), dict(new.aux_hidden)),
                       (kept.extend.token_ids, new.extend.token_ids),
                       (kept.extend.positions, new.extend.positions),
                       (kept.extend.forward_metadata_plan, new.extend.forward_metadata_plan),
                       (kept.round.positions, new.round.positions), (plan.reads, planned.reads)):
        refill(old, value)

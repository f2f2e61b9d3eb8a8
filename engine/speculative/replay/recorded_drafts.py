"""Recorded draft steps on the host, from the target's features to the next candidates.

There is one recording per number of rows, tokens per row, and whether the step has a round. A
recording is made when such a step comes again.

Rows accept different numbers of nodes. So a row with fewer accepted than verified tokens repeats
its last token. The repeated slots come after the accepted ones, like the target's keys of rejected
nodes, and no accepted slot sees them.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contracts.model import ForwardContext
from engine.core.batch import BatchPlanner, ForwardBatch
from engine.core.rows import longs
from engine.graphs.host_steps import EAGER_FIRST, OtherShapeError, refill, watch_lengths, with_room
from engine.graphs.recorded import Arena, CannotRecordError, Recording, record
from engine.speculative.attention.draft_attention import DraftAttention, RecordableRoundAttention
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.trees.draft_batches import FollowedRow, extend_batch, round_batch
from engine.speculative.trees.draft_handoff import DraftEnd
from engine.speculative.trees.proposal import Candidates, Chains, Proposal
from engine.speculative.trees.tree_expander import TreeExpander

logger = logging.getLogger(__name__)

_DraftShape = tuple[int, int, bool]  # rows, followed tokens per row, and whether a round grows


@dataclass(frozen=True)
class Followed:
    """The tokens that a draft follows before it grows.

    tokens      [n] int64, whose features the slots read
    last        [R] int64, the slot of each row's last accepted token
    aux_hidden  [T, H] of the target's tokens, by layer
    """

    extend: ForwardBatch
    tokens: Tensor
    last: Tensor
    aux_hidden: Mapping[int, Tensor]

    def inputs(self) -> list[object]:
        """Return the inputs that differ from step to step."""
        extend = self.extend
        return [
            self.tokens,
            self.last,
            dict(self.aux_hidden),
            extend.token_ids,
            extend.positions,
            extend.forward_metadata_plan,
        ]


@dataclass(frozen=True)
class DraftStep:
    """The inputs of a recording.

    `before` is the followed tokens, or the draft states that were handed over. `round` is the batch
    that grows, or None if the draft only follows. `positions` is [steps - 1, R] int64, of the slots
    of its steps.
    """

    before: Followed | DraftEnd
    round: ForwardBatch | None = None
    positions: Tensor | None = None

    @property
    def num_pages(self) -> int:
        """Return the number of pages per row for which the tables have room."""
        batch = self.round or (self.before.extend if isinstance(self.before, Followed) else None)
        return 0 if batch is None else batch.page_tables.shape[1]

    def inputs(self, rounds: RecordableRoundAttention) -> list[object]:
        """Return the inputs that differ from step to step."""
        before = self.before
        ends: list[object] = (
            [before.log_p, before.tokens, before.hidden]
            if isinstance(before, DraftEnd)
            else before.inputs()
        )
        if self.round is None:
            return ends
        return [self.positions, self.round.positions, rounds.reads_of(self.round), *ends]


@dataclass(frozen=True)
class RecordedDraft:
    step: DraftStep
    result: Candidates | Chains
    recording: Recording


class RecordedDrafts:
    """The recorded steps of one draft. Results are valid until the next step."""

    def __init__(
        self,
        *,
        model: DraftModel,
        attention: DraftAttention,
        rounds: RecordableRoundAttention,
        topk: int,
        steps: int,
        max_nodes: int,
        num_eager: int = EAGER_FIRST,
    ) -> None:
        """Create an object without recordings.

        Steps whose rows have up to `max_nodes` tokens are recorded, after the first `num_eager` of
        a shape. Candidates have `steps` levels of width `topk`.
        """
        self._model = model
        self._pages = attention.pages
        self._on_pages = attention.on_pages
        self._rounds = rounds
        self._page_size = attention.page_size
        self._expander = TreeExpander(
            model=model,
            rounds=rounds,
            topk=topk,
            context=ForwardContext(rounds, attention.on_pages.recurrent),
        )
        self._topk = min(topk, model.vocab_size)
        self._steps = steps
        self._max_nodes = max_nodes
        self._recorded: dict[_DraftShape, RecordedDraft] = {}
        self._eager_left: dict[_DraftShape, int] = defaultdict(lambda: num_eager)
        self._arena = Arena()
        self._is_off = False
        self.num_recorded = 0
        self.num_replays = 0

    def begin(
        self, rows: ForwardBatch, slots: Sequence[int], ends: DraftEnd
    ) -> Candidates | Chains | None:
        """Return candidates after the `slots` of each row; the positions equal the slots.

        Return None, with no effect, if there are too many rows or they share a choice of keys.
        """
        if not self._takes(rows.num_rows) or ends.keys is not None:
            return None
        return self._run(
            (rows.num_rows, 0, True), self._planned(ends, rows, slots, torch.tensor(slots))
        )

    def propose(
        self, batch: ForwardBatch, followed: Sequence[FollowedRow], aux_hidden: Mapping[int, Tensor]
    ) -> Candidates | Chains | None:
        """Return candidates after the rows of a batch, in row order; empty if no row is to grow.

        Return None, with no effect, if a row is not followed, the lengths differ, or there are too
        many rows. `aux_hidden` is [T, H] of the batch's tokens, by layer.
        """
        length = batch.query_lens[0]
        num_rows = len(followed)
        if (
            not self._takes(num_rows)
            or num_rows < batch.num_rows
            or length > self._max_nodes
            or len(set(batch.query_lens)) > 1
        ):
            return None
        rows = [_repeated(row, length) for row in followed]
        extend = extend_batch(batch, rows, self._page_size)
        self._pages.plan(extend)
        standing = [len(row.features) for row in followed]
        tokens = longs([token for row in rows for token in row.features])
        last = longs([row * length + count - 1 for row, count in enumerate(standing)])
        before = Followed(extend, tokens, last, aux_hidden)
        if not any(row.num_nodes for row in rows):
            return self._run((num_rows, length, False), DraftStep(before))
        slots = [
            context + count for context, count in zip(extend.context_lens, standing, strict=True)
        ]
        positions = longs([row.position + count for row, count in zip(rows, standing, strict=True)])
        return self._run((num_rows, length, True), self._planned(before, extend, slots, positions))

    def _takes(self, num_rows: int) -> bool:
        return not self._is_off and self._rounds.has_room(num_rows * self._topk, self._steps - 1)

    def _planned(
        self,
        before: Followed | DraftEnd,
        rows: ForwardBatch,
        slots: Sequence[int],
        positions: Tensor,
    ) -> DraftStep:
        grown = round_batch(rows, slots, positions, self._topk)
        self._rounds.plan(grown)
        return DraftStep(before, grown, positions + torch.arange(self._steps - 1)[:, None])

    def _run(self, shape: _DraftShape, step: DraftStep) -> Candidates | Chains | None:
        recorded = self._recorded.get(shape)
        if recorded is not None and recorded.step.num_pages >= step.num_pages:
            try:
                kept = recorded.step.inputs(self._rounds)
                for old, new in zip(kept, step.inputs(self._rounds), strict=True):
                    refill(old, new)
            except OtherShapeError as error:
                logger.warning("a draft's step runs eagerly: %s", error)
                return self._grown(step)
            recorded.recording.replay()
            self.num_replays += 1
            return recorded.result
        if self._eager_left[shape]:
            self._eager_left[shape] -= 1
            return self._grown(step)
        try:
            recorded = self._recorded[shape] = self._record(step)
        except CannotRecordError as error:
            logger.info("a draft's steps are not recorded: %s", error)
            self._is_off = True
            return None
        self.num_recorded += 1
        return recorded.result

    def _record(self, step: DraftStep) -> RecordedDraft:
        """Record the step on its own tensors, with page tables that have room."""
        before = step.before
        if isinstance(before, Followed):
            before = replace(
                before,
                extend=_own(before.extend, self._pages),
                aux_hidden={
                    layer_id: hidden.clone() for layer_id, hidden in before.aux_hidden.items()
                },
            )
        grown = None if step.round is None else _own(step.round, self._rounds)
        own = DraftStep(before, grown, step.positions)
        results = list[Candidates | Chains]()
        recording = record(lambda: results.append(self._grown(own)), self._arena)
        return RecordedDraft(own, results[0], recording)

    def _grown(self, step: DraftStep) -> Candidates | Chains:
        before = step.before
        if isinstance(before, Followed):
            features = self._model.features(before.aux_hidden, before.tokens)
            hidden = self._model.forward(before.extend, features, self._on_pages)[before.last]
        else:
            hidden = before.hidden
        if step.round is None or step.positions is None:
            return Chains(torch.empty(len(hidden), 0, dtype=torch.int64))
        # a copy, because the round's batch changes and a recording begins at its first state
        growing = replace(step.round)
        if self._topk == 1:
            first = (
                self._expander.most_likely(hidden)
                if isinstance(before, Followed)
                else before.tokens.flatten()
            )
            return self._expander.chains(growing, first, hidden, step.positions)
        best = (
            self._expander.best(hidden)
            if isinstance(before, Followed)
            else (before.log_p, before.tokens)
        )
        proposal = Proposal(*best)
        self._expander.expand(proposal, growing, hidden, self._steps)
        return proposal.candidates()


def _own(batch: ForwardBatch, planner: BatchPlanner) -> ForwardBatch:
    """Return a planned copy with its own tensors, and page tables that have room."""
    own = replace(
        batch,
        plan_mark=None,
        positions=batch.positions.clone(),
        page_tables=with_room(batch.page_tables),
    )
    planner.plan(own)
    watch_lengths(own)
    return own


def _repeated(row: FollowedRow, length: int) -> FollowedRow:
    """Return the row with `length` tokens, which repeat the last one."""
    missing = length - len(row.features)
    return replace(
        row,
        features=[*row.features, *row.features[-1:] * missing],
        next_tokens=[*row.next_tokens, *row.next_tokens[-1:] * missing],
    )

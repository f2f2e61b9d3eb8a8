"""Captured rounds in which a draft extends its trees, one graph per number of rows.

They work as in `engine/graphs/runner.py`. A round that is shorter than the captured ones runs
eagerly.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket
from engine.core.numerics import use_in_this_thread
from engine.graphs.buckets import row_counts
from engine.graphs.capture import Capture
from engine.graphs.runner import CapturedForward
from engine.memory.layout import NULL_INDEX
from engine.memory.static import StaticInts
from engine.speculative.attention.draft_attention import GraphRoundAttention
from engine.speculative.trees.draft_handoff import DraftEnd
from engine.speculative.trees.proposal import Candidates, Proposal
from engine.speculative.trees.tree_expander import TreeExpander

_PADDING_ID = -1


class RoundGraphs:
    """The captured rounds of one draft, with `topk` branches and `steps` levels each."""

    def __init__(
        self,
        *,
        expander: TreeExpander,
        rounds: GraphRoundAttention,
        max_rows: int,
        topk: int,
        steps: int,
        capture: Capture,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserve memory for all buckets. `capture_all` captures them.

        `width` is the size of the draft's hidden states.
        """
        self._expander = expander
        self._rounds = rounds
        self._capture = capture
        self._topk = topk
        self.steps = steps
        self._device = device
        self._buckets = [
            GraphBucket(ForwardMode.DRAFT, rows, topk) for rows in reversed(row_counts(max_rows))
        ]
        self._positions = StaticInts({"positions": max_rows * topk}, device)
        # Rows of padding begin with NaN, so that a leak becomes visible.
        self._ends = DraftEnd(
            torch.zeros(max_rows, topk, device=device),
            torch.zeros(max_rows, topk, dtype=torch.int64, device=device),
            torch.full((max_rows, width), float("nan"), dtype=dtype, device=device),
        )
        num_candidates = topk + (steps - 1) * topk * topk
        ids = torch.zeros(max_rows, num_candidates, dtype=torch.int64, device=device)
        self._grown = Candidates(
            torch.zeros(max_rows, num_candidates, device=device), ids, ids.clone()
        )
        self._captured: dict[GraphBucket, CapturedForward] = {}
        rounds.reserve(self._buckets)

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every number of rows.

        Raises:
            ConfigError: a number could not be captured; the message names it.
        """
        use_in_this_thread(self._device)
        for bucket in self._buckets:
            self._captured[bucket] = self._captured_round(bucket)

    def bucket_for(self, batch: ForwardBatch, steps: int) -> GraphBucket | None:
        """Return the captured bucket that the batch's rows fit into, or None.

        Larger batches, shorter rounds and planned batches get None.
        """
        if not batch.needs_forward_metadata_init():
            return None
        fitting = [
            bucket
            for bucket in self._captured
            if batch.num_rows <= bucket.max_rows and steps == self.steps
        ]
        return min(fitting, key=lambda bucket: bucket.max_rows, default=None)

    def run(self, batch: ForwardBatch, bucket: GraphBucket, ends: DraftEnd) -> Candidates:
        """Run a whole round on a host batch for which `bucket_for` returned `bucket`.

        `ends` are the draft states of its rows.
        """
        padded = self._padded(batch, bucket)
        count = batch.num_rows
        self._rounds.plan(padded)
        self._positions.refill({"positions": batch.positions})
        for static, given in zip(_parts(self._ends), _parts(ends), strict=True):
            static[:count] = given
        self._ends.hidden[count : bucket.max_rows] = float("nan")  # not those of an earlier batch
        self._captured[bucket].replay(padded)
        return Candidates(*(part[:count].clone() for part in _parts(self._grown)))

    def _captured_round(self, bucket: GraphBucket) -> CapturedForward:
        rows = bucket.max_rows
        none = torch.empty(0, dtype=torch.int64)
        batch = self._padded(
            ForwardBatch(
                mode=ForwardMode.DRAFT,
                request_keys=(),
                query_lens=(),
                context_lens=(),
                token_ids=None,
                positions=none,
                page_tables=torch.empty(0, 1, dtype=torch.int32),
                slot_ids=torch.empty(0, dtype=torch.int32),
                sampling=(),
            ),
            bucket,
        )
        self._rounds.plan(batch)

        def grow() -> None:
            batch.positions = self._positions["positions"][: rows * self._topk]
            self._rounds.restart(batch)
            proposal = Proposal(self._ends.log_p[:rows], self._ends.tokens[:rows])
            self._expander.expand(proposal, batch, self._ends.hidden[:rows], self.steps)
            for static, grown in zip(
                _parts(self._grown), _parts(proposal.candidates()), strict=True
            ):
                static[:rows] = grown

        return CapturedForward(
            self._rounds, batch, self._capture.capture(f"a round of the draft, {bucket}", grow)
        )

    def _padded(self, batch: ForwardBatch, bucket: GraphBucket) -> ForwardBatch:
        """Return an unmarked batch of the rows, padded by rows with one slot on the null page."""
        rows = bucket.max_rows
        missing = bucket.max_rows - batch.num_rows
        return ForwardBatch(
            mode=batch.mode,
            request_keys=(*batch.request_keys, *(_PADDING_ID,) * missing),
            query_lens=(self._topk,) * rows,
            context_lens=(*batch.context_lens, *(1,) * missing),
            token_ids=None,
            positions=F.pad(batch.positions, (0, missing * self._topk)),
            page_tables=F.pad(batch.page_tables, (0, 0, 0, missing), value=NULL_INDEX),
            slot_ids=F.pad(batch.slot_ids, (0, missing), value=NULL_INDEX),
            sampling=(None,) * rows,
            graph_bucket=bucket,
        )


def _parts(of: DraftEnd | Candidates) -> Sequence[Tensor]:
    return (
        (of.log_p, of.tokens, of.hidden)
        if isinstance(of, DraftEnd)
        else (of.scores, of.tokens, of.parents)
    )

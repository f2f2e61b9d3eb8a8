"""What a draft hands over with a prompt, besides its cache: all it takes to grow the first tree on the other side.

Legend: R rows, K most likely tokens.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftEnd:
    """Where a draft stands after its last slots.

    log_p   [R, K] fp32, natural logarithms, most likely first
    tokens  [R, K] int64, the target's ids of those tokens
    hidden  [R, draft width], what the draft's next step reads in the place of the target's features
    """

    log_p: Tensor
    tokens: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class HandedEnds:
    """Ends by state slot, in memory that the handoff moves: topk_p and topk_index [slots, K], hidden [slots, width]."""

    topk_p: Tensor
    topk_index: Tensor
    hidden: Tensor

    def put(self, slot_ids: Tensor, ends: DraftEnd) -> None:
        """slot_ids: [R] int64, wherever they lie."""
        slot_ids = slot_ids.to(self.hidden.device)
        self.topk_p[slot_ids], self.topk_index[slot_ids] = ends.log_p, ends.tokens
        self.hidden[slot_ids] = ends.hidden

    def get(self, slot_ids: Tensor) -> DraftEnd:
        """slot_ids: [R] int64, wherever they lie."""
        slot_ids = slot_ids.to(self.hidden.device)
        return DraftEnd(self.topk_p[slot_ids], self.topk_index[slot_ids], self.hidden[slot_ids])

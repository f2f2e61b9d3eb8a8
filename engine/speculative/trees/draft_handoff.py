"""What a draft hands over with a prompt, besides its cache: all it takes to grow the first tree on
the other side.

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
    keys    [R, n] int32, the keys that its last slots chose, for next steps that share the choice (`CarriedKeys`); -1
            where there are fewer. None where the draft chooses no keys
    """

    log_p: Tensor
    tokens: Tensor
    hidden: Tensor
    keys: Tensor | None = None


@dataclass(frozen=True)
class HandedEnds:
    """Ends by state slot, in memory that the handoff moves: topk_p and topk_index [slots, K],
    hidden [slots, width], keys [slots, n], None where no steps share a choice."""

    topk_p: Tensor
    topk_index: Tensor
    hidden: Tensor
    keys: Tensor | None = None

    def put(self, slot_ids: Tensor, ends: DraftEnd) -> None:
        """slot_ids: [R] int64, wherever they lie."""
        slot_ids = slot_ids.to(self.hidden.device)
        self.topk_p[slot_ids], self.topk_index[slot_ids] = ends.log_p, ends.tokens
        self.hidden[slot_ids] = ends.hidden
        if self.keys is not None:
            self.keys[slot_ids] = -1
            if ends.keys is not None:
                self.keys[slot_ids, : ends.keys.shape[1]] = ends.keys

    def get(self, slot_ids: Tensor) -> DraftEnd:
        """slot_ids: [R] int64, wherever they lie."""
        slot_ids = slot_ids.to(self.hidden.device)
        keys = None
        if self.keys is not None:
            keys = self.keys[slot_ids]
            keys = keys[:, : int((keys >= 0).sum(1).max())]
        return DraftEnd(
            self.topk_p[slot_ids], self.topk_index[slot_ids], self.hidden[slot_ids], keys
        )


@dataclass(frozen=True)
class HandedChains:
    """What a draft with a layer for each step hands over: the chain behind the prompt, whole.
    topk_p and topk_index [slots, D], as `HandedEnds` has them for a first level."""

    topk_p: Tensor
    topk_index: Tensor

    def put(self, slot_ids: Tensor, log_p: Tensor, tokens: Tensor) -> None:
        """slot_ids: [R] int64, wherever they lie; log_p, tokens: [R, D]."""
        slot_ids = slot_ids.to(self.topk_p.device)
        self.topk_p[slot_ids], self.topk_index[slot_ids] = log_p, tokens

    def get(self, slot_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Likewise."""
        slot_ids = slot_ids.to(self.topk_p.device)
        return self.topk_p[slot_ids], self.topk_index[slot_ids]

"""The draft state that is handed over with a prompt, in addition to the draft's cache.

It is all that the decode side needs to build the first tree.

Legend: R rows, K most likely tokens.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftEnd:
    """The state of a draft after its last slots.

    log_p   [R, K] fp32, natural logarithms, most likely first
    tokens  [R, K] int64, the target's ids of those tokens
    hidden  [R, draft width], the input of the draft's next step in place of the target's features
    keys    [R, n] int32, the keys that its last slots chose, for next steps that share the choice
            (`CarriedKeys`); -1 pads shorter choices. None if the draft chooses no keys
    """

    log_p: Tensor
    tokens: Tensor
    hidden: Tensor
    keys: Tensor | None = None


@dataclass(frozen=True)
class HandedEnds:
    """Draft states by state slot, in memory that the handoff transfers.

    topk_p, topk_index  [slots, K]
    hidden              [slots, width]
    keys                [slots, n], None if no steps share a choice
    """

    topk_p: Tensor
    topk_index: Tensor
    hidden: Tensor
    keys: Tensor | None = None

    def put(self, slot_ids: Tensor, ends: DraftEnd) -> None:
        """Store the states of these slots. `slot_ids` is [R] int64 on any device."""
        slot_ids = slot_ids.to(self.hidden.device)
        self.topk_p[slot_ids] = ends.log_p
        self.topk_index[slot_ids] = ends.tokens
        self.hidden[slot_ids] = ends.hidden
        if self.keys is not None:
            self.keys[slot_ids] = -1
            if ends.keys is not None:
                self.keys[slot_ids, : ends.keys.shape[1]] = ends.keys

    def get(self, slot_ids: Tensor) -> DraftEnd:
        """Return the states of these slots. `slot_ids` is [R] int64 on any device."""
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
    """Chains that a draft with one layer per step hands over: all tokens after the prompt.

    `topk_p` and `topk_index` are [slots, D], named as in `HandedEnds`, which has a first level.
    """

    topk_p: Tensor
    topk_index: Tensor

    def put(self, slot_ids: Tensor, log_p: Tensor, tokens: Tensor) -> None:
        """Store the chains of slots [R] int64; `log_p` and `tokens` are [R, D]."""
        slot_ids = slot_ids.to(self.topk_p.device)
        self.topk_p[slot_ids] = log_p
        self.topk_index[slot_ids] = tokens

    def get(self, slot_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chains of these slots: `log_p` and `tokens`, [R, D] each."""
        slot_ids = slot_ids.to(self.topk_p.device)
        return self.topk_p[slot_ids], self.topk_index[slot_ids]

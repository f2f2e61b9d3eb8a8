"""The contract of attention over compressed keys (MLA), with an optional choice of the keys to attend to (DSA).

All heads share one cached entry per token: the latent c and the rotated key part k_r. In the absorbed form a head's
query lives in the same space, so scores and outputs are products with the entries themselves:
    score_hs = scale * (q_h . [c_s; k_rs]);   out_h = sum_s softmax(score_h)_s c_s
Prefill, decode and verification all use this one form, because two forms would give two sets of bits.

Plan once per batch, run once per layer, with the same marker and the same refusals as paged attention.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.batch import ForwardBatch


@dataclass(frozen=True)
class LatentGeometry:
    """What distinguishes one plan from another. `max_selected` keys per token are chosen where a layer chooses."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    page_size: int
    scale: float
    max_selected: int = 0

    @property
    def entry_dim(self) -> int:
        return self.latent_dim + self.rope_dim


class LatentAttentionBackend(Protocol):
    """Owns no pool: it is built over the stage's latent and index-key tensors and knows them by layer id."""

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare key tables, lengths and masks for the batch and mark it."""
        ...

    def select(self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the new tokens' index keys, then choose the keys each token attends to.

        Score of key s: sum_h weights_h * relu(q_h . k_s * head_dim^-0.5), fp32. Chosen are the `max_selected` best of
        the visible keys, the earlier one where scores are equal.

        q: [T, index_heads, index_head_dim]; k: [T, index_head_dim], rope applied; weights: [T, index_heads] fp32.
        Returns [T, n] int32 key positions in storage order, ascending, -1 where there are fewer.
        """
        ...

    def run(self, layer_id: int, q: Tensor, entries: Tensor, selected: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Write the new tokens' entries, then attend to `selected`, or to every visible key without it.

        q: [T, num_heads, entry_dim]; entries: [T, entry_dim]. Returns [T, num_heads, latent_dim].

        Raises:
            StalePlanError: the batch was not planned by this backend, or its rows or tokens are not the planned ones.
        """
        ...

"""The contract of attention over compressed keys (MLA), with an optional choice of the keys to
attend to (DSA).

All heads share one cached entry per token: the latent c and the rotated key part k_r. In the
absorbed form a head's query lives in the same space, so scores and outputs are products with the
entries themselves:
    score_hs = scale * (q_h . [c_s; k_rs]);   out_h = sum_s softmax(score_h)_s c_s
Prefill, decode and verification all use this one form, because two forms would give two sets of
bits.

Plan once per batch, run once per layer, with the same marker and the same refusals as paged
attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.core.batch import ForwardBatch
from runtime.errors import InternalError, StalePlanError


@dataclass(frozen=True)
class LatentGeometry:
    """What distinguishes one plan from another. `max_selected` keys per token are chosen where a
    layer chooses."""

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
    """Owns no pool: it is built over the stage's latent and index-key tensors and finds them by
    layer id."""

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare key tables, lengths and masks for the batch and mark it."""
        ...

    def select(
        self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Write the new tokens' index keys, then choose the keys each token attends to.

        Score of key s: sum_h weights_h * relu(q_h . k_s * head_dim^-0.5), fp32. Chosen are the
        `max_selected` best of the visible keys, the earlier one where scores are equal.

        q: [T, index_heads, index_head_dim]; k: [T, index_head_dim], rope applied; weights: [T,
        index_heads] fp32. Returns [T, n] int32 key positions in storage order, ascending, -1 where
        there are fewer.
        """
        ...

    def run(
        self,
        layer_id: int,
        q: Tensor,
        entries: Tensor,
        selected: Tensor | None,
        batch: ForwardBatch,
    ) -> Tensor:
        """Write the new tokens' entries, then attend to `selected`, or to every visible key without
        it.

        q: [T, num_heads, entry_dim]; entries: [T, entry_dim]. Returns [T, num_heads, latent_dim].

        Raises:
            StalePlanError: the batch was not planned by this backend, or its rows or tokens are not
                the planned ones.
        """
        ...


def check_pages(latent_pools: Mapping[int, Tensor], geometry: LatentGeometry) -> None:
    """Raises InternalError for a layer whose pages are not of this geometry."""
    for layer_id, pool in latent_pools.items():
        if tuple(pool.shape[1:]) != (geometry.page_size, geometry.entry_dim):
            raise InternalError(
                f"layer {layer_id}: latent pages are {tuple(pool.shape[1:])}, geometry says "
                f"{(geometry.page_size, geometry.entry_dim)}"
            )


def check_covered(batch: ForwardBatch, num_planned: tuple[int, int], q: Tensor) -> None:
    """`num_planned`: the rows and tokens of the plan that is to run. Raises StalePlanError unless
    they are the batch's, and q theirs."""
    if (batch.num_rows, batch.num_tokens) != num_planned or q.shape[0] != num_planned[1]:
        raise StalePlanError(
            f"planned for {num_planned[0]} rows and {num_planned[1]} tokens, the batch has "
            f"{batch.num_rows} and {batch.num_tokens}, q {q.shape[0]}"
        )


def checked_selection(
    selected: Tensor | None, layer_id: int, num_tokens: int, geometry: LatentGeometry
) -> Tensor | None:
    """What a layer was given to attend to. Raises InternalError when a model that chooses has no
    choice for these tokens."""
    if (selected is None and geometry.max_selected) or (
        selected is not None and selected.shape[0] != num_tokens
    ):
        raise InternalError(f"layer {layer_id} needs the keys selected for {num_tokens} tokens")
    return selected


def entries_of(pools: Mapping[int, Tensor], layer_id: int, what: str) -> Tensor:
    """A layer's pages as one run of entries, [num_pages * page_size, dim]."""
    pool = pools.get(layer_id)
    if pool is None:
        raise InternalError(f"layer {layer_id} has no {what} on this stage")
    return pool.view(-1, pool.shape[-1])

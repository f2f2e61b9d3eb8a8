"""Contract of attention over compressed keys (MLA), with optional key selection (DSA).

All heads share one cached entry per token: the latent c and the rotated key part k_r. In the
absorbed form a head's query is in the same space, so scores and outputs are products with the
entries themselves:
    score_hs = scale * (q_h . [c_s; k_rs]);   out_h = sum_s softmax(score_h)_s c_s
Prefill, decode and verification all use this form, because two forms would give different bits.

A backend plans once per batch and runs once per layer. The plan mark and the errors are those of
paged attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.core.batch import ForwardBatch
from runtime.errors import InternalError, StalePlanError


@dataclass(frozen=True)
class LatentGeometry:
    """The properties that distinguish one plan from another.

    Attributes:
        max_selected: the number of keys per token that a selecting layer chooses; 0 without
            selection.
    """

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
    """Latent attention over the latent and index-key tensors of a stage.

    The backend does not own the pool. It finds the tensors by layer id.
    """

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare key tables, lengths and masks for the batch and mark it."""
        ...

    def select(
        self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Write the new tokens' index keys, then select the keys that each token attends to.

        The score of key s is sum_h weights_h * relu(q_h . k_s * head_dim^-0.5), in fp32. The
        `max_selected` visible keys with the highest scores are selected. Of equal scores the
        earlier key wins.

        q is [T, index_heads, index_head_dim]; k is [T, index_head_dim], with rope applied; weights
        is [T, index_heads] fp32. The result is [T, n] int32: key positions in storage order,
        ascending, padded with -1.
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
        """Write the new tokens' entries, then attend to `selected`, or to all visible keys if None.

        q is [T, num_heads, entry_dim]; entries is [T, entry_dim]. The result is [T, num_heads,
        latent_dim].

        Raises:
            StalePlanError: the batch was not planned by this backend, or its rows or tokens differ
                from the plan's.
        """
        ...


def check_pages(latent_pools: Mapping[int, Tensor], geometry: LatentGeometry) -> None:
    """Check that the pages of every layer have this geometry.

    Raises:
        InternalError: the pages of a layer have another shape.
    """
    for layer_id, pool in latent_pools.items():
        if tuple(pool.shape[1:]) != (geometry.page_size, geometry.entry_dim):
            raise InternalError(
                f"layer {layer_id}: latent pages are {tuple(pool.shape[1:])}, geometry says "
                f"{(geometry.page_size, geometry.entry_dim)}"
            )


def check_covered(batch: ForwardBatch, num_planned: tuple[int, int], q: Tensor) -> None:
    """Check that the batch and q have the planned numbers of rows and tokens.

    `num_planned` holds the rows and the tokens of the plan.

    Raises:
        StalePlanError: the batch or q differs from the plan.
    """
    if (batch.num_rows, batch.num_tokens) != num_planned or q.shape[0] != num_planned[1]:
        raise StalePlanError(
            f"planned for {num_planned[0]} rows and {num_planned[1]} tokens, the batch has "
            f"{batch.num_rows} and {batch.num_tokens}, q {q.shape[0]}"
        )


def checked_selection(
    selected: Tensor | None, layer_id: int, num_tokens: int, geometry: LatentGeometry
) -> Tensor | None:
    """Return the keys selected for a layer after checking them.

    Raises:
        InternalError: the model selects keys and has none for these tokens.
    """
    if (selected is None and geometry.max_selected) or (
        selected is not None and selected.shape[0] != num_tokens
    ):
        raise InternalError(f"layer {layer_id} needs the keys selected for {num_tokens} tokens")
    return selected


def entries_of(pools: Mapping[int, Tensor], layer_id: int, what: str) -> Tensor:
    """Return a layer's pages as one sequence of entries, [num_pages * page_size, dim]."""
    pool = pools.get(layer_id)
    if pool is None:
        raise InternalError(f"layer {layer_id} has no {what} on this stage")
    return pool.view(-1, pool.shape[-1])

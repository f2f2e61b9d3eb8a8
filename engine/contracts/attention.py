"""The contract of paged attention: plan once per batch, run once per layer.

Maps one to one on FlashInfer's plan()/run(). A backend plans from the batch's host-side lengths and
page tables, marks the batch, and refuses (`StalePlanError`) to run on a plan that is not its own,
is for another geometry or does not cover the rows.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.core.batch import ForwardBatch


@dataclass(frozen=True)
class AttentionGeometry:
    """What distinguishes one plan from another on the same batch. `window`: how many tokens before
    itself a token sees; None for all. `windowed`: of the layers beside these that see a window
    only; None where there are none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None = None
    windowed: "AttentionGeometry | None" = None


class AttentionBackend(Protocol):
    """Owns no pool: it is built over the stage's KV tensors and reads and writes them by layer
    id."""

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare gather tables, lengths and masks for the batch and mark it."""
        ...

    def run(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Write k, v of the new tokens to their pages, then attend.

        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim], rope applied. Returns [T,
        num_heads, head_dim]. Causal within a row, or by the custom mask of `batch.spec_info` in
        VERIFY and DRAFT modes.

        Raises:
            StalePlanError: the batch was not planned by this backend, or has more rows or tokens
                than the plan.
        """
        ...


class CachedAttention(Protocol):
    """What reads keys that others have written: those of a target, for a draft without a cache."""

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """See `AttentionBackend.plan`."""
        ...

    def read(self, layer_id: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        """q: [T, num_heads, head_dim], rope applied. Attend with the keys and values that lie where
        the batch says the tokens', and write none. Returns the same as q. Raises StalePlanError as
        `AttentionBackend.run` does."""
        ...

"""Contract of paged attention: plan once per batch, run once per layer.

It maps one to one on FlashInfer's plan()/run(). A backend plans from the batch's host-side lengths
and page tables, and marks the batch. It raises `StalePlanError` for a plan of another backend, for
another geometry, or for too few rows or tokens.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.core.batch import ForwardBatch
from runtime.errors import InternalError


@dataclass(frozen=True)
class AttentionGeometry:
    """The properties that distinguish the plans of one batch.

    Attributes:
        window: the number of preceding tokens that a token attends to; None for all.
        windowed: the geometry of the sliding-window layers of the same model; None if it has none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None = None
    windowed: "AttentionGeometry | None" = None


class AttentionBackend(Protocol):
    """Paged attention over the KV tensors of a stage.

    The backend does not own the pool. It reads and writes the tensors by layer id.
    """

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare gather tables, lengths and masks for the batch and mark it."""
        ...

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k and v of the new tokens to their pages, then attend.

        q is [T, num_heads, head_dim]; k and v are [T, num_kv_heads, head_dim], with rope applied.
        The result is [T, num_heads, head_dim]. Attention is causal within a row. In VERIFY and
        DRAFT modes it follows the custom mask of `batch.spec_info`. `sinks` [num_heads]
        fp32, contiguous and finite, are a further score in each head's softmax, before scaling. A
        sink has no value.

        Raises:
            StalePlanError: the batch was not planned by this backend, or has more rows or tokens
                than the plan.
            InternalError: this backend does not support sinks.
        """
        ...


def refuse_sinks(sinks: Tensor | None) -> None:
    """Implement `sinks` of `AttentionBackend.run` for a backend without them.

    Raises:
        InternalError: there are sinks.
    """
    if sinks is not None:
        raise InternalError("this attention does not support sinks")


class CachedAttention(Protocol):
    """Attention that reads cached keys and writes none.

    A draft model without a cache uses it to read the target's keys.
    """

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Implement `AttentionBackend.plan`."""
        ...

    def read(self, layer_id: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend to the cached keys and values of the batch's pages; write none.

        q is [T, num_heads, head_dim], with rope applied. The result has the shape of q.

        Raises:
            StalePlanError: as in `AttentionBackend.run`.
        """
        ...

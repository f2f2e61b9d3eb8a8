"""Contract of recurrent layers.

They advance the conv and recurrent state in the rows' slots by the new tokens.
"""

from typing import Protocol

from torch import Tensor

from engine.core.batch import ForwardBatch
from runtime.errors import InternalError


class PlansStates(Protocol):
    """Planning of recurrent layers before a forward."""

    def plan(self, batch: ForwardBatch) -> object:
        """Plan the next forward of `batch`.

        Return a dataclass with everything that the layers read of the batch besides their inputs.
        Values that may differ in the next batch of the same shape are in tensors. Only the next
        forward uses the plan, and only if it is this batch's.

        Raises:
            InternalError: the stage does not have a slot or a tree of the batch.
        """
        ...


class RecurrentBackend(Protocol):
    """Recurrent layers over the conv and state pools of a stage.

    The backend reads and writes the pools by layer id and `batch.slot_ids`. A row whose
    `context_lens` is 0 starts from zero state, whatever its slot holds. PREFILL uses the chunked
    form on the 64-token grid of absolute positions; DECODE and REPLAY use the one-step form. VERIFY
    keeps one state per node and commits later.
    """

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """Apply a depthwise causal convolution, then SiLU, and update the conv state.

        x is [T, C]; weight is [C, K]. The result is [T, C].
        """
        ...

    def gated_delta_rule(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        """Apply the gated delta rule and update the recurrent state.

        q and k are [T, Hk, dk]; v is [T, Hv, dv]; g (log decay) and beta are [T, Hv] fp32. g may be
        [T, Hv, dk], with one decay per key channel. The result is [T, Hv, dv] fp32.

        q and k are the outputs of the convolution. The backend normalizes them per head (fp32),
        scales q by dk^-0.5 and repeats each key head for its Hv / Hk consecutive value heads.
        """
        ...


class PlanningRecurrent(RecurrentBackend, PlansStates, Protocol):
    """A recurrent backend that plans before a forward."""


class NoStates:
    """A `RecurrentBackend` without pools, for models without recurrent layers."""

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """Raise InternalError: the layer has no conv state."""
        raise InternalError(f"layer {layer_id} has no conv slots: its model has no states")

    def gated_delta_rule(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        """Raise InternalError: the layer has no recurrent state."""
        raise InternalError(f"layer {layer_id} has no state slots: its model has no states")

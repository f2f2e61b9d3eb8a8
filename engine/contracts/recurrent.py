"""The contract of recurrent layers: advance conv and recurrent state of the rows' slots by their
new tokens."""

from typing import Protocol

from torch import Tensor

from engine.core.batch import ForwardBatch


class PlansStates(Protocol):
    """Plans for recurrent layers ahead of a forward."""

    def plan(self, batch: ForwardBatch) -> object:
        """What they read of the batch besides their inputs: a dataclass in which all that may be
        different in the next batch of the same shape is in tensors. The batch's forward uses it, if
        that is the next one.

        Raises:
            InternalError: a slot or a tree that this stage does not have.
        """
        ...


class RecurrentBackend(Protocol):
    """Built over the stage's conv and state pools; reads and writes them by layer id and
    `batch.slot_ids`.

    A row whose `context_lens` is 0 starts from zero state whatever its slot holds. PREFILL uses the
    chunked form on the 64-token grid of absolute positions, DECODE the one-step form; VERIFY keeps
    one state per node and commits later.
    """

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """Depthwise causal convolution, then SiLU. x: [T, C]; weight: [C, K]; returns [T, C];
        updates conv state."""
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
        """q, k: [T, Hk, dk]; v: [T, Hv, dv]; g (log decay), beta: [T, Hv] fp32; g may be [T, Hv,
        dk], a decay of each key channel. Returns [T, Hv, dv] fp32; updates state.

        q and k come as the convolution gave them: the backend normalises them per head (fp32),
        scales q by dk^-0.5 and repeats each key head for its Hv / Hk consecutive value heads.
        """
        ...


class PlanningRecurrent(RecurrentBackend, PlansStates, Protocol):
    """Both."""

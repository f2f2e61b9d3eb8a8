"""What the engine needs of a model stage. `models/` satisfies it; the engine never imports `models/`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.contracts.attention import AttentionBackend
from engine.contracts.latent import LatentAttentionBackend
from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardBatch
from engine.core.layer_range import LayerRange, TensorRank


@dataclass(frozen=True)
class ModelFacts:
    """What the serving side must know of a checkpoint."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    dtype: str  # of weights and hidden states, torch's name
    eos_token_ids: tuple[int, ...]
    revision: str  # digest of the weights, hex
    chunk_grid: int  # prefill chunks must end on multiples of this many tokens (64 for GatedDeltaNet, else 1)


@dataclass(frozen=True)
class StageOutput:
    """What a stage hands on: hidden states [T, hidden] to the next stage, logits [rows that draw, vocab] fp32 from the
    last, and captured hidden states by global layer id (for EAGLE; they travel forward with the hidden states).

    `selected_keys` [T, n] int32 travels with them where the next stage's first layer shares the keys that a layer of
    this stage, or of one before it, has selected; elsewhere it is None.
    """

    hidden: Tensor | None = None
    logits: Tensor | None = None
    aux_hidden: dict[int, Tensor] = field(default_factory=dict)
    selected_keys: Tensor | None = None

    def to(self, device: torch.device) -> "StageOutput":
        """All of it on `device`; itself where it is there already."""
        if all(tensor.device == device for tensor in self._tensors()):
            return self
        hidden, logits, keys = (None if tensor is None else tensor.to(device)
                                for tensor in (self.hidden, self.logits, self.selected_keys))
        aux_hidden = {layer_id: tensor.to(device) for layer_id, tensor in self.aux_hidden.items()}
        return StageOutput(hidden, logits, aux_hidden, keys)

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.logits, self.selected_keys, *self.aux_hidden.values())
                if tensor is not None]


@dataclass(frozen=True)
class ForwardContext:
    """What a forward works with besides its inputs: the backends of the kinds of layers a model has (a model has one
    kind of attention, if any). `on_layer_done(layer_id)` is called when a layer's cache entries
    of this batch are complete, so that a sender may read them while the next layer computes."""

    attention: AttentionBackend | None
    recurrent: RecurrentBackend
    on_layer_done: Callable[[int], None] | None = None
    latent_attention: LatentAttentionBackend | None = None


class Ranks(Protocol):
    """The ranks that share a stage, to one of them. All call the same methods in the same order; a call that cannot
    be answered, because a rank is lost or could not go on, raises."""

    @property
    def own(self) -> TensorRank: ...

    def gather(self, part: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """part: [n, ...] with n the same on every rank, or counts[r] on rank r. Returns all ranks' parts by rank, this
        one's included."""
        ...

    def collect(self, part: Tensor) -> list[Tensor] | None:
        """part: [n, ...], n the same on every rank. Returns all parts on the first rank, None on the others."""
        ...


class StageModel(Protocol):
    """The layers of one stage, with the embedding on the first and norm and head on the last."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def layer_range(self) -> LayerRange: ...

    def forward(self, batch: ForwardBatch, hidden: Tensor | None, context: ForwardContext,
                aux_hidden: dict[int, Tensor] | None = None, selected_keys: Tensor | None = None) -> StageOutput:
        """Run this stage's layers. The first stage reads `batch.token_ids`, the others `hidden` [T, hidden] and what
        else the stage before handed on.

        The attention backend must have planned the batch (`batch.needs_forward_metadata_init()` is False); rows whose
        `sampling` is None produce no logits.
        """
        ...

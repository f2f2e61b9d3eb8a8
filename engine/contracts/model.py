"""What the engine needs of a model stage. `models/` satisfies it; the engine never imports
`models/`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.contracts.attention import AttentionBackend, CachedAttention
from engine.contracts.latent import LatentAttentionBackend
from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardBatch
from engine.core.layer_range import LayerRange, Part, TensorRank


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
    # prefill chunks must end on multiples of this many tokens (64 for GatedDeltaNet, else 1)
    chunk_grid: int
    context_field: str = "max_position_embeddings"  # of its config, which sets `max_context_tokens`


@dataclass(frozen=True)
class StageOutput:
    """What a stage hands on: hidden states [T, hidden] to the next stage, logits [rows that draw,
    vocab] fp32 from the last, and captured hidden states by global layer id (for EAGLE; they travel
    forward with the hidden states).

    `selected_keys` [T, n] int32 travels with them where the next stage's first layer shares the
    keys that a layer of this stage, or of one before it, has selected; elsewhere it is None.
    """

    hidden: Tensor | None = None
    logits: Tensor | None = None
    aux_hidden: dict[int, Tensor] = field(default_factory=dict)
    selected_keys: Tensor | None = None

    def to(self, device: torch.device) -> "StageOutput":
        """All of it on `device`; itself where it is there already."""
        if all(tensor.device == device for tensor in self._tensors()):
            return self
        hidden, logits, keys = (
            None if tensor is None else tensor.to(device)
            for tensor in (self.hidden, self.logits, self.selected_keys)
        )
        aux_hidden = {layer_id: tensor.to(device) for layer_id, tensor in self.aux_hidden.items()}
        return StageOutput(hidden, logits, aux_hidden, keys)

    def split(self, num_tokens: int) -> "tuple[StageOutput, StageOutput]":
        """What is there of the first tokens, and of the others. For what a stage hands on: not of
        logits."""

        def parts(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            return (None, None) if tensor is None else (tensor[:num_tokens], tensor[num_tokens:])

        hidden, keys = parts(self.hidden), parts(self.selected_keys)
        aux_hidden = (
            {layer_id: tensor[tokens] for layer_id, tensor in self.aux_hidden.items()}
            for tokens in (slice(num_tokens), slice(num_tokens, None))
        )
        first, second = (
            StageOutput(*each) for each in zip(hidden, (None, None), aux_hidden, keys, strict=True)
        )
        return first, second

    def joined(self, other: "StageOutput") -> "StageOutput":
        """With that of the tokens behind these, of the same stage."""

        def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
            return None if first is None or second is None else torch.cat([first, second])

        aux_hidden = {
            layer_id: torch.cat([tensor, other.aux_hidden[layer_id]])
            for layer_id, tensor in self.aux_hidden.items()
        }
        keys = [
            tensor for tensor in (self.selected_keys, other.selected_keys) if tensor is not None
        ]
        width = max((tensor.shape[1] for tensor in keys), default=0)
        wide = [
            torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=-1)
            for tensor in keys
        ]
        return StageOutput(
            both(self.hidden, other.hidden),
            both(self.logits, other.logits),
            aux_hidden,
            torch.cat(wide) if wide else None,
        )

    def _tensors(self) -> list[Tensor]:
        return [
            tensor
            for tensor in (self.hidden, self.logits, self.selected_keys, *self.aux_hidden.values())
            if tensor is not None
        ]


@dataclass(frozen=True)
class ForwardContext:
    """What a forward works with besides its inputs: the backends of the kinds of layers a model has
    (a model has one kind of attention, if any). `on_layer_done(layer_id)` is called when a layer's
    cache entries of this batch are complete, so that a sender may read them while the next layer
    computes."""

    attention: AttentionBackend | None
    recurrent: RecurrentBackend
    on_layer_done: Callable[[int], None] | None = None
    latent_attention: LatentAttentionBackend | None = None
    cached_attention: CachedAttention | None = None


@dataclass(frozen=True)
class ExpertTokens:
    """Tokens that each expert of a layer [experts] int64 has got since the start, whichever rank
    has it, and which of the experts are this rank's."""

    counts: Tensor
    own: Part


class Ranks(Protocol):
    """Ranks that divide a layer, to one of them. All call the same methods in the same order; a
    call that cannot be answered, because a rank is lost or could not go on, raises."""

    @property
    def own(self) -> TensorRank: ...

    def gather(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """part: [n, ...] with n the same on every rank, or counts[r] on rank r. Returns all ranks'
        parts by rank, one behind the other, this one's included."""
        ...

    def swap(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> Tensor:
        """parts: one for each rank. Returns what the ranks have for this one, likewise: `counts[r]`
        rows of rank r, or of each as many as this one has for itself."""
        ...

    def swap_shares(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """As `swap` of one for each rank, without a copy: what the ranks have for this one, each in
        a tensor by itself of the shape of this one's own, which is the one that was given."""
        ...

    def complete(self, rows: Tensor, counts: Sequence[int]) -> None:
        """As `gather` in place. rows: [sum(counts), ...], dense, counts[r] of them from rank r, one
        behind the other: this rank's are there, and the others' are written between them."""
        ...


class RanksOfStage(Ranks, Protocol):
    """Those that share a stage. Counts of rows by data rank are the same on all of them."""

    @property
    def attention(self) -> Ranks:
        """Those of its data rank, which alone divide what is done by request."""
        ...

    def collect(self, part: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Tensor | None:
        """part: [sum(counts), widths[r]] on rank r. Returns of a data rank's rows all ranks' parts
        side by side [counts[data rank], sum(widths)] on the first rank of that, None on the
        others."""
        ...

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows: [counts[own data rank], ...], the same on all ranks of a data rank. Returns those
        of all data ranks [sum(counts), ...], one behind the other. Raises InternalError for counts
        that are not of this step."""
        ...

    def own_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows: [sum(counts), ...]. Returns those of this rank's data rank, [counts[own data rank],
        ...]."""
        ...


class StageModel(Protocol):
    """The layers of one stage, with the embedding on the first and norm and head on the last."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def layer_range(self) -> LayerRange: ...

    @property
    def expert_tokens(self) -> Mapping[int, ExpertTokens]:
        """By layer, of those that have experts. Engine thread."""
        ...

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        context: ForwardContext,
        aux_hidden: dict[int, Tensor] | None = None,
        selected_keys: Tensor | None = None,
    ) -> StageOutput:
        """Run this stage's layers. The first stage reads `batch.token_ids`, the others `hidden` [T,
        hidden] and what else the stage before handed on.

        The attention backend must have planned the batch (`batch.needs_forward_metadata_init()` is
        False); rows whose `sampling` is None produce no logits.
        """
        ...

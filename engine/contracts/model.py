"""Contract of a model stage.

`models/` implements it; the engine never imports `models/`.
"""

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
    """The properties of a checkpoint that serving depends on."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    dtype: str  # torch's name of the dtype of weights and hidden states
    eos_token_ids: tuple[int, ...]
    revision: str  # hexadecimal digest of the weights
    # prefill chunks must end on multiples of this number of tokens (64 for GatedDeltaNet, else 1)
    chunk_grid: int
    context_field: str = "max_position_embeddings"  # config field of `max_context_tokens`


@dataclass(frozen=True)
class StageOutput:
    """The output of a stage.

    Attributes:
        hidden: [T, hidden] hidden states for the next stage.
        logits: [rows that sample, vocab] fp32, from the last stage only.
        aux_hidden: captured hidden states by global layer id, for EAGLE. They travel with `hidden`.
        selected_keys: [T, n] int32 keys selected by an earlier layer, if the first layer of the
            next stage shares them; otherwise None.
    """

    hidden: Tensor | None = None
    logits: Tensor | None = None
    aux_hidden: dict[int, Tensor] = field(default_factory=dict)
    selected_keys: Tensor | None = None

    def to(self, device: torch.device) -> "StageOutput":
        """Return the output on `device`; self if it is there already."""
        if all(tensor.device == device for tensor in self._tensors()):
            return self
        hidden, logits, keys = (
            None if tensor is None else tensor.to(device)
            for tensor in (self.hidden, self.logits, self.selected_keys)
        )
        aux_hidden = {layer_id: tensor.to(device) for layer_id, tensor in self.aux_hidden.items()}
        return StageOutput(hidden, logits, aux_hidden, keys)

    def split(self, num_tokens: int) -> "tuple[StageOutput, StageOutput]":
        """Split hidden states, selected keys and captured states after `num_tokens` tokens.

        Logits are dropped: the method is for outputs that go to another stage.
        """

        def parts(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            return (None, None) if tensor is None else (tensor[:num_tokens], tensor[num_tokens:])

        hidden = parts(self.hidden)
        keys = parts(self.selected_keys)
        aux_hidden = (
            {layer_id: tensor[tokens] for layer_id, tensor in self.aux_hidden.items()}
            for tokens in (slice(num_tokens), slice(num_tokens, None))
        )
        first, second = (
            StageOutput(*each) for each in zip(hidden, (None, None), aux_hidden, keys, strict=True)
        )
        return first, second

    def joined(self, other: "StageOutput") -> "StageOutput":
        """Append the output of the following tokens from the same stage."""

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
    """The backends and callbacks of a forward.

    A model has at most one kind of attention. `on_layer_done(layer_id)` is called when a layer's
    cache entries of this batch are complete. A sender may then read them while the next layer
    computes.
    """

    attention: AttentionBackend | None
    recurrent: RecurrentBackend
    on_layer_done: Callable[[int], None] | None = None
    latent_attention: LatentAttentionBackend | None = None
    cached_attention: CachedAttention | None = None


@dataclass(frozen=True)
class ExpertTokens:
    """Token counts of a layer's experts since the start.

    Attributes:
        counts: [experts] int64, for all experts, on whichever rank they are.
        own: the experts of this rank.
    """

    counts: Tensor
    own: Part


class Ranks(Protocol):
    """The ranks that divide a layer, as one of them sees them.

    All ranks call the same methods in the same order. A call raises if a rank is lost or failed.
    """

    @property
    def own(self) -> TensorRank: ...

    def gather(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Return all ranks' parts concatenated by rank, including this rank's.

        part is [n, ...]; n is the same on every rank, or counts[r] on rank r.
        """
        ...

    def swap(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> Tensor:
        """Send one part to each rank and return the parts for this rank, concatenated by rank.

        Rank r contributes `counts[r]` rows. Without `counts` every rank contributes the same number
        of rows as this rank's own part has.
        """
        ...

    def swap_shares(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """Exchange one tensor with each rank without a copy.

        Return one tensor per rank. Each has the shape of this rank's own, which is returned as
        given.
        """
        ...

    def complete(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Gather in place.

        rows is dense, [sum(counts), ...], with counts[r] rows from rank r. This rank's rows are
        filled in already; the other ranks' rows are written around them.
        """
        ...


class RanksOfStage(Ranks, Protocol):
    """The ranks that share a stage.

    Row counts by data rank are the same on all of them.
    """

    @property
    def attention(self) -> Ranks:
        """Return the ranks of this data rank, which divide the work of its requests."""
        ...

    def collect(self, part: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Tensor | None:
        """Join all ranks' columns of a data rank's rows on the first rank of that data rank.

        part is [sum(counts), widths[r]] on rank r. Return [counts[data rank], sum(widths)] on the
        first rank of the data rank, and None on the others.
        """
        ...

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all data ranks, [sum(counts), ...], concatenated by data rank.

        rows is [counts[own data rank], ...], the same on all ranks of a data rank.

        Raises:
            InternalError: the counts are not those of this step.
        """
        ...

    def own_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of this rank's data rank, [counts[own data rank], ...].

        rows is [sum(counts), ...].
        """
        ...


class StageModel(Protocol):
    """The layers of one stage; the first has the embedding, the last the norm and the head."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def layer_range(self) -> LayerRange: ...

    @property
    def expert_tokens(self) -> Mapping[int, ExpertTokens]:
        """Return the token counts of experts by layer, for layers with experts.

        Called by the engine thread.
        """
        ...

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        context: ForwardContext,
        aux_hidden: dict[int, Tensor] | None = None,
        selected_keys: Tensor | None = None,
    ) -> StageOutput:
        """Run this stage's layers.

        The first stage reads `batch.token_ids`. The others read `hidden` [T, hidden] and the other
        outputs of the previous stage.

        The attention backend must have planned the batch (`batch.needs_forward_metadata_init()` is
        False). Rows whose `sampling` is None produce no logits.
        """
        ...

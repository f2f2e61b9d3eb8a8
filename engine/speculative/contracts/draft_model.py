"""The protocol of draft models, which `models/drafts/` implements.

Slot t of a draft has the target's features at token t together with token t + 1, and predicts token
t + 2. Later steps of a round use the draft's own hidden state in place of the target's.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.contracts.latent import LatentGeometry
from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch
from engine.memory.layout import CacheSpec


class DraftModel(Protocol):
    """A whole small model on the target's last stage, in any pipeline."""

    @property
    def capture_layers(self) -> frozenset[int]:
        """Return the global ids of the target's layers whose outputs the draft reads."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens that the draft can propose."""
        ...

    def attention_geometry(self, page_size: int) -> AttentionGeometry | LatentGeometry:
        """Return the geometry. Its type determines the kind of attention that `forward` gets."""
        ...

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """Return the draft's caches, by its own layer ids from 0."""
        ...

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """Return the slots' inputs from the target, [n, hidden].

        `aux_hidden` is [T, target hidden] by layer id, `tokens` [n] int64 indices into T.
        """
        ...

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Run one step over slots, and return [n, hidden].

        `batch.token_ids` [n] are the tokens *after* those of the slots. `hidden` [n, hidden] is
        features or the result of an earlier step. `batch.spec_info` may be `CarriedKeys`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the token after the next, [n, vocab_size] fp32."""
        ...

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """Return the target's ids for ids of the draft, with the same shape."""
        ...

"""What the engine needs of a draft model. `models/drafts/` satisfies it.

Slot t of a draft holds the target's features at token t, together with token t + 1, and predicts
token t + 2. Later steps of a round put the draft's own hidden state in the place of the target's.
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
        """Global ids of the target's layers whose outputs it reads."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens it can propose."""
        ...

    def attention_geometry(self, page_size: int) -> AttentionGeometry | LatentGeometry:
        """Which kind it is decides which kind of attention `forward` is given."""
        ...

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """By the draft's own layer ids, from 0."""
        ...

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """What slots read of the target. aux_hidden: [T, target hidden] by layer id; tokens: [n]
        int64 into T.

        Returns [n, hidden].
        """
        ...

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        """One step over slots. `batch.token_ids` [n] are the tokens *after* the slots', hidden [n,
        hidden] features or an earlier step's result; `batch.spec_info` may be `CarriedKeys`.
        Returns [n, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [n, vocab_size] fp32 of the token after the next."""
        ...

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """The target's ids of the draft's; same shape."""
        ...

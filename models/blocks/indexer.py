"""The DSA indexer (DeepSeek-V3.2), a small attention that scores the keys for each token.

    q = W_q ql;  k = LayerNorm(W_k x), one per token;  w = W_w x * heads^-0.5

Rope rotates the first dimensions of q and k. The backend computes the scores and the selection.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.blocks.config import RawConfig
from models.blocks.norm import LayerNorm
from models.blocks.rotary import RotaryTable
from models.blocks.weights import Weights

_NORM_EPS = 1e-6  # fixed in the published models


@dataclass(frozen=True)
class IndexerSpec:
    """An indexer. With `rotates_pairs` rope rotates pairs (2i, 2i + 1) instead of halves."""

    num_heads: int
    head_dim: int
    rotates_pairs: bool


def read_indexer(raw: RawConfig, *, rotates_pairs: bool) -> IndexerSpec:
    """Read `index_n_heads` and `index_head_dim`.

    Raises:
        ConfigError: a field is missing or invalid, or the heads are too small for their rope.
    """
    spec = IndexerSpec(
        num_heads=raw.integer("index_n_heads"),
        head_dim=raw.integer("index_head_dim"),
        rotates_pairs=rotates_pairs,
    )
    if spec.head_dim < raw.integer("qk_rope_head_dim"):
        raise raw.fail("index_head_dim", f"must be at least qk_rope_head_dim, is {spec.head_dim}")
    return spec


class Indexer:
    """An indexer with the key and the head weights in one product.

    Its weights keep all bits, because another selected key changes the output.
    """

    def __init__(
        self, *, spec: IndexerSpec, hidden_size: int, query_rank: int, weights: Weights
    ) -> None:
        self._spec = spec
        weights = weights.whole()
        self._query = weights.linear(
            "wq_b", rows=(spec.num_heads * spec.head_dim,), in_features=query_rank
        )
        self._key_and_weights = weights.linear(
            "wk", "weights_proj", rows=(spec.head_dim, spec.num_heads), in_features=hidden_size
        )
        self._key_norm = LayerNorm(
            weight=weights.tensor("k_norm.weight", spec.head_dim),
            bias=weights.tensor("k_norm.bias", spec.head_dim),
            eps=_NORM_EPS,
        )

    def forward(
        self, x: Tensor, query_latent: Tensor, rotary: RotaryTable
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, heads, dim], k [T, dim] and weights [T, heads] fp32.

        `x` is [T, hidden], `query_latent` [T, query_rank]. The results are the inputs of
        `LatentAttentionBackend.select`.
        """
        spec = self._spec
        rotate = rotary.rotate_pairs if spec.rotates_pairs else rotary.rotate_halves
        q = rotate(self._query(query_latent).view(-1, spec.num_heads, spec.head_dim))
        k, weights = torch.split(self._key_and_weights(x), [spec.head_dim, spec.num_heads], dim=-1)
        return (
            q,
            rotate(self._key_norm.forward(k)[:, None])[:, 0],
            weights.float() * spec.num_heads**-0.5,
        )

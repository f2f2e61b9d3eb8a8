"""Norms over all heads of q and over all heads of k, also where ranks divide the heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contracts.model import Ranks
from engine.core.layer_range import Part
from models.blocks.linear import gather_columns
from models.blocks.norm import RmsNorm


class WholeNorms:
    """A norm over the values of all heads of q, and one over those of k.

    Ranks exchange their heads, and each normalizes all of them. So the sums of squares have the
    bits of one process.
    """

    def __init__(
        self,
        query_norm: RmsNorm,
        key_norm: RmsNorm,
        ranks: Ranks | None,
        *,
        queries: Sequence[Part],
        keys: Sequence[Part],
    ) -> None:
        """Create the norms of all values of q and of k.

        queries[r] and keys[r] are the values that rank r has. Ranks may have the same keys.
        """
        self._norms = (query_norm, key_norm)
        self._ranks = ranks if len(queries) > 1 else None
        own = 0 if self._ranks is None else self._ranks.own.rank
        self._own = (queries[own], keys[own])
        self._counts = [len(query) + len(key) for query, key in zip(queries, keys, strict=True)]
        starts = [sum(self._counts[:rank]) for rank in range(len(queries))]
        self._columns = (
            _columns(queries, starts),
            _columns(
                keys, [start + len(query) for start, query in zip(starts, queries, strict=True)]
            ),
        )

    def forward(self, heads: Tensor) -> Tensor:
        """Return this rank's values normalized, [T, own q + own k], given in the same shape."""
        if self._ranks is None:
            parts = list(torch.split(heads, [len(part) for part in self._own], dim=-1))
        else:
            every = gather_columns(self._ranks, heads, self._counts)
            parts = [every[:, columns] for columns in self._columns]
        return torch.cat(
            [
                norm.forward(part)[:, own.start : own.stop]
                for norm, part, own in zip(self._norms, parts, self._own, strict=True)
            ],
            -1,
        )


def _columns(parts: Sequence[Part], starts: Sequence[int]) -> Tensor:
    """Return for each value its column, where part r begins at column starts[r]."""
    columns = torch.empty(parts[0].total, dtype=torch.int64)
    for part, start in zip(parts, starts, strict=True):
        columns[part.start : part.stop] = torch.arange(start, start + len(part))
    return columns

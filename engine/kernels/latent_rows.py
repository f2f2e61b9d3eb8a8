"""Kernel argument that describes the visible compressed keys of tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LatentRows:
    """All R rows and T tokens of a batch, with keys counted in storage order.

    Attributes:
        starts: [R + 1] int64, the rows' first tokens, and the end.
        contexts: [R] int64, the number of keys before the row's new ones.
        tables: [R, width] int32, the rows' pages.
        token_rows: [T] int64, the row of each token.
        num_common: [T] int64; the token sees the keys 0 .. num_common - 1.
        listed: [T, n] int32, further visible keys, ascending, padded with -1.
    """

    starts: Tensor
    contexts: Tensor
    tables: Tensor
    token_rows: Tensor
    num_common: Tensor
    listed: Tensor

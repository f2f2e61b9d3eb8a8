"""The argument by which kernels find what tokens see of compressed keys."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LatentRows:
    """All R rows and T tokens of a batch. Keys are counted in storage order.

    starts      [R + 1] int64, the rows' first tokens, and the end
    contexts    [R] int64, keys before the row's new ones
    tables      [R, width] int32, the rows' pages
    token_rows  [T] int64
    num_common  [T] int64, keys 0 .. num_common - 1 are seen by the token
    listed      [T, n] int32, further keys that it sees, ascending, then -1
    """

    starts: Tensor
    contexts: Tensor
    tables: Tensor
    token_rows: Tensor
    num_common: Tensor
    listed: Tensor

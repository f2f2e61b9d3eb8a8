"""The argument by which kernels read keys from the pages where they lie."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowsInPlace:
    """All R rows of a batch; a new token sees its row's keys up to its own.

    starts    [R + 1] int32, the rows' first tokens, and the end
    contexts  [R] int32, keys before the new ones
    tables    [R, width] int32, the rows' pages
    """

    starts: Tensor
    contexts: Tensor
    tables: Tensor

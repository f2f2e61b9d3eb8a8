"""How strictly a row's bits must be independent of what it travels with."""

from enum import StrEnum

import torch


class Numerics(StrEnum):
    """`exact`: a row's result has the same bits in any batch, chunking, padding and pipeline split.

    `fast` may choose another order of operations where that is quicker; results then agree to rounding only.
    """

    EXACT = "exact"
    FAST = "fast"


def min_matmul_rows(dtype: torch.dtype) -> int:
    """The smallest row count from which a matrix product on the CPU gives each row the same bits for every count.

    Measured with MKL and oneDNN on x86: 32-bit products of 1 to 3 rows take another path, bf16 products do not.
    The tests check it on the machine they run on.
    """
    return 1 if dtype is torch.bfloat16 else 4

"""How strictly a row's bits must be independent of what it travels with, and what keeps them so.

torch computes fp32 `silu`, `sigmoid`, `softplus` and `pow` (and bf16 `rsqrt`) with two codes: vectors for most of a
tensor and scalars for its tail, or for the tail of each thread's share. The two differ in the last bit, so a value
changes with the length of its tensor. `exp`, `log1p`, `tanh`, `sin`, `cos`, fp32 `rsqrt` and plain arithmetic do not
(measured, x86, 1 to 4 threads).
"""

from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor


class Numerics(StrEnum):
    """`exact`: a row's result has the same bits in any batch, chunking, padding and pipeline split.

    `fast` may choose another order of operations where that is quicker; results then agree to rounding only.
    """

    EXACT = "exact"
    FAST = "fast"


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """The row count to give a matrix product on the CPU so that no row's bits depend on the count.

    Measured with MKL and oneDNN on x86, 1 to 8 threads. fp32 products of fewer than 4 rows take another path, and with
    several threads so do those of fewer than 12 that are not a multiple of 4. A single bf16 row may be summed in
    parallel pieces. The tests check it on the machine they run on.
    """
    if dtype is torch.bfloat16:
        return 4 if num_rows == 1 else num_rows
    return num_rows if num_rows >= 12 else -(-num_rows // 4) * 4


def span_terms(dtype: torch.dtype) -> int:
    """The longest sum a matrix product on the CPU adds in order, so that zeros at its end change no bit.

    Measured with MKL and oneDNN on x86: fp32 products regroup sums of more than 192 terms, bf16 products of more than
    1024. The tests check it on the machine they run on.
    """
    return 1024 if dtype is torch.bfloat16 else 128


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in fp32, returned in x's dtype; composed of functions that have one code for all of a tensor."""
    if x.device.type != "cpu":
        return F.silu(x)  # one code for every element
    wide = x.float()
    return (wide / (-wide).exp_().add_(1.0)).to(x.dtype)

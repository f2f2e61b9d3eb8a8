"""The product of `host/product.py` in plain torch: for types that it has no kernel for, and as its description."""

import torch
from torch import Tensor

_SEGMENTS = 8
_MAX_PRODUCTS = 1 << 22  # elements of a step's intermediate


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K], both of the same type, bf16, fp16, fp32 or fp64. Returns [M, N] fp32, or fp64 for
    fp64.

    The order of sums is that of the kernel. For bf16 so are the bits, as long as nothing is subnormal: a product of two
    is exact in fp32, and so one multiplication and one addition are a fused multiply-add. In fp32 they are added in
    double precision and rounded, which differs in rare cases. In every type a row's bits depend on that row alone.
    """
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}.get(x.dtype, torch.float64)
    kept = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = max(1, _MAX_PRODUCTS // max(1, _SEGMENTS * len(weight)))
    parts = [_sums(part.to(wide), weight.to(wide), kept, 2 if x.dtype is torch.bfloat16 else 1)
             for part in x.split(rows)]
    return torch.cat(parts) if parts else x.new_empty(0, len(weight), dtype=kept)


def _sums(x: Tensor, weight: Tensor, kept: torch.dtype, step_terms: int) -> Tensor:
    """Eight sums over eighths of the steps, each term after the other (of a pair the second first), in a tree."""
    eighth = -(-x.shape[1] // (step_terms * _SEGMENTS)) * step_terms
    missing = eighth * _SEGMENTS - x.shape[1]
    cut_x, cut_w = (torch.nn.functional.pad(side, (0, missing)).view(len(side), _SEGMENTS, eighth)
                    for side in (x, weight))
    sums = torch.zeros(len(x), len(weight), _SEGMENTS, dtype=kept)
    for step in range(0, eighth, step_terms):
        for term in reversed(range(step, step + step_terms)):
            sums = (cut_x[:, None, :, term] * cut_w[None, :, :, term] + sums).to(kept)
    while sums.shape[2] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0]

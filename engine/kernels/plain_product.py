"""The product of `host/linear/packed_linear.py` in plain torch.

It serves dtypes without a kernel, and is the specification of the kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.layer_range import EIGHTHS, eighth

_TILE_TERMS = 32
_MAX_PRODUCTS = 1 << 22  # elements of the intermediate result of a step


def plain_product(
    x: Tensor,
    weight: Tensor,
    *,
    by_tiles: bool = False,
    num_segments: int = EIGHTHS,
    segment_terms: int | None = None,
) -> Tensor:
    """Multiply x [M, K] by weight [N, K] and return [M, N] fp32, or fp64 for fp64.

    Both have the same dtype: bf16, fp16, fp32 or fp64. If x and weight are a part of a longer sum,
    `num_segments` is the number of its eighths. These have `segment_terms` terms each, unless the
    other parts have the same length.

    The order of sums is that of the kernel, for bf16 `by_tiles` or by pairs. For bf16 the bits are
    also the same, provided that no number is subnormal: a product of two bf16 is exact in fp32, so
    a multiplication and an addition equal a fused multiply-add. For fp32 terms are added in double
    precision and rounded, which differs in rare cases. For every dtype a row's bits depend on that
    row alone.
    """
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}.get(x.dtype, torch.float64)
    kept = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = max(1, _MAX_PRODUCTS // max(1, num_segments * len(weight)))
    step_terms = 2 if x.dtype is torch.bfloat16 else 1
    own = eighth(x.shape[1] * EIGHTHS // num_segments) if segment_terms is None else segment_terms
    missing = (0, own * num_segments - x.shape[1])
    cut_weight = F.pad(weight.to(wide), missing).view(1, -1, num_segments, own)
    parts = []
    for part in x.split(rows):
        cut = F.pad(part.to(wide), missing).view(-1, 1, num_segments, own)
        sums = torch.zeros(len(part), len(weight), num_segments, dtype=kept)
        sums = (
            _in_tiles(cut, cut_weight, sums)
            if by_tiles
            else _in_steps(cut, cut_weight, sums, step_terms)
        )
        while sums.shape[2] > 1:
            sums = sums[..., ::2] + sums[..., 1::2]
        parts.append(sums[..., 0])
    return torch.cat(parts) if parts else x.new_empty(0, len(weight), dtype=kept)


def _in_steps(x: Tensor, weight: Tensor, sums: Tensor, step_terms: int) -> Tensor:
    """Add term by term, of each pair the second term first."""
    for step in range(0, x.shape[3], step_terms):
        for term in reversed(range(step, step + step_terms)):
            sums = (x[..., term] * weight[..., term] + sums).to(sums.dtype)
    return sums


def _in_tiles(x: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
    """Add tiles of 32 terms.

    In a tile the first terms of all pairs are summed in order, and so are the second terms. Both
    sums are added, and the result is added to `sums`.
    """
    for tile in range(0, x.shape[3], _TILE_TERMS):
        halves = [torch.zeros_like(sums), torch.zeros_like(sums)]
        for term in range(tile, min(tile + _TILE_TERMS, x.shape[3])):
            halves[term % 2] = halves[term % 2] + x[..., term] * weight[..., term]
        sums = sums + (halves[0] + halves[1])
    return sums

"""The product of `host/product.py` in plain torch: for types that it has no kernel for, and as its
description."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.layer_range import EIGHTHS, eighth

_TILE_TERMS = 32
_MAX_PRODUCTS = 1 << 22  # elements of a step's intermediate


def plain_product(
    x: Tensor,
    weight: Tensor,
    *,
    by_tiles: bool = False,
    num_segments: int = EIGHTHS,
    segment_terms: int | None = None,
) -> Tensor:
    """x [M, K] times weight [N, K], both of the same type, bf16, fp16, fp32 or fp64. Returns [M, N]
    fp32, or fp64 for fp64. `num_segments`: of the eighths of a longer sum, where x and weight are a
    part of it; these have `segment_terms` terms each, unless the other parts are as long.

    The order of sums is that of the kernel, for bf16 `by_tiles` or by pairs. For bf16 so are the
    bits, as long as nothing is subnormal: a product of two is exact in fp32, and so one
    multiplication and one addition are a fused multiply-add. In fp32 they are added in double
    precision and rounded, which differs in rare cases. In every type a row's bits depend on that
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
    """Each term after the other, of a pair the second first."""
    for step in range(0, x.shape[3], step_terms):
        for term in reversed(range(step, step + step_terms)):
            sums = (x[..., term] * weight[..., term] + sums).to(sums.dtype)
    return sums


def _in_tiles(x: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
    """Of 32 terms the first of each pair one after the other, likewise the second; both sums are
    added, then that."""
    for tile in range(0, x.shape[3], _TILE_TERMS):
        halves = [torch.zeros_like(sums), torch.zeros_like(sums)]
        for term in range(tile, min(tile + _TILE_TERMS, x.shape[3])):
            halves[term % 2] = halves[term % 2] + x[..., term] * weight[..., term]
        sums = sums + (halves[0] + halves[1])
    return sums

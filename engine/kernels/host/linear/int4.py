"""4-bit weights: groups of 32 codes with a scale and an offset.

A segment (`packing.Segments`) is divided into groups at multiples of 32 terms of the whole sum. Its
first and last group may be shorter. So the groups of a file are kept, but for those that two
segments share; and ranks with a part of the segments have the same groups as one process. A
weight is code * s + m, where the code is an integer from 0 to 15, and s and m are numbers of bf16
(`int4_weights.py`). x is coded when it is multiplied, each group as a segment in `int8.py`. The sum
of a segment adds its groups one after the other (`nibbles.py`).
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.core.numerics import WeightFormat
from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    compile_kernel,
    count_up,
    launch_integers,
    pointer_to,
    record,
)
from engine.kernels.host.codegen.nibbles import (
    GROUP_TERMS,
    ROW_GROUP_BYTES,
    ROW_HEAD_BYTES,
)
from engine.kernels.host.codegen.strided_loops import size_of
from engine.kernels.host.codegen.vectors import LANES
from engine.kernels.host.linear.int8 import code_terms
from engine.kernels.host.linear.packing import Segments

_ARGUMENTS = record(
    "num_terms",
    "num_segments",
    "own_terms",
    "num_groups",
    "first_term",
    "x",
    "x_row_bytes",
    "out",
)


def row_bytes(num_terms: int) -> int:
    """Return the bytes of a row of weights: whole groups of codes with scales and offsets."""
    segments = Segments(num_terms, torch.bfloat16, 1, weight_format=WeightFormat.INT4)
    return segments.block_bytes // LANES


@njit(**STRICT_PART)
def group_bounds(a, segment, group):
    """Return the first term of a group and its number of terms.

    `a` has the number of terms, those of a segment, and the place of the first in the whole sum.
    """
    own = segment * a.own_terms
    first = (a.first_term + own) // GROUP_TERMS + group
    start = max(own, first * GROUP_TERMS - a.first_term)
    end = min(own + a.own_terms, a.num_terms, (first + 1) * GROUP_TERMS - a.first_term)
    return min(start, a.num_terms), max(end - start, 0)


def grouped_rows(x: Tensor, segments: Segments, team: Team) -> Tensor:
    """Code the rows of x [M, K], bf16 or fp32, where K is the number of the segments' terms.

    The result is [M, groups * ROW_GROUP_BYTES] uint8.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(len(x), segments.count * segments.steps * ROW_GROUP_BYTES, dtype=torch.uint8)
    launch_integers(
        compiled_for(x.dtype),
        len(x),
        (
            segments.num_terms,
            segments.count,
            segments.own_terms,
            segments.steps,
            segments.first_term,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            out.data_ptr(),
        ),
        team,
    )
    return out


@cache
def compiled_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_rows(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"groups_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _take_rows(pointer, stored):
    """Run one thread: code one row at a time until no items are left."""
    a = carray(pointer, 1)[0]
    while True:
        row = count_up(pointer, NEXT)
        if row >= a.num_items:
            return
        out = a.out + row * a.num_segments * a.num_groups * ROW_GROUP_BYTES
        for segment in range(a.num_segments):
            for group in range(a.num_groups):
                start, count = group_bounds(a, segment, group)
                scale, total = code_terms(
                    pointer_to(a.x + row * a.x_row_bytes + start * size_of(stored), stored),
                    pointer_to(out + ROW_HEAD_BYTES, np.int8),
                    count,
                    GROUP_TERMS,
                    np.float32(0),
                )
                head = pointer_to(out, np.float32)
                head[0] = scale
                head[1] = scale * np.float32(total)
                out += ROW_GROUP_BYTES
        count_up(pointer, DONE)

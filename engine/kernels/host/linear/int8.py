"""8-bit products: rows of weights and of x are int8 codes with a scale for each segment.

x is converted when it is multiplied. A segment (`packing.Segments`; eighths, as ranks divide sums)
of a row has the scale s = highest / 127, where highest is its largest magnitude. A value's code is
value * (127 / highest) rounded to the nearest integer, ties to even. If highest is below 2^-100,
all codes are 0. NaN and infinite values make the scale NaN.

A row of weights that was loaded from codes of a byte or less, times one scale, keeps both. Then s
is that scale and a code is value / s rounded to the nearest integer. This is the loaded code, since
bf16 changes 128 s by at most a quarter of s.

A segment's part of an output is

    ((sum over k of x_code * w_code) * s_w) * s_x.

The sum is of integers, so exact, and two fp32 roundings follow. The bits are the same for every
instruction that multiplies bytes. Such instructions have one unsigned factor: weights are stored as
code + 128, and the offset, 128 times the sum of x's codes, is subtracted from the sum.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

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
    number_of,
    pointer_to,
    record,
    wide,
)
from engine.kernels.host.codegen.functions import fma
from engine.kernels.host.codegen.strided_loops import size_of
from engine.kernels.host.codegen.vectors import BLOCK_STEP_BYTES, LANES, in_all_lanes
from engine.kernels.host.linear.packing import SEGMENTS, Segments, pack
from engine.kernels.host.linear.weight_memory import Allocate

_HIGHEST_CODE = np.float32(127.0)
# The bits of 2^-100, and of infinity; the bits of NaN are above.
_LEAST_BITS = 27 << 23
NO_NUMBER_BITS = 255 << 23
_SIGN_BIT = 0x80  # flipping it in a code gives code + 128
MAGNITUDE = np.uint32(0x7FFFFFFF)
# see `functions.py`
_ROUNDER = np.float32(12582912.0)
_ROUNDER_BITS = np.int32(0x4B400000)
_ROWS_AT_ONCE = 256  # rows of a weight; bounds the memory besides the final form

_ARGUMENTS = record(
    "num_terms",
    "num_segments",
    "own_terms",
    "filled_terms",
    "x",
    "x_row_bytes",
    "row_scales",
    "codes",
    "scales",
    "offsets",
)


def row_bytes(num_terms: int) -> int:
    """Return the bytes of a row of weights: codes and scales, without padding."""
    return num_terms + 4 * SEGMENTS


class CodedRows(NamedTuple):
    """Coded rows of x.

    codes is [M, segments * filled terms per segment] int8; scales is [M, segments] fp32; offsets is
    [M, segments] int32.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor


class CodedBlocks(NamedTuple):
    """Coded weights.

    blocks has the layout of `packing.pack`, with code + 128; scales is [ceil(N/16), segments, 16]
    fp32.
    """

    blocks: Tensor
    scales: Tensor


def coded(x: Tensor, segments: Segments, team: Team, row_scales: Tensor | None = None) -> CodedRows:
    """Code the rows of x [M, K], bf16 or fp32, where K is the number of the segments' terms.

    row_scales is [M] fp32: the scales of rows that keep theirs, 0 for others.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows = len(x)
    filled = segments.steps * segments.step_terms
    rows = CodedRows(
        torch.empty(num_rows, segments.count * filled, dtype=torch.int8),
        torch.empty(num_rows, segments.count),
        torch.empty(num_rows, segments.count, dtype=torch.int32),
    )
    launch_integers(
        compiled_for(x.dtype),
        num_rows,
        (
            segments.num_terms,
            segments.count,
            segments.own_terms,
            filled,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            0 if row_scales is None else row_scales.data_ptr(),
            *(part.data_ptr() for part in rows),
        ),
        team,
    )
    return rows


def coded_blocks(
    weight: Tensor,
    segments: Segments,
    team: Team,
    row_scales: Tensor | None = None,
    allocate: Allocate = torch.empty,
) -> CodedBlocks:
    """Code and pack weight [N, K], bf16 or fp32, where K is the number of the segments' terms.

    row_scales is [N], as in `coded`.
    """
    num_blocks = -(-len(weight) // LANES)
    num_steps = segments.count * segments.steps
    packed = CodedBlocks(
        allocate((1, num_blocks, num_steps, LANES), dtype=torch.float32),
        allocate((num_blocks, segments.count, LANES), dtype=torch.float32),
    )
    # Four codes are moved as one 32-bit number.
    words = Segments(num_steps, torch.float32, 1, segments.count, segment_terms=segments.steps)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        codes, scales, _ = coded(
            weight[rows], segments, team, None if row_scales is None else row_scales[rows]
        )
        codes.view(torch.uint8).bitwise_xor_(_SIGN_BIT)
        blocks = slice(first // LANES, -(-(first + len(codes)) // LANES))
        pack(codes.view(torch.float32)[None], words, team, out=packed.blocks[:, blocks])
        by_lane = F.pad(scales, (0, 0, 0, -len(scales) % LANES)).view(-1, LANES, segments.count)
        packed.scales[blocks] = by_lane.transpose(1, 2)
    return packed


@cache
def compiled_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_rows(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"eight_bits_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _take_rows(pointer, stored):
    """Run one thread: code one row at a time until no items are left."""
    a = carray(pointer, 1)[0]
    while True:
        row = count_up(pointer, NEXT)
        if row >= a.num_items:
            return
        scales = carray(pointer_to(a.scales, np.float32), (a.num_items, a.num_segments))
        offsets = carray(pointer_to(a.offsets, np.int32), (a.num_items, a.num_segments))
        x = a.x + row * a.x_row_bytes
        codes = a.codes + row * a.num_segments * a.filled_terms
        kept = np.float32(0)
        if a.row_scales != 0:
            kept = carray(pointer_to(a.row_scales, np.float32), a.num_items)[row]
        for segment in range(a.num_segments):
            start = min(segment * a.own_terms, a.num_terms)
            count = min(a.own_terms, a.num_terms - start)
            scale, total = code_terms(
                pointer_to(x + start * size_of(stored), stored),
                pointer_to(codes + segment * a.filled_terms, np.int8),
                count,
                a.filled_terms,
                kept,
            )
            scales[row, segment] = scale
            offsets[row, segment] = total * 128
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def code_terms(x, codes, count, filled, kept):
    """Code `count` terms with one scale, followed by zeros up to `filled` codes.

    Return the scale and the sum of the codes. `kept` is the scale to use, or 0.
    """
    highest = np.uint32(0)
    for place in range(count):
        bits = np.float32(wide(x[place])).view(np.uint32)
        highest = max(highest, np.uint32(bits & MAGNITUDE))
    scale, factor = _scale_and_factor(highest, kept)
    total = np.int32(0)
    for place in range(count):
        nearest = fma(wide(x[place]), factor, _ROUNDER)
        code = np.int32(np.float32(nearest).view(np.int32) - _ROUNDER_BITS)
        total = np.int32(total + code)
        codes[place] = code
    for place in range(count, filled):
        codes[place] = 0
    return scale, total


@njit(**STRICT_PART)
def _scale_and_factor(highest, kept):
    """Return the scale and the factor of a segment.

    They follow from the bits of its largest magnitude and the scale that its row keeps, or 0.
    """
    if highest >= NO_NUMBER_BITS:
        return np.float32(np.nan), np.float32(0)
    if highest < _LEAST_BITS:
        return np.float32(0), np.float32(0)
    if kept > 0:
        return kept, np.float32(1) / kept
    return number_of(highest) / _HIGHEST_CODE, _HIGHEST_CODE / number_of(highest)


def restore(terms, a, first_row, rows, segment, scales, num_blocks, sums):
    """Convert a segment's sums of `rows` rows and `num_blocks` blocks to fp32 if terms are bytes.

    It is part of a product's kernel. `scales` is the address of the first block's scales.
    """
    raise NotImplementedError("for compiled code only")


@overload(restore, jit_options=STRICT, inline="always")
def _restore(terms, a, first_row, rows, segment, scales, num_blocks, sums):
    def of_bytes(terms, a, first_row, rows, segment, scales, num_blocks, sums):
        x_scales = carray(pointer_to(a.x_scales, np.float32), (first_row + rows, a.num_segments))
        x_offsets = carray(pointer_to(a.x_offsets, np.int32), (first_row + rows, a.num_segments))
        for row in range(rows):
            for block in range(num_blocks):
                _restore_block(
                    sums + (row * a.group_blocks + block) * BLOCK_STEP_BYTES,
                    x_offsets[first_row + row, segment],
                    x_scales[first_row + row, segment],
                    scales + (block * a.num_segments + segment) * BLOCK_STEP_BYTES,
                )

    def of_others(terms, a, first_row, rows, segment, scales, num_blocks, sums):
        pass

    return of_bytes if terms.dtype == types.int8 else of_others


@intrinsic
def _restore_block(typing, sums, offset, scale, scales):
    """Convert 16 columns of one row in place."""

    def generate(context, b, signature, arguments):
        sums, offset, scale, scales = arguments
        at = b.inttoptr(sums, ir.VectorType(ir.IntType(32), LANES).as_pointer())
        whole = b.sub(b.load(at, align=4), in_all_lanes(b, offset))
        floats = ir.VectorType(ir.FloatType(), LANES)
        parts = b.fmul(
            b.sitofp(whole, floats), b.load(b.inttoptr(scales, floats.as_pointer()), align=4)
        )
        parts = b.fmul(parts, in_all_lanes(b, scale))
        b.store(parts, b.inttoptr(sums, floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32, types.float32, types.int64), generate

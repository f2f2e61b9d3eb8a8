"""The compiled part of a product with packed weights.

`packed_linear.py` defines the result and the order of sums.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit

from engine.core.numerics import WeightFormat
from engine.kernels.host.codegen import (
    amx,
)
from engine.kernels.host.codegen.amx import LAYOUT_BYTES, has_tiles
from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    compile_kernel,
    count_up,
    pointer_to,
    record,
    rounded,
    take_seat,
    wide,
)
from engine.kernels.host.codegen.functions import silu
from engine.kernels.host.codegen.row_vectors import open_row
from engine.kernels.host.codegen.strided_loops import fetch_for_writing, floats, size_of
from engine.kernels.host.codegen.tiles import make_tiles, release_tiles, row_step_bytes
from engine.kernels.host.codegen.vectors import (
    BLOCK_STEP_BYTES,
    LANES,
    WORD_BYTES,
    has_pair_products,
    has_wide_vectors,
)
from engine.kernels.host.linear.product_sums import multiply_group

# Fields of a matrix with its own rows: its address, the second matrix's address, the first row, the
# number of rows, and both matrices' scales.
SHARE_FIELDS = 6
_CODES = {WeightFormat.INT8: np.int8, WeightFormat.INT4: np.uint8}

_ARGUMENTS = record(
    "tile_rows",
    "tile_blocks",
    "unit_rows",
    "chunk_rows",
    "copy_row_bytes",
    "share_chunks",
    "group_blocks",
    "num_groups",
    "num_threads",
    "num_rows",
    "out_stride",
    "num_columns",
    "num_blocks",
    "num_matrices",
    "num_segments",
    "segment_steps",
    "x",
    "x_row_bytes",
    "x_matrix_bytes",
    "shares",
    "w",
    "w_up",
    "w_block_bytes",
    "bias",
    "bias_up",
    "residual",
    "residual_stride",
    "out",
    "out_itemsize",
    "scales",
    "scales_up",
    "x_scales",
    "x_offsets",
)


def instructions() -> str:
    """Return the kind of instruction that computes bf16 products."""
    if has_tiles():
        return "tiles"
    return "pairs" if has_pair_products() else "widened"


def streams(dtype: torch.dtype) -> bool:
    """Return whether products of a few rows use one block at a time.

    They do not if values of x must be widened.
    """
    return has_wide_vectors() and (dtype is torch.float32 or has_pair_products())


def terms_of(dtype: torch.dtype, weight_format: WeightFormat) -> type:
    """Return the type by which kernels distinguish weights of this dtype and format."""
    return _CODES.get(weight_format, STORED_AS[dtype])


@cache
def compiled_for(dtype: torch.dtype, *, weight_format: WeightFormat = WeightFormat.MODEL):
    """Compile the kernel for weights and x of this dtype, or both coded for `weight_format`.

    Results have this dtype or fp32.
    """
    stored = STORED_AS[dtype]
    terms = terms_of(dtype, weight_format)

    def work(pointer):
        _take_items(pointer, stored, terms)

    name = f"product_{instructions()}_{stored.__name__}_{terms.__name__}"
    return compile_kernel(work, _ARGUMENTS, name, numbers=STRICT)


@njit(**STRICT_PART)
def _take_items(pointer, stored, terms):
    """Run one thread: multiply some rows by some blocks at a time until no items are left."""
    a = carray(pointer, 1)[0]
    layout = take_seat(pointer)
    shaped_rows = 0
    copied = -1
    carray(pointer_to(layout, np.uint8), LAYOUT_BYTES)[:] = 0
    sums_at = layout + LAYOUT_BYTES
    all_groups = a.num_groups * a.num_matrices
    num_panels = 2 if a.w_up else 1
    copy_at = (
        sums_at
        + (a.tile_rows + (2 + num_panels) * a.chunk_rows) * a.group_blocks * BLOCK_STEP_BYTES
    )
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            release_tiles(terms)
            return
        share = item // all_groups
        group = item % all_groups
        matrix = group // a.num_groups
        block = group % a.num_groups * a.group_blocks
        weights = a.w
        ups = a.w_up
        start = 0
        num_rows = a.num_rows
        column = matrix * a.num_columns
        x_at = a.x
        scales = a.scales
        scales_up = a.scales_up
        if a.shares:
            own = carray(pointer_to(a.shares + matrix * SHARE_FIELDS * 8, np.int64), SHARE_FIELDS)
            weights = own[0]
            ups = own[1]
            start = own[2]
            num_rows = own[3]
            column = 0
            scales = own[4]
            scales_up = own[5]
        else:
            weights += matrix * a.num_blocks * a.w_block_bytes
            ups += matrix * a.num_blocks * a.w_block_bytes
            x_at += matrix * a.x_matrix_bytes
        num_blocks = min(a.group_blocks, a.num_blocks - block)
        num_columns = min(num_blocks * LANES, a.num_columns - block * LANES)
        column += block * LANES
        first_row = share * a.share_chunks * a.chunk_rows
        end_row = min(first_row + a.share_chunks * a.chunk_rows, num_rows)
        x_row = a.x_row_bytes
        x_at += (start + first_row) * x_row
        if a.copy_row_bytes:
            if copied != share * a.num_matrices + matrix:
                copied = share * a.num_matrices + matrix
                _copy_rows(
                    x_at,
                    x_row,
                    copy_at,
                    a.copy_row_bytes,
                    end_row - first_row,
                    a.num_segments * a.segment_steps * row_step_bytes(terms) // WORD_BYTES,
                )
            x_at = copy_at
            x_row = a.copy_row_bytes
        for row in range(first_row, end_row, a.chunk_rows):
            rows = min(a.chunk_rows, end_row - row)
            first = start + row
            tile_rows = rows if a.unit_rows == 1 else amx.MAX_ROWS
            if tile_rows != shaped_rows:
                make_tiles(terms, tile_rows, layout)
                shaped_rows = tile_rows
            out = a.out + (first * a.out_stride + column) * a.out_itemsize
            following = a.num_threads * a.group_blocks if row + a.chunk_rows >= end_row else 0
            for panel in range(num_panels):
                w = (ups if panel else weights) + block * a.w_block_bytes
                of_columns = (
                    scales_up if panel else scales
                ) + block * a.num_segments * BLOCK_STEP_BYTES
                multiply_group(
                    a,
                    x_at + (row - first_row) * x_row,
                    x_row,
                    first,
                    rows,
                    w,
                    of_columns,
                    num_blocks,
                    following,
                    sums_at,
                    panel,
                    terms,
                )
                if panel == 0:
                    _claim(out, rows, a.out_stride * a.out_itemsize, num_columns * a.out_itemsize)
            _finish(a, sums_at, first, rows, column, num_columns, out, stored)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _copy_rows(x, x_row, copy, copy_row, num_rows, num_words):
    """Copy rows to another distance.

    Rows that are a power of two apart would share few sets of the nearest cache.
    """
    for row in range(num_rows):
        words = pointer_to(x + row * x_row, np.uint32)
        copies = pointer_to(copy + row * copy_row, np.uint32)
        for word in range(num_words):
            copies[word] = words[word]


@njit(**STRICT_PART)
def _claim(out, rows, row_bytes, width):
    """Prefetch the lines of the result while products are computed.

    Otherwise a store would wait for its line, and the loads after it would wait as well.
    """
    for row in range(rows):
        for offset in range(0, width, BLOCK_STEP_BYTES):
            fetch_for_writing(out + row * row_bytes + offset)


@njit(**STRICT_PART)
def _finish(a, sums_at, first_row, rows, column, num_columns, out_at, stored):
    """Apply the operations after the sums; through pointers, so that LLVM vectorizes the loops."""
    sum_row = a.group_blocks * BLOCK_STEP_BYTES
    totals_at = sums_at + (a.tile_rows + 2 * a.chunk_rows) * sum_row
    for r in range(rows):
        totals = floats(totals_at + r * sum_row)
        if a.bias:
            _add(totals, floats(a.bias + 4 * column), num_columns)
        if a.w_up:
            ups = floats(totals_at + (a.chunk_rows + r) * sum_row)
            if a.bias_up:
                _add(ups, floats(a.bias_up + 4 * column), num_columns)
            if size_of(stored) == 2:  # the result is rounded to bf16
                open_row(
                    totals_at + r * sum_row, totals_at + (a.chunk_rows + r) * sum_row, num_columns
                )
            else:
                for n in range(num_columns):
                    totals[n] = silu(totals[n]) * ups[n]
        if a.residual:
            at = (first_row + r) * a.residual_stride + column
            _add(totals, pointer_to(a.residual + at * size_of(stored), stored), num_columns)
        row_at = out_at + r * a.out_stride * a.out_itemsize
        if a.out_itemsize == 4:
            _write(totals, pointer_to(row_at, np.float32), num_columns, np.float32)
        else:
            _write(totals, pointer_to(row_at, stored), num_columns, stored)


@njit(**STRICT_PART)
def _add(totals, others, count):
    for n in range(count):
        totals[n] += wide(others[n])


@njit(**STRICT_PART)
def _write(totals, out, count, stored_out):
    for n in range(count):
        out[n] = rounded(totals[n], stored_out)

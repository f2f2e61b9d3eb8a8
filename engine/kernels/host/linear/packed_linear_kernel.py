"""The compiled part of a product with packed weights.

`packed_linear.py` defines the result and the order of sums.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit

from engine.kernels.host.codegen import (
    amx,
    dot,
    functions,
    row_vectors,
    softmax_blocks,
    strided_loops,
    sum_tree,
    tiles,
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
from engine.kernels.host.codegen.dot import (
    BLOCK_STEP_BYTES,
    LANES,
    has_pair_products,
    has_wide_vectors,
)
from engine.kernels.host.codegen.functions import silu
from engine.kernels.host.codegen.row_vectors import open_row
from engine.kernels.host.codegen.strided_loops import fetch_for_writing, floats, size_of
from engine.kernels.host.codegen.sum_tree import earlier_sums, join
from engine.kernels.host.codegen.tiles import (
    joins_sums,
    make_tiles,
    release_tiles,
    rows_times_blocks,
)
from engine.kernels.host.linear import int8
from engine.kernels.host.linear.int8 import restore

# Fields of a matrix with its own rows: its address, the second matrix's address, the first row, the
# number of rows, and both matrices' scales.
SHARE_FIELDS = 6
TILE_ROWS, _TILE_BLOCKS = (6, 4) if has_wide_vectors() else (4, 1)  # all sums in registers
# A few rows use one block after the other, so that the weights are one memory stream, which is
# faster than four.
STREAM_ROWS = 16 if has_wide_vectors() else TILE_ROWS
_STEP_BYTES = 4  # bytes of a row of x
_STREAM_AHEAD_BYTES = 8192  # minimum, rounded up to whole segments

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


@cache
def compiled_for(dtype: torch.dtype, *, in_bytes: bool = False):
    """Compile the kernel for weights and x of this dtype, or both `in_bytes`.

    Results have this dtype or fp32.
    """
    stored = STORED_AS[dtype]
    terms = np.int8 if in_bytes else stored

    def work(pointer):
        _take_items(pointer, stored, terms)

    name = f"product_{instructions()}_{stored.__name__}_{terms.__name__}"
    parts = (
        __file__,
        dot.__file__,
        amx.__file__,
        tiles.__file__,
        sum_tree.__file__,
        strided_loops.__file__,
        functions.__file__,
        int8.__file__,
        row_vectors.__file__,
        softmax_blocks.__file__,
    )
    return compile_kernel(work, _ARGUMENTS, name, *parts, numbers=STRICT)


_wide, _narrow = rows_times_blocks(TILE_ROWS, _TILE_BLOCKS), rows_times_blocks(STREAM_ROWS, 1)


@njit(**STRICT_PART)
def _take_items(pointer, stored, terms):
    """Run one thread: multiply some rows by some blocks at a time until no items are left."""
    a = carray(pointer, 1)[0]
    layout, shaped_rows, copied = take_seat(pointer), 0, -1
    carray(pointer_to(layout, np.uint8), LAYOUT_BYTES)[:] = 0
    sums_at, all_groups, num_panels = (
        layout + LAYOUT_BYTES,
        a.num_groups * a.num_matrices,
        2 if a.w_up else 1,
    )
    copy_at = (
        sums_at
        + (a.tile_rows + (2 + num_panels) * a.chunk_rows) * a.group_blocks * BLOCK_STEP_BYTES
    )
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            release_tiles(terms)
            return
        share, group = item // all_groups, item % all_groups
        matrix, block = group // a.num_groups, group % a.num_groups * a.group_blocks
        weights, ups, start, num_rows, column, x_at = (
            a.w,
            a.w_up,
            0,
            a.num_rows,
            matrix * a.num_columns,
            a.x,
        )
        scales, scales_up = a.scales, a.scales_up
        if a.shares:
            own = carray(pointer_to(a.shares + matrix * SHARE_FIELDS * 8, np.int64), SHARE_FIELDS)
            weights, ups, start, num_rows, column = own[0], own[1], own[2], own[3], 0
            scales, scales_up = own[4], own[5]
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
                    a.num_segments * a.segment_steps,
                )
            x_at, x_row = copy_at, a.copy_row_bytes
        for row in range(first_row, end_row, a.chunk_rows):
            rows, first = min(a.chunk_rows, end_row - row), start + row
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
                _multiply_group(
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
def _multiply_group(
    a, x, x_row, first_row, rows, w, scales, num_blocks, following, sums_at, panel, terms
):
    """Multiply `rows` rows from x on by `num_blocks` blocks.

    `following` is the distance in blocks from the first of these to the blocks that this thread
    probably multiplies next.
    """
    for block in range(0, num_blocks, a.tile_blocks):
        end = min(block + a.tile_blocks, num_blocks)
        skipped = (end if end < num_blocks else following) - block - 1
        _multiply(
            a,
            x,
            x_row,
            first_row,
            rows,
            w + block * a.w_block_bytes,
            skipped * a.w_block_bytes,
            scales + block * a.num_segments * BLOCK_STEP_BYTES,
            end - block,
            sums_at + block * BLOCK_STEP_BYTES,
            panel,
            terms,
        )


@njit(**STRICT_PART)
def _multiply(
    a, x, x_row, first_row, rows, w, skipped_bytes, scales, num_blocks, sums_at, panel, terms
):
    """Multiply rows by blocks that one tile covers.

    A segment of the weights serves all rows, while each tile of rows prefetches its part of a later
    segment. So memory is equally busy in the first and in the last tile. `skipped_bytes` is the
    distance from the end of the first block to the data multiplied next.
    """
    sum_row, segment_bytes = a.group_blocks * BLOCK_STEP_BYTES, a.segment_steps * BLOCK_STEP_BYTES
    own, third = sums_at, sums_at + a.tile_rows * sum_row
    second = third + a.chunk_rows * sum_row
    total = second + (1 + panel) * a.chunk_rows * sum_row
    num_tiles, units = (
        (rows + a.tile_rows - 1) // a.tile_rows,
        (rows + a.unit_rows - 1) // a.unit_rows,
    )
    later = (
        1
        if a.tile_blocks > 1
        else (_STREAM_AHEAD_BYTES + segment_bytes - 1) // max(segment_bytes, 1)
    )
    for segment in range(a.num_segments):
        num_earlier, place = earlier_sums(segment)
        joined = num_earlier == 0 or joins_sums(terms)
        ahead = later * segment_bytes + (skipped_bytes if segment + later >= a.num_segments else 0)
        first = segment * a.segment_steps
        for tile in range(num_tiles):
            start, end = (
                units * tile // num_tiles * a.unit_rows,
                units * (tile + 1) // num_tiles * a.unit_rows,
            )
            at = start * sum_row
            out = (third if place == 2 else (second if place else total)) + at
            following = (third if place else second) + at
            sum_tree = out if joined else own
            _multiply_tile(
                a,
                end - start,
                x + start * x_row + first * _STEP_BYTES,
                x_row,
                w + first * BLOCK_STEP_BYTES,
                num_blocks,
                sum_tree,
                ahead + segment_bytes * tile // num_tiles if a.unit_rows == 1 else 0,
                BLOCK_STEP_BYTES // num_tiles,
                num_earlier,
                following,
                third + at,
                terms,
            )
            restore(
                terms,
                a,
                first_row + start,
                min(end, rows) - start,
                segment,
                scales,
                num_blocks,
                sum_tree,
            )
            if not joined:
                _join(a, end - start, num_blocks, num_earlier, out, following, third + at, sum_tree)


@njit(**STRICT_PART)
def _join(a, rows, num_blocks, num_earlier, out, second, third, sum_tree):
    """Run `sum_tree.join`, for all rows at once if the rows' sums are contiguous."""
    if num_blocks == a.group_blocks:
        join(num_earlier, out, second, third, sum_tree, rows * num_blocks)
    else:
        for row in range(rows):
            at = row * a.group_blocks * BLOCK_STEP_BYTES
            join(num_earlier, out + at, second + at, third + at, sum_tree + at, num_blocks)


@njit(**STRICT_PART)
def _multiply_tile(
    a, rows, x, x_row, w, num_blocks, y, ahead, ahead_step, num_earlier, second, third, terms
):
    """Compute one segment's sums of a tile of rows, and add the earlier sums if tiles do that."""
    block, y_row = 0, a.group_blocks * BLOCK_STEP_BYTES
    while block + _TILE_BLOCKS <= num_blocks:
        at = block * BLOCK_STEP_BYTES
        _wide(
            terms,
            rows,
            x,
            x_row,
            w + block * a.w_block_bytes,
            a.w_block_bytes,
            y + at,
            y_row,
            a.segment_steps,
            ahead,
            ahead_step,
            num_earlier,
            second + at,
            third + at,
        )
        block += _TILE_BLOCKS
    while block < num_blocks:
        at = block * BLOCK_STEP_BYTES
        _narrow(
            terms,
            rows,
            x,
            x_row,
            w + block * a.w_block_bytes,
            a.w_block_bytes,
            y + at,
            y_row,
            a.segment_steps,
            ahead,
            ahead_step,
            num_earlier,
            second + at,
            third + at,
        )
        block += 1


@njit(**STRICT_PART)
def _copy_rows(x, x_row, copy, copy_row, num_rows, num_words):
    """Copy rows to another distance.

    Rows that are a power of two apart would share few sets of the nearest cache.
    """
    for row in range(num_rows):
        words, copies = (
            pointer_to(x + row * x_row, np.uint32),
            pointer_to(copy + row * copy_row, np.uint32),
        )
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

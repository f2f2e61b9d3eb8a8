"""The sums of a product with packed weights: rows times blocks of columns, segment by segment."""

from numba import njit

from engine.kernels.host.codegen.compiled import STRICT_PART
from engine.kernels.host.codegen.sum_tree import earlier_sums, join
from engine.kernels.host.codegen.tiles import (
    joins_sums,
    row_step_bytes,
    rows_times_blocks,
    weight_step_bytes,
)
from engine.kernels.host.codegen.vectors import BLOCK_STEP_BYTES, has_wide_vectors
from engine.kernels.host.linear.int8 import restore

TILE_ROWS, _TILE_BLOCKS = (6, 4) if has_wide_vectors() else (4, 1)  # all sums in registers
# A few rows use one block after the other, so that the weights are one memory stream, which is
# faster than four.
STREAM_ROWS = 16 if has_wide_vectors() else TILE_ROWS
_STREAM_AHEAD_BYTES = 8192  # minimum, rounded up to whole segments
_wide = rows_times_blocks(TILE_ROWS, _TILE_BLOCKS)
_narrow = rows_times_blocks(STREAM_ROWS, 1)


@njit(**STRICT_PART)
def multiply_group(
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
    sum_row = a.group_blocks * BLOCK_STEP_BYTES
    segment_bytes = a.segment_steps * weight_step_bytes(terms)
    own = sums_at
    third = sums_at + a.tile_rows * sum_row
    second = third + a.chunk_rows * sum_row
    total = second + (1 + panel) * a.chunk_rows * sum_row
    num_tiles = (rows + a.tile_rows - 1) // a.tile_rows
    units = (rows + a.unit_rows - 1) // a.unit_rows
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
            start = units * tile // num_tiles * a.unit_rows
            end = units * (tile + 1) // num_tiles * a.unit_rows
            at = start * sum_row
            out = (third if place == 2 else (second if place else total)) + at
            following = (third if place else second) + at
            sum_tree = out if joined else own
            _multiply_tile(
                a,
                end - start,
                x + start * x_row + first * row_step_bytes(terms),
                x_row,
                w + first * weight_step_bytes(terms),
                num_blocks,
                sum_tree,
                ahead + segment_bytes * tile // num_tiles if a.unit_rows == 1 else 0,
                weight_step_bytes(terms) // num_tiles,
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
    block = 0
    y_row = a.group_blocks * BLOCK_STEP_BYTES
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

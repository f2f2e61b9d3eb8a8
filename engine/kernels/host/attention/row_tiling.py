"""Products of any number of rows and blocks, and steps of the online softmax.

They combine the products of `dot.py` or of the matrix unit (`amx.py`). A product is f(x,
x_row_bytes, w, w_block_bytes, y, y_row_bytes, words, rows, blocks) for compiled code: y [rows, 16 *
blocks] fp32 = x [rows, words of 32 bits] times the packed blocks at w. With `adds` the sums start
from the content of y.
"""

from numba import njit

from engine.kernels.host.codegen.amx import STEPS, TILE_ROWS, lay_out_tiles, take_tiles, tile_block
from engine.kernels.host.codegen.compiled import STRICT_PART
from engine.kernels.host.codegen.dot import dot_block
from engine.kernels.host.codegen.softmax_blocks import (
    BLOCK_KEYS,
    SCORE_ROW,
    STATE_BYTES,
    soften_for,
)
from engine.kernels.host.codegen.vectors import BLOCK_STEP_BYTES

_WIDTH = 4  # blocks whose sums stay in registers


def tiled_product(*, adds):
    """Return a product by the matrix unit, for at most `amx.MAX_ROWS` rows.

    Call `shape_tiles` for these rows first. Rows of x and columns of w are padded with zeros to
    multiples of 16 words.
    """
    two_pair, two_one = (tile_block(2, count, adds=adds) for count in (2, 1))
    one_pair, one_one = (tile_block(1, count, adds=adds) for count in (2, 1))

    @njit(**STRICT_PART)
    def multiply(x, x_row, w, w_block, y, y_row, words, rows, blocks):
        steps = -(-words // STEPS) * STEPS
        for block in range(0, blocks, 2):
            weights = w + block * w_block
            sums = y + block * BLOCK_STEP_BYTES
            if rows > TILE_ROWS:
                if block + 1 < blocks:
                    two_pair(x, x_row, weights, w_block, sums, y_row, steps, 0)
                else:
                    two_one(x, x_row, weights, w_block, sums, y_row, steps, 0)
            elif block + 1 < blocks:
                one_pair(x, x_row, weights, w_block, sums, y_row, steps, 0)
            else:
                one_one(x, x_row, weights, w_block, sums, y_row, steps, 0)

    return multiply


@njit(**STRICT_PART)
def shape_tiles(layout, rows):
    """Configure tiles for products of this number of rows.

    If these rows leave the second tiles unused, they are configured as whole tiles.
    """
    if lay_out_tiles(
        layout, min(rows, TILE_ROWS), rows - TILE_ROWS if rows > TILE_ROWS else TILE_ROWS
    ):
        take_tiles(layout)


@njit(**STRICT_PART)
def no_tiles(layout, rows):
    pass


def plain_product(form, *, adds):
    """Return a product that adds one term or pair after the other."""
    wide, narrow = (
        _of_any_rows(
            *(dot_block(rows, count, form, adds=adds, ahead_bytes=0) for rows in (6, 4, 2, 1))
        )
        for count in (_WIDTH, 1)
    )

    @njit(**STRICT_PART)
    def multiply(x, x_row, w, w_block, y, y_row, steps, rows, blocks):
        block = 0
        while block + _WIDTH <= blocks:
            wide(
                x,
                x_row,
                w + block * w_block,
                w_block,
                y + block * BLOCK_STEP_BYTES,
                y_row,
                steps,
                rows,
            )
            block += _WIDTH
        while block < blocks:
            narrow(
                x,
                x_row,
                w + block * w_block,
                w_block,
                y + block * BLOCK_STEP_BYTES,
                y_row,
                steps,
                rows,
            )
            block += 1

    return multiply


def _of_any_rows(six, four, two, one):
    @njit(**STRICT_PART)
    def multiply(x, x_row, w, w_block, y, y_row, steps, rows):
        row = 0
        while row + 6 <= rows:
            six(x + row * x_row, x_row, w, w_block, y + row * y_row, y_row, steps)
            row += 6
        if row + 4 <= rows:
            four(x + row * x_row, x_row, w, w_block, y + row * y_row, y_row, steps)
            row += 4
        if row + 2 <= rows:
            two(x + row * x_row, x_row, w, w_block, y + row * y_row, y_row, steps)
            row += 2
        if row < rows:
            one(x + row * x_row, x_row, w, w_block, y + row * y_row, y_row, steps)

    return multiply


def softening(*, rounds):
    """Return `softmax_blocks.soften_for` for any number of rows.

    The result is f(scores, weights, states, num_seen, unit, sums, sum_row, sum_vectors, rows).
    """
    four = soften_for(4, rounds=rounds)
    one = soften_for(1, rounds=rounds)
    weight_row = BLOCK_KEYS * (2 if rounds else 4)

    @njit(**STRICT_PART)
    def soften(scores, weights, states, num_seen, unit, sums, sum_row, sum_vectors, rows):
        row = 0
        seen_row = 8 if num_seen else 0
        while row + 4 <= rows:
            four(
                scores + row * SCORE_ROW,
                weights + row * weight_row,
                states + row * STATE_BYTES,
                num_seen + row * seen_row,
                unit,
                sums + row * sum_row,
                sum_row,
                sum_vectors,
            )
            row += 4
        while row < rows:
            one(
                scores + row * SCORE_ROW,
                weights + row * weight_row,
                states + row * STATE_BYTES,
                num_seen + row * seen_row,
                unit,
                sums + row * sum_row,
                sum_row,
                sum_vectors,
            )
            row += 1

    return soften

"""Products of any number of rows and blocks, put together from those of `dot.py` or of the matrix unit (`amx.py`).

Each is f(x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, words, rows, blocks) for compiled code: y [rows, 16 *
blocks] fp32 = x [rows, words of 32 bits] times the packed blocks at w; with `adds` the sums start from what y holds.
"""

import numpy as np
from numba import carray, njit

from engine.kernels.host.amx import TILE_ROWS, TILE_STEP_BYTES, load_tile_shapes, release_tiles, tile_block
from engine.kernels.host.compiled import STRICT_PART, pointer_to
from engine.kernels.host.dot import BLOCK_STEP_BYTES, dot_block

_WIDTH = 4  # blocks whose sums stay in registers


def tiled_product(*, adds):
    """By the matrix unit, after `shape_tiles` for as many rows. Words are multiples of 16, padded with zeros."""
    whole_pair, whole_one = (tile_block(count, whole=True, adds=adds) for count in (2, 1))
    rest_pair, rest_one = (tile_block(count, whole=False, adds=adds) for count in (2, 1))

    @njit(**STRICT_PART)
    def multiply(x, x_row, w, w_block, y, y_row, words, rows, blocks):
        steps = -(-words * 4 // TILE_STEP_BYTES)
        for block in range(0, blocks, 2):
            weights, sums = w + block * w_block, y + block * BLOCK_STEP_BYTES
            for row in range(0, rows // TILE_ROWS * TILE_ROWS, TILE_ROWS):
                if block + 1 < blocks:
                    whole_pair(x + row * x_row, x_row, weights, w_block, sums + row * y_row, y_row, steps)
                else:
                    whole_one(x + row * x_row, x_row, weights, w_block, sums + row * y_row, y_row, steps)
            row = rows // TILE_ROWS * TILE_ROWS
            if row < rows:
                if block + 1 < blocks:
                    rest_pair(x + row * x_row, x_row, weights, w_block, sums + row * y_row, y_row, steps)
                else:
                    rest_one(x + row * x_row, x_row, weights, w_block, sums + row * y_row, y_row, steps)

    return multiply


@njit(**STRICT_PART)
def shape_tiles(shapes, rows):
    """All tiles have 16 rows of 64 bytes, but those for what is left over of so many rows."""
    rest = rows % TILE_ROWS
    if not rest:
        rest = TILE_ROWS
    if carray(pointer_to(shapes, np.uint8), 64)[52] == rest:
        return
    bytes_ = carray(pointer_to(shapes, np.uint8), 64)
    bytes_[0] = 1
    for tile in range(8):
        bytes_[16 + 2 * tile] = TILE_STEP_BYTES
        bytes_[48 + tile] = rest if 4 <= tile < 7 else TILE_ROWS
    load_tile_shapes(shapes)


@njit(**STRICT_PART)
def end_tiles():
    release_tiles()


@njit(**STRICT_PART)
def no_tiles(shapes, rows):
    pass


@njit(**STRICT_PART)
def end_no_tiles():
    pass


def plain_product(form, *, adds):
    """One term or pair after the other."""
    wide, narrow = (_of_any_rows(*(dot_block(rows, count, form, adds=adds, ahead_bytes=0) for rows in (6, 4, 2, 1)))
                    for count in (_WIDTH, 1))

    @njit(**STRICT_PART)
    def multiply(x, x_row, w, w_block, y, y_row, steps, rows, blocks):
        block = 0
        while block + _WIDTH <= blocks:
            wide(x, x_row, w + block * w_block, w_block, y + block * BLOCK_STEP_BYTES, y_row, steps, rows)
            block += _WIDTH
        while block < blocks:
            narrow(x, x_row, w + block * w_block, w_block, y + block * BLOCK_STEP_BYTES, y_row, steps, rows)
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

"""Products of bf16 and of bytes by the CPU's matrix tiles (AMX: Sapphire Rapids and later).

A tile is 16 rows of 64 bytes. Rows of x that are a power of two apart share few sets of the nearest
cache, and each is read again for every few columns. So many rows are placed an odd number of lines
apart (`row_ops.rows_apart`).
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.host.codegen import nibbles
from engine.kernels.host.codegen.amx import (
    TILE_ROWS,
    TileLoop,
    has_byte_tiles,
    has_tiles,
    lay_out_tiles,
    tile_call,
)
from engine.kernels.host.codegen.compiled import STRICT_PART
from engine.kernels.host.codegen.dot import Form, write_rows
from engine.kernels.host.codegen.vectors import BLOCK_STEP_BYTES, WORD_BYTES

_I8 = ir.IntType(8)
_I64 = ir.IntType(64)
_POINTER = _I8.as_pointer()
# For bytes, whose sums are the same either way: tiles start and end slowly, and a segment of bytes
# is short.
_FEW_ROWS = 8
_FORMS = {
    types.uint16: Form.BF16,
    types.float32: Form.FP32,
    types.int8: Form.BYTES,
    types.uint8: Form.NIBBLES,
}


@cache
def rows_times_blocks(max_rows: int, blocks: int):
    """Return a product of rows and blocks for compiled code.

    It is f(stored, rows, x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, steps, ahead,
    ahead_step, num_earlier, second, third): `dot.write_rows`, or its equivalent by tiles for bf16
    and bytes if the CPU has them (`is_tiled`). With tiles `rows` are those of the last
    `make_tiles`, `blocks` is 1, 2 or 4, and `steps` is a multiple of STEPS. No earlier sums are
    added, and nothing is prefetched if `ahead` is 0.
    """

    @intrinsic
    def multiply(
        typing,
        stored,
        rows,
        x,
        x_row_bytes,
        w,
        w_block_bytes,
        y,
        y_row_bytes,
        steps,
        ahead,
        ahead_step,
        num_earlier,
        second,
        third,
    ):
        def generate(context, builder, signature, arguments):
            form = _FORMS[stored.dtype]
            by_rows = arguments[1:]
            if not _is_tiled(stored):
                write_rows(builder, by_rows, max_rows, blocks, form)
            elif form is Form.BF16:
                _write_tiles(builder, blocks, "tdpbf16ps", *arguments[1:10])
            else:
                few = builder.icmp_signed("<=", arguments[1], _I64(_FEW_ROWS))
                with builder.if_else(few) as (then, otherwise):
                    with then:
                        whole = min(max_rows, _FEW_ROWS)
                        write_rows(builder, by_rows, whole, blocks, form)
                        if whole < _FEW_ROWS:
                            _write_halves(
                                builder, by_rows, range(whole + 1, _FEW_ROWS + 1), blocks, form
                            )
                    with otherwise:
                        _write_tiles(builder, blocks, "tdpbsud", *arguments[1:10])
            return context.get_dummy_value()

        return types.void(stored, *[types.int64] * 13), generate

    return multiply


@intrinsic
def joins_sums(typing, stored):
    """Return whether `rows_times_blocks` adds the earlier sums."""

    def generate(context, builder, signature, arguments):
        return ir.Constant(
            ir.IntType(1), not _is_tiled(stored) and _FORMS[stored.dtype] is not Form.BYTES
        )

    return types.boolean(stored), generate


@intrinsic
def weight_step_bytes(typing, stored):
    """Return the bytes of a block that one step reads."""
    return _constant_of(stored, nibbles.GROUP_BYTES, BLOCK_STEP_BYTES)


@intrinsic
def row_step_bytes(typing, stored):
    """Return the bytes of a row of x that one step reads."""
    return _constant_of(stored, nibbles.ROW_GROUP_BYTES, WORD_BYTES)


def _constant_of(stored, of_nibbles: int, of_words: int):
    """Return the intrinsic of a number that depends on the form."""

    def generate(context, builder, signature, arguments):
        return _I64(of_nibbles if _FORMS[stored.dtype] is Form.NIBBLES else of_words)

    return types.int64(stored), generate


@njit(**STRICT_PART)
def make_tiles(stored, rows, layout):
    """Configure tiles for this number of rows, 1 to MAX_ROWS.

    layout is the address of LAYOUT_BYTES, as in `amx.lay_out_tiles`.
    """
    lay_out_tiles(layout, min(rows, TILE_ROWS), rows - TILE_ROWS if rows > TILE_ROWS else rows)
    _take_layout(stored, layout)


@intrinsic
def _take_layout(typing, stored, layout):
    def generate(context, builder, signature, arguments):
        if _is_tiled(stored):
            tile_call(builder, "ldtilecfg", builder.inttoptr(arguments[1], _POINTER))
        return context.get_dummy_value()

    return types.void(stored, types.int64), generate


@intrinsic
def release_tiles(typing, stored):
    """Release the tiles of this thread.

    A thread without tiles is cheaper to switch, and its core may run faster.
    """

    def generate(context, builder, signature, arguments):
        if _is_tiled(stored):
            tile_call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(stored), generate


def is_tiled(stored: type) -> bool:
    """Return whether tiles multiply weights of this storage type (`compiled.STORED_AS`)."""
    return (stored is np.uint16 and has_tiles()) or (stored is np.int8 and has_byte_tiles())


def _is_tiled(stored) -> bool:
    return is_tiled(getattr(np, stored.dtype.name))


def _write_halves(b, arguments, rows, blocks, form) -> None:
    """Write `dot.write_rows` for row counts whose sums of half of the blocks fill the registers."""
    count, x, x_row, w, w_block, y, y_row, steps, *others = arguments
    for first in range(0, blocks, 2):
        at_w = b.add(w, b.mul(w_block, _I64(first)))
        at_y = b.add(y, _I64(first * BLOCK_STEP_BYTES))
        write_rows(
            b,
            [count, x, x_row, at_w, w_block, at_y, y_row, steps, *others],
            rows[-1],
            min(2, blocks),
            form,
            first_rows=rows[0],
        )


def _write_tiles(b, blocks, product, rows, x, x_row, w, w_block, y, y_row, steps, ahead) -> None:
    """Write one tile of rows times all blocks at once, or two tiles times two blocks.

    With few rows in total the weights come from memory, so those `ahead` bytes after the current
    ones are prefetched.
    """
    one, two, few, many, end = (
        b.append_basic_block(name) for name in ("one", "two", "few", "many", "end")
    )
    b.cbranch(b.icmp_signed("<=", rows, _I64(TILE_ROWS)), one, two)
    for start, row_tiles, width in ((one, 1, blocks), (few, 2, 2), (many, 2, 2)):
        b.position_at_end(start)
        for first in range(0, blocks, width):
            at_w = b.add(w, b.mul(w_block, _I64(first)))
            at_y = b.add(y, _I64(first * BLOCK_STEP_BYTES))
            count = min(width, blocks)
            later = b.add(at_w, ahead)
            fetches = [
                (b.add(later, b.mul(w_block, _I64(block))), TILE_ROWS) for block in range(count)
            ]
            TileLoop(b, x, x_row, at_w, w_block, at_y, y_row, steps).write(
                row_tiles,
                count,
                product=product,
                fetches=() if start is many else fetches,
                # The sums of two tiles of rows fill the nearest cache.
                locality=3 if row_tiles == 1 else 2,
            )
        b.branch(end)
    b.position_at_end(two)
    b.cbranch(b.icmp_signed("==", ahead, _I64(0)), many, few)
    b.position_at_end(end)

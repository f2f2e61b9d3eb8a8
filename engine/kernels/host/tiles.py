"""Products of bf16 by the CPU's matrix tiles (AMX: Sapphire Rapids and later).

An instruction multiplies up to 16 rows of 32 terms with a block's 16 steps. Of these 32 terms it adds the first ones of
all pairs one after the other, and so the second ones, each by fused multiply-add; then both sums; then that to what it
had (Intel's manual, TDPBF16PS; subnormal numbers count as 0). Nothing but its row and column enters an element,
whatever the number of rows.

A tile is 16 rows of 64 bytes. Rows of x that lie a power of two apart share few sets of the nearest cache, and each is
read again for every few columns; so x of many rows is laid out in tiles once (`in_tiles`).
"""

from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.host.amx import has_tiles
from engine.kernels.host.compiled import (
    DONE,
    NEXT,
    STRICT,
    STRICT_PART,
    Team,
    compile_kernel,
    count_up,
    launch_integers,
    pointer_to,
    record,
)
from engine.kernels.host.dot import BLOCK_STEP_BYTES, Form, write_rows

STEPS = 16  # of a block that one instruction takes
MAX_ROWS = 32  # two tiles
LAYOUT_BYTES = 64  # of what configures them
TILE_ROWS, TILE_BYTES, STEP_BYTES = 16, 1024, 64

_SUMS, _ROWS_OF_X, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_AHEAD_BYTES = 4096
_POINTER = _I8.as_pointer()
_ROWS = record("num_rows", "num_tiles", "x", "x_row_bytes", "out")
_TERMS, _WORDS = 32, 8  # of a tile's row: bf16, 64 bits


@cache
def rows_times_blocks(max_rows: int, blocks: int):
    """f(stored, rows, x, x_row_bytes, x_tile_bytes, x_step_bytes, w, w_block_bytes, y, y_row_bytes, steps):
    `dot.write_rows`, or the same by tiles for bf16 where `has_tiles`. There `rows` are those that tiles were made for
    last, `blocks` are 1, 2 or 4, and `steps` is a multiple of STEPS; only tiles know of x that 16 rows may lie apart
    from the next 16, and steps from each other, by any number of bytes."""

    @intrinsic
    def multiply(typing, stored, rows, x, x_row_bytes, x_tile_bytes, x_step_bytes, w, w_block_bytes, y, y_row_bytes,
                 steps):
        def generate(context, builder, signature, arguments):
            if _is_tiled(stored):
                _write_tiles(builder, blocks, *arguments[1:])
            else:
                form = Form.BF16 if stored.dtype == types.uint16 else Form.FP32
                write_rows(builder, [*arguments[1:4], *arguments[6:]], max_rows, blocks, form)
            return context.get_dummy_value()

        return types.void(stored, *[types.int64] * 10), generate

    return multiply


def in_tiles(x: Tensor, team: Team) -> Tensor:
    """x [M, K] bf16, terms side by side, K a multiple of 32. Returns [ceil(M / 16), K / 32, 16, 32], zeros beyond M."""
    num_rows, num_terms = x.shape
    out = torch.empty(-(-num_rows // TILE_ROWS), num_terms // _TERMS, TILE_ROWS, _TERMS, dtype=x.dtype)
    launch_integers(_in_tiles(), len(out), (num_rows, out.shape[1], x.data_ptr(), x.stride(0) * x.itemsize,
                                            out.data_ptr()), team)
    return out


@cache
def _in_tiles():
    def work(pointer):
        _take_rows(pointer)

    return compile_kernel(work, _ROWS, "in_tiles", __file__, numbers=STRICT)


@njit(**STRICT_PART)
def _take_rows(pointer):
    """One thread's part: 16 rows at a time, until none are left."""
    a = carray(pointer, 1)[0]
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        out = carray(pointer_to(a.out + item * a.num_tiles * TILE_BYTES, np.uint64), (a.num_tiles, TILE_ROWS, _WORDS))
        for place in range(TILE_ROWS):
            row = item * TILE_ROWS + place
            if row < a.num_rows:
                x = carray(pointer_to(a.x + row * a.x_row_bytes, np.uint64), (a.num_tiles, _WORDS))
                for tile in range(a.num_tiles):
                    for word in range(_WORDS):
                        out[tile, place, word] = x[tile, word]
            else:
                for tile in range(a.num_tiles):
                    for word in range(_WORDS):
                        out[tile, place, word] = 0
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def make_tiles(stored, rows, layout):
    """Tiles for that many rows, 1 to MAX_ROWS. layout: the address of LAYOUT_BYTES zeros."""
    bytes_ = carray(pointer_to(layout, np.uint8), LAYOUT_BYTES)
    bytes_[0] = 1
    for tile in range(8):
        bytes_[16 + 2 * tile] = 64
        second = tile == 5 or (rows > TILE_ROWS and (tile == 2 or tile == 3))
        count = rows - TILE_ROWS if second else min(rows, TILE_ROWS)
        bytes_[48 + tile] = max(1, count) if tile < 6 else TILE_ROWS
    _take_layout(stored, layout)


@intrinsic
def _take_layout(typing, stored, layout):
    def generate(context, builder, signature, arguments):
        if _is_tiled(stored):
            _call(builder, "ldtilecfg", builder.inttoptr(arguments[1], _POINTER))
        return context.get_dummy_value()

    return types.void(stored, types.int64), generate


@intrinsic
def release_tiles(typing, stored):
    """A thread that holds no tiles is cheaper to switch, and its core may run faster."""

    def generate(context, builder, signature, arguments):
        if _is_tiled(stored):
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(stored), generate


def is_tiled(stored: type) -> bool:
    """Whether weights stored like that (`compiled.STORED_AS`) are multiplied by tiles."""
    return stored is np.uint16 and has_tiles()


def _is_tiled(stored) -> bool:
    return stored.dtype == types.uint16 and has_tiles()


def _write_tiles(b, blocks, rows, x, x_row, x_tile, x_step, w, w_block, y, y_row, steps) -> None:
    """One tile of rows times all blocks at once, or two times two blocks."""
    one, two, end = (b.append_basic_block(name) for name in ("one", "two", "end"))
    b.cbranch(b.icmp_signed("<=", rows, _I64(TILE_ROWS)), one, two)
    b.position_at_end(one)
    _Tiles(b, x, x_row, x_tile, x_step, w, w_block, y, y_row, steps).write(1, blocks)
    b.branch(end)
    b.position_at_end(two)
    for first in range(0, blocks, 2):
        at_w, at_y = b.add(w, b.mul(w_block, _I64(first))), b.add(y, _I64(first * BLOCK_STEP_BYTES))
        written = _Tiles(b, x, x_row, x_tile, x_step, at_w, w_block, at_y, y_row, steps)
        written.write(2, min(2, blocks), fetches=first + 2 == blocks > 2)
    b.branch(end)
    b.position_at_end(end)


class _Tiles:
    """Writes the loop over k of some tiles' sums."""

    def __init__(self, builder, x, x_row, x_tile, x_step, w, w_block, y, y_row, steps) -> None:
        self._b, self._x, self._x_row, self._x_tile, self._x_step = builder, x, x_row, x_tile, x_step
        self._w, self._w_block, self._y, self._y_row, self._steps = w, w_block, y, y_row, steps

    def write(self, row_tiles: int, blocks: int, *, fetches: bool = False) -> None:
        """`fetches`: x was read before, so there is time to fetch what comes behind it."""
        b = self._b
        places = [(m, n, _SUMS[2 * m + n]) for m in range(row_tiles) for n in range(blocks)]
        for _m, _n, tile in places:
            _call(b, "tilezero", _I8(tile))
        entry, loop, done = b.block, b.append_basic_block("k"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", self._steps, _I64(0)), loop, done)
        b.position_at_end(loop)
        k = b.phi(_I64)
        k.add_incoming(_I64(0), entry)
        for m in range(row_tiles):
            terms = b.add(self._x, b.mul(k, self._x_step))
            terms = b.add(terms, b.mul(self._x_tile, _I64(m)))
            self._load(_ROWS_OF_X[m], terms, self._x_row)
            if fetches:
                self._fetch(b.add(terms, b.mul(self._steps, self._x_step)), self._x_row)
        for n in range(blocks):
            tile = _WEIGHTS[n % 2]
            weights = b.add(b.add(self._w, b.mul(k, _I64(BLOCK_STEP_BYTES))), b.mul(self._w_block, _I64(n)))
            if row_tiles == 1:
                self._fetch(b.add(weights, _I64(_AHEAD_BYTES)), _I64(BLOCK_STEP_BYTES))
            self._load(tile, weights, _I64(BLOCK_STEP_BYTES))
            for m in range(row_tiles):
                _call(b, "tdpbf16ps", _I8(_SUMS[2 * m + n]), _I8(_ROWS_OF_X[m]), _I8(tile))
        after = b.add(k, _I64(STEPS))
        k.add_incoming(after, loop)
        b.cbranch(b.icmp_signed("<", after, self._steps), loop, done)
        b.position_at_end(done)
        for m, n, tile in places:
            at = b.add(b.add(self._y, b.mul(self._y_row, _I64(TILE_ROWS * m))), _I64(n * BLOCK_STEP_BYTES))
            _call(b, "tilestored64", _I8(tile), b.inttoptr(at, _POINTER), self._y_row)

    def _fetch(self, address, stride) -> None:
        """A tile's lines into the cache."""
        for line in range(TILE_ROWS):
            at = self._b.inttoptr(self._b.add(address, self._b.mul(stride, _I64(line))), _POINTER)
            kind = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
            fetch = cgutils.get_or_insert_function(self._b.module, kind, "llvm.prefetch.p0")
            self._b.call(fetch, [at, _I32(0), _I32(3), _I32(1)])

    def _load(self, tile: int, address, stride) -> None:
        _call(self._b, "tileloadd64", _I8(tile), self._b.inttoptr(address, _POINTER), stride)


def _call(b, name: str, *arguments) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), arguments)

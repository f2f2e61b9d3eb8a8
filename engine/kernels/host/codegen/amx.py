"""bf16 products by the matrix unit of Intel CPUs (AMX).

An instruction processes 16 rows, 16 columns and 32 terms.

Operands have the layout of `dot.py`. Of 32 terms an instruction adds the first ones of all pairs in
order by fused multiply-add, and likewise the second ones. It adds the two sums, and then the result
to the previous sum (Intel's manual, TDPBF16PS; subnormal numbers count as 0). An element depends
only on its row and column, whatever the number of rows, and a product with exchanged factors has
the same bits. They differ from those of `dot.py`; a process uses one of the two for all products.

A thread configures its tiles before its first product and releases them afterwards, so that other
users of the unit (oneDNN) find the state that they expect.
"""

import ctypes
import platform
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.host.codegen.compiled import STRICT_PART, pointer_to
from engine.kernels.host.codegen.strided_loops import LINE_BYTES, write_fetch
from engine.kernels.host.codegen.vectors import BLOCK_STEP_BYTES, cpu_features

TILE_ROWS = 16
TILE_BYTES = 1024
STEPS = 16  # steps of a block that one instruction processes: 32 terms
MAX_ROWS = 32  # rows of one call: two tiles
LAYOUT_BYTES = 64  # bytes of a tile configuration

_SUMS = (0, 1, 2, 3)
_ROWS_OF_X = (4, 5)
_WEIGHTS = (6, 7)
_STEP_BYTES = 4  # bytes of a row of x per step, with its terms contiguous
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_TILE_DATA = 18

_I8 = ir.IntType(8)
_I64 = ir.IntType(64)
_POINTER = _I8.as_pointer()


@cache
def has_tiles() -> bool:
    """Return whether the CPU has the unit and the kernel permits this process to use it."""
    if platform.system() != "Linux" or not {"+amx-tile", "+amx-bf16"} <= cpu_features():
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0)


def has_byte_tiles() -> bool:
    """Return whether the unit is available for products of bytes, with 64 terms per instruction."""
    return "+amx-int8" in cpu_features() and has_tiles()


@njit(**STRICT_PART)
def lay_out_tiles(layout, first, second):
    """Write a tile configuration.

    The tiles 0, 1 (sums) and 4 (x) have `first` rows, the tiles 2, 3 and 5 `second`. layout is the
    address of LAYOUT_BYTES zeros, or of an earlier configuration of this function. Return whether
    the configuration changed.
    """
    bytes_ = carray(pointer_to(layout, np.uint8), LAYOUT_BYTES)
    if bytes_[48] == first and bytes_[50] == second:
        return False
    bytes_[0] = 1
    for tile in range(8):
        bytes_[16 + 2 * tile] = 64
        bytes_[48 + tile] = TILE_ROWS
    for place in range(2):
        bytes_[48 + place] = first
        bytes_[50 + place] = second
    bytes_[52] = first
    bytes_[53] = second
    return True


@intrinsic
def take_tiles(typing, layout):
    """Load this thread's tile configuration; all tiles become 0."""

    def generate(context, builder, signature, arguments):
        tile_call(builder, "ldtilecfg", builder.inttoptr(arguments[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(typing):
    """Release the unit in this thread.

    A thread without tiles is cheaper to switch, and its core may run faster.
    """

    def generate(context, builder, signature, arguments):
        tile_call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@cache
def tile_block(
    row_tiles: int, blocks: int, *, adds: bool = False, second: bool = False, fetched: int = 0
):
    """Return a product for compiled code.

    It is f(x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, steps, ahead), all int64: y [rows, 16
    * blocks] fp32 = x [rows, 2 * steps] times the bf16 blocks at w. With `adds` sums start from the
    content of y. `steps` is a multiple of STEPS. The rows are those of the first tiles of the
    configuration and, with two row tiles, of the second tiles. With `second`, for one row tile and
    block, they are those of the second tile alone. Every STEPS steps prefetch the next `fetched`
    lines from `ahead` on.
    """

    @intrinsic
    def multiply(typing, x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, steps, ahead):
        def generate(context, b, signature, arguments):
            x, x_row, w, w_block, y, y_row, steps, ahead = arguments
            loop = TileLoop(b, x, x_row, w, w_block, y, y_row, steps)
            loop.write(
                row_tiles, blocks, adds=adds, first=1 if second else 0, fetches=((ahead, fetched),)
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return multiply


class TileLoop:
    """A generator of the loop over k for the sums of some tiles.

    No operand is held after its last product. When a core's other thread is active, hardly more
    registers than the eight tiles seem to be available, and loads wait for one. Zeroing a tile
    frees its register.
    """

    def __init__(self, builder, x, x_row, w, w_block, y, y_row, steps) -> None:
        self._b = builder
        self._x = x
        self._x_row = x_row
        self._w = w
        self._w_block = w_block
        self._y = y
        self._y_row = y_row
        self._steps = steps

    def write(
        self,
        row_tiles: int,
        blocks: int,
        *,
        first: int = 0,
        adds: bool = False,
        product: str = "tdpbf16ps",
        fetches: Sequence[tuple[ir.Value, int]] = (),
        locality: int = 2,
    ) -> None:
        """Write the loop.

        `first` selects the first of the two x tiles. `product` is the instruction. `fetches` are
        addresses with a number of lines: every step prefetches the next lines into the cache of
        that `locality` (`strided_loops.write_fetch`).
        """
        b = self._b
        places = [
            (m, n, _SUMS[2 * (first + m) + n]) for m in range(row_tiles) for n in range(blocks)
        ]
        for m, n, tile in places:
            if adds:
                self._load(tile, self._sums_at(m, n), self._y_row)
            else:
                tile_call(b, "tilezero", _I8(tile))
        entry = b.block
        loop = b.append_basic_block("k")
        done = b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", self._steps, _I64(0)), loop, done)
        b.position_at_end(loop)
        k = b.phi(_I64)
        k.add_incoming(_I64(0), entry)
        fetch = self._spread(k, fetches, locality, row_tiles + blocks + row_tiles * blocks)
        for m in range(row_tiles):
            terms = b.add(self._x, b.mul(k, _I64(_STEP_BYTES)))
            terms = b.add(terms, b.mul(self._x_row, _I64(TILE_ROWS * m)))
            self._load(_ROWS_OF_X[first + m], terms, self._x_row)
            next(fetch)
            for n in range(blocks) if m == 0 else reversed(range(blocks)):
                if m == 0:
                    weights = b.add(
                        b.add(self._w, b.mul(k, _I64(BLOCK_STEP_BYTES))),
                        b.mul(self._w_block, _I64(n)),
                    )
                    self._load(_WEIGHTS[n % 2], weights, _I64(BLOCK_STEP_BYTES))
                    next(fetch)
                tile_call(
                    b,
                    product,
                    _I8(_SUMS[2 * (first + m) + n]),
                    _I8(_ROWS_OF_X[first + m]),
                    _I8(_WEIGHTS[n % 2]),
                )
                next(fetch)
                if m == row_tiles - 1:
                    tile_call(b, "tilezero", _I8(_WEIGHTS[n % 2]))
            tile_call(b, "tilezero", _I8(_ROWS_OF_X[first + m]))
        after = b.add(k, _I64(STEPS))
        k.add_incoming(after, loop)
        b.cbranch(b.icmp_signed("<", after, self._steps), loop, done)
        b.position_at_end(done)
        for m, n, tile in places:
            tile_call(
                b, "tilestored64", _I8(tile), b.inttoptr(self._sums_at(m, n), _POINTER), self._y_row
            )

    def _sums_at(self, m: int, n: int):
        b = self._b
        return b.add(
            b.add(self._y, b.mul(self._y_row, _I64(TILE_ROWS * m))), _I64(n * BLOCK_STEP_BYTES)
        )

    def _spread(
        self, k, fetches: Sequence[tuple[ir.Value, int]], locality: int, num_parts: int
    ) -> Iterator[None]:
        """Write the prefetches of step `k` in `num_parts` parts.

        All lines at once would delay the following loads.
        """
        b = self._b
        lines = [(address, line, count) for address, count in fetches for line in range(count)]
        for part in range(num_parts):
            for address, line, count in lines[
                len(lines) * part // num_parts : len(lines) * (part + 1) // num_parts
            ]:
                at = b.add(b.mul(k, _I64(count * LINE_BYTES // STEPS)), _I64(line * LINE_BYTES))
                write_fetch(b, b.add(address, at), locality=locality)
            yield

    def _load(self, tile: int, address, stride) -> None:
        tile_call(self._b, "tileloadd64", _I8(tile), self._b.inttoptr(address, _POINTER), stride)


def tile_call(b, name: str, *arguments) -> None:
    """Write an instruction of the unit."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), arguments)

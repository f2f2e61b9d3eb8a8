"""Products of bf16 by the matrix unit of Intel's CPUs (AMX): 16 rows, 16 columns and 32 terms an
instruction.

Operands lie as for `dot.py`. Of 32 terms an instruction adds the first ones of all pairs one after
the other, and so the second ones, each by fused multiply-add; then both sums; then that to what it
had (Intel's manual, TDPBF16PS; subnormal numbers count as 0). Nothing but its row and column enters
an element, whatever the number of rows, and a product with its factors changed places has the same
bits. They are not those of `dot.py`, and a process takes one or the other for all.

A thread configures its tiles before its first product and releases them when it is done, so that
others who use the unit (oneDNN) find it as they expect it.
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
from engine.kernels.host.codegen.dot import BLOCK_STEP_BYTES, cpu_features
from engine.kernels.host.codegen.strided_loops import LINE_BYTES, write_fetch

TILE_ROWS, TILE_BYTES = 16, 1024
STEPS = 16  # of a block that one instruction takes: 32 terms
MAX_ROWS = 32  # of one call: two tiles
LAYOUT_BYTES = 64  # of what configures them

_SUMS, _ROWS_OF_X, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)
_STEP_BYTES = 4  # of a row of x, where its terms lie side by side
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_POINTER = _I8.as_pointer()


@cache
def has_tiles() -> bool:
    """Whether the CPU has the unit and the kernel lets this process use it."""
    if platform.system() != "Linux" or not {"+amx-tile", "+amx-bf16"} <= cpu_features():
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0)


def has_byte_tiles() -> bool:
    """Likewise for products of bytes, of which an instruction takes 64 terms."""
    return "+amx-int8" in cpu_features() and has_tiles()


@njit(**STRICT_PART)
def lay_out_tiles(layout, first, second):
    """Write a configuration: `first` rows in tiles 0, 1 (sums) and 4 (x), `second` in 2, 3 and 5.
    layout: the address of LAYOUT_BYTES zeros, or what this wrote there before. Returns whether it
    is another one than that."""
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
    """Make that this thread's configuration; all tiles become 0."""

    def generate(context, builder, signature, arguments):
        tile_call(builder, "ldtilecfg", builder.inttoptr(arguments[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(typing):
    """This thread is done with the unit: it is cheaper to switch, and its core may run faster."""

    def generate(context, builder, signature, arguments):
        tile_call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@cache
def tile_block(
    row_tiles: int, blocks: int, *, adds: bool = False, second: bool = False, fetched: int = 0
):
    """A function for compiled code: f(x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, steps,
    ahead), all int64.

    y [rows, 16 * blocks] fp32 = x [rows, 2 * steps] times the blocks at w, bf16; with `adds` sums
    start from what y holds. `steps` is a multiple of STEPS. The rows are those of the first tiles
    of the configuration and, where there are two row tiles, of the second; with `second`, for one
    row tile and block, those of the second alone. Every STEPS steps fetch so many lines from
    `ahead` on into the cache, each time the next ones.
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
    """Writes the loop over k of some tiles' sums.

    No operand is held beyond its last product: where a core's other thread is at work there seem to
    be hardly more registers than the eight tiles, and loads wait for one. A tile that is made zero
    gives its own back.
    """

    def __init__(self, builder, x, x_row, w, w_block, y, y_row, steps) -> None:
        self._b, self._x, self._x_row = builder, x, x_row
        self._w, self._w_block, self._y, self._y_row, self._steps = w, w_block, y, y_row, steps

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
        """`first`: of the two tiles for x the one to begin with. `product`: the instruction that
        adds up. `fetches`: addresses, from which every step fetches so many lines, each time the
        next ones, into the cache of that `locality` (`strided.write_fetch`)."""
        b = self._b
        places = [
            (m, n, _SUMS[2 * (first + m) + n]) for m in range(row_tiles) for n in range(blocks)
        ]
        for m, n, tile in places:
            if adds:
                self._load(tile, self._sums_at(m, n), self._y_row)
            else:
                tile_call(b, "tilezero", _I8(tile))
        entry, loop, done = b.block, b.append_basic_block("k"), b.append_basic_block("done")
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
        """Writes what step `k` fetches in so many parts: all lines at once would hold up the loads
        behind them."""
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
    """An instruction of the unit."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), arguments)

"""Products of bf16 by the matrix unit of Intel's CPUs (AMX): 16 rows, 16 columns and 32 terms an instruction.

Operands lie as for `dot.py`. Every output element is one fp32 sum over its own row and column: of each 32 terms those
at even and those at odd places are added up in order, each apart, then both to the sum so far. So its bits are the same
for any number of rows and columns; they are not those of `dot.py`, and a process takes one or the other for all.

A thread configures its tiles before its first product and releases them when it is done, so that others who use the
unit (oneDNN) find it as they expect it.
"""

import ctypes
import platform
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.host.dot import cpu_features

TILE_ROWS = 16
TILE_STEP_BYTES = 64  # of a row of x: 32 terms
_TILE_BYTES = 1024
_COLUMN_BLOCKS = 2  # sums kept at a time
# Tiles 0..2 hold sums and x of 16 rows, 4..6 those of the rows that are left over; 3 and 7 hold w.
_WHOLE, _REST, _WEIGHTS = 0, 4, (3, 7)
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18

_I8, _I64 = ir.IntType(8), ir.IntType(64)


@cache
def has_tiles() -> bool:
    """Whether the CPU has the unit and the kernel lets this process use it."""
    if platform.system() != "Linux" or not {"+amx-tile", "+amx-bf16"} <= cpu_features():
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0)


@intrinsic
def load_tile_shapes(typing, address):
    """Make the 64 bytes at the address this thread's configuration; all tiles become 0."""

    def generate(context, builder, signature, arguments):
        _call(builder, "ldtilecfg", _pointer(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(typing):
    """This thread is done with the unit."""

    def generate(context, builder, signature, arguments):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@cache
def tile_block(blocks: int, *, whole: bool, adds: bool):
    """A function for compiled code: f(x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, steps), all int64.

    y [rows, 16 * blocks] fp32 = x [rows, 32 * steps] times the blocks at w, bf16; with `adds` sums start from what y
    holds. `rows` is 16 for `whole` ones, else what the configuration says is left over. blocks: 1 or 2.
    """
    if not 1 <= blocks <= _COLUMN_BLOCKS:
        raise ValueError(f"sums of 1 or {_COLUMN_BLOCKS} blocks fit the tiles, not of {blocks}")

    @intrinsic
    def multiply(typing, x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, steps):
        def generate(context, builder, signature, arguments):
            _multiply(builder, arguments, blocks, _WHOLE if whole else _REST, adds)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return multiply


def _multiply(b, arguments, blocks, first, adds):
    x, x_row, w, w_block, y, y_row, steps = arguments
    values = _I8(first + _COLUMN_BLOCKS)
    for block in range(blocks):
        if adds:
            _call(b, "tileloadd64", _I8(first + block), _pointer(b, b.add(y, _I64(64 * block))), y_row)
        else:
            _call(b, "tilezero", _I8(first + block))
    with cgutils.for_range(b, steps, intp=_I64) as loop:
        _call(b, "tileloadd64", values, _pointer(b, b.add(x, b.mul(loop.index, _I64(TILE_STEP_BYTES)))), x_row)
        for block in range(blocks):
            at = b.add(w, b.add(b.mul(w_block, _I64(block)), b.mul(loop.index, _I64(_TILE_BYTES))))
            _call(b, "tileloadd64", _I8(_WEIGHTS[block]), _pointer(b, at), _I64(64))
            _call(b, "tdpbf16ps", _I8(first + block), values, _I8(_WEIGHTS[block]))
    for block in range(blocks):
        _call(b, "tilestored64", _I8(first + block), _pointer(b, b.add(y, _I64(64 * block))), y_row)


def _call(b, name, *arguments):
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), arguments)


def _pointer(b, address):
    return b.inttoptr(address, _I8.as_pointer())

"""Row operations on the host between products and between steps, as launches.

They are sums, copies and gathers of rows, the distance of rows in memory, and moves of state
records.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.codegen.amx import MAX_ROWS, TILE_ROWS, has_tiles
from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    PART,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    compile_kernel,
    count_up,
    launch_integers,
    pointer_to,
    record,
    rounded,
    wide,
)
from engine.kernels.host.codegen.strided_loops import LINE_BYTES, size_of
from runtime.errors import InternalError

_SUM = record("num_values", "x", "y", "out")
_COPIES = record("num_rows", "width", "stride", "out_stride", "x", "out")
_GATHERS = record("num_rows", "width", "stride", "num_source_rows", "table", "indices", "out")
_MAXIMA = record("num_rows", "width", "x", "out")
_RECORDS = record("num_moves", "num_pools", "pools", "sources", "targets")
_POOL_FIELDS = 3
_ITEM_ROWS = 16
_ITEM_VALUES = 1 << 14
_BLOCK_VALUES = 64


def add_rows(x: Tensor, y: Tensor, team: Team) -> Tensor:
    """Compute x + y in fp32 and round once, as torch does.

    Both have one shape and dtype, bf16 or fp32, and are dense. The result is a new tensor of the
    same.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    launch_integers(
        sum_for(x.dtype),
        -(-x.numel() // _ITEM_VALUES),
        (x.numel(), x.data_ptr(), y.data_ptr(), out.data_ptr()),
        team,
    )
    return out


@cache
def sum_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _add_values(pointer, stored)

    return compile_kernel(work, _SUM, f"add_rows_{stored.__name__}")


@njit(**PART)
def _add_values(pointer, stored):
    a = carray(pointer, 1)[0]
    size = size_of(stored)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        first = item * _ITEM_VALUES
        count = min(_ITEM_VALUES, a.num_values - first)
        x = carray(pointer_to(a.x + first * size, stored), count)
        y = carray(pointer_to(a.y + first * size, stored), count)
        out = carray(pointer_to(a.out + first * size, stored), count)
        for place in range(count):
            out[place] = rounded(wide(x[place]) + wide(y[place]), stored)
        count_up(pointer, DONE)


def copy_rows(x: Tensor, team: Team, out: Tensor | None = None) -> Tensor:
    """Copy x [T, ...] bf16 or fp32 with dense rows to a dense tensor, or to `out`.

    `out` has the same shape and dense rows.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    launch_integers(
        copies_for(x.dtype),
        -(-len(x) // _ITEM_ROWS),
        (len(x), x[0].numel(), x.stride(0), out.stride(0), x.data_ptr(), out.data_ptr()),
        team,
    )
    return out


def rows_apart(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Allocate [M, K] with rows an odd number of lines apart, not initialized.

    The rows of a tile of the matrix unit then share no sets of a core's nearest cache.
    """
    of_line = LINE_BYTES // dtype.itemsize
    distance = (-(-width // of_line) | 1) * of_line
    # Memory after the rows, up to a multiple of a tile's rows, is read and ignored.
    return torch.empty(-(-num_rows // TILE_ROWS) * TILE_ROWS, distance, dtype=dtype)[
        :num_rows, :width
    ]


def rows_for_product(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Allocate [M, K] with the row distance that is best for a product, not initialized."""
    if num_rows > MAX_ROWS and dtype is torch.bfloat16 and has_tiles():
        return rows_apart(num_rows, width, dtype)
    return torch.empty(num_rows, width, dtype=dtype)


def apart(x: Tensor, team: Team) -> Tensor:
    """Return x [M, K] with the row distance of `rows_apart`, copied if necessary.

    x is bf16, or int8 with an even number of columns, with dense rows.
    """
    distance = x.stride(0)
    whole = -(-len(x) // TILE_ROWS) * TILE_ROWS
    num_lines, rest = divmod(distance * x.itemsize, LINE_BYTES)
    last = (x.storage_offset() + whole * distance) * x.itemsize
    if (
        num_lines % 2
        and not rest
        and x.data_ptr() % LINE_BYTES == 0
        and last <= x.untyped_storage().nbytes()
    ):
        return x
    halves = x.view(torch.bfloat16)
    return copy_rows(halves, team, rows_apart(len(x), halves.shape[1], torch.bfloat16))


def join_rows(parts: Sequence[Tensor], team: Team) -> Tensor:
    """Concatenate [T, n] tensors along the last dimension; bf16 or fp32, with dense rows."""
    out = torch.empty(len(parts[0]), sum(part.shape[1] for part in parts), dtype=parts[0].dtype)
    for part, columns in zip(
        parts, torch.split(out, [part.shape[1] for part in parts], 1), strict=True
    ):
        copy_rows(part, team, columns)
    return out


@cache
def copies_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _copy_rows(pointer, stored)

    return compile_kernel(work, _COPIES, f"copy_rows_{stored.__name__}")


@njit(**PART)
def _copy_rows(pointer, stored):
    """Run one thread: copy a few rows at a time until no items are left."""
    a = carray(pointer, 1)[0]
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for row in range(item * _ITEM_ROWS, min((item + 1) * _ITEM_ROWS, a.num_rows)):
            x = carray(pointer_to(a.x + row * a.stride * size_of(stored), stored), a.width)
            out = carray(pointer_to(a.out + row * a.out_stride * size_of(stored), stored), a.width)
            for place in range(a.width):
                out[place] = x[place]
        count_up(pointer, DONE)


def gather_rows(table: Tensor, indices: Tensor, team: Team) -> Tensor:
    """Return the rows `indices` [T] int64 of table [N, n], bf16 or fp32, as [T, n].

    The table is dense within rows.

    Raises:
        InternalError: the table does not have a row.
    """
    out = torch.empty(len(indices), table.shape[1], dtype=table.dtype)
    indices = indices.contiguous()
    launch_integers(
        gathers_for(table.dtype),
        -(-len(indices) // _ITEM_ROWS),
        (
            len(indices),
            table.shape[1],
            table.stride(0),
            len(table),
            table.data_ptr(),
            indices.data_ptr(),
            out.data_ptr(),
        ),
        team,
    )
    return out


@cache
def gathers_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _gather_rows(pointer, stored)

    return compile_kernel(work, _GATHERS, f"gather_rows_{stored.__name__}")


@njit(**PART)
def _gather_rows(pointer, stored):
    """Run one thread: copy a few rows at a time until no items are left or a row does not exist."""
    a = carray(pointer, 1)[0]
    indices = carray(pointer_to(a.indices, np.int64), a.num_rows)
    out = carray(pointer_to(a.out, stored), (a.num_rows, a.width))
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for row in range(item * _ITEM_ROWS, min((item + 1) * _ITEM_ROWS, a.num_rows)):
            if not 0 <= indices[row] < a.num_source_rows:
                return
            x = carray(
                pointer_to(a.table + indices[row] * a.stride * size_of(stored), stored), a.width
            )
            for place in range(a.width):
                out[row, place] = x[place]
        count_up(pointer, DONE)


def largest_of_rows(x: Tensor, team: Team) -> Tensor:
    """Return the index of each row's largest value, [T] int64, as torch.argmax does.

    x is [T, n] fp32, dense. Of equal values the first wins; NaN is larger than all numbers.
    """
    out = torch.empty(len(x), dtype=torch.int64)
    launch_integers(maxima(), len(x), (len(x), x.shape[1], x.data_ptr(), out.data_ptr()), team)
    return out


@cache
def maxima():
    def work(pointer):
        _find_largest(pointer)

    return compile_kernel(work, _MAXIMA, "largest_of_rows", numbers=STRICT)


@njit(**STRICT_PART)
def _find_largest(pointer):
    """Run one thread: search one row at a time until no items are left."""
    a = carray(pointer, 1)[0]
    rows = carray(pointer_to(a.x, np.float32), (a.num_rows, a.width))
    out = carray(pointer_to(a.out, np.int64), a.num_rows)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        out[item] = _place_of_largest(rows[item])
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _place_of_largest(x):
    """Search only the blocks whose maximum exceeds the best value so far."""
    best = x[0]
    place = 0
    for first in range(0, len(x), _BLOCK_VALUES):
        block = x[first : first + _BLOCK_VALUES]
        is_better = False
        for value in block:
            is_better |= not value <= best
        if is_better and best == best:
            for at in range(len(block)):
                if not block[at] <= best and best == best:
                    best = block[at]
                    place = first + at
    return place


class RecordMoves:
    """Copies of records [N, ...] between pairs of dense tensors with the same record shape."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Create moves between the source and the target of each pair; both are kept alive."""
        self._pairs, self._team = tuple(pairs), Team()
        self._num_records = (
            min(len(source) for source, _ in pairs),
            min(len(target) for _, target in pairs),
        )
        self._table = torch.tensor(
            [(source.data_ptr(), target.data_ptr(), target[0].nbytes) for source, target in pairs]
        )

    def run(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy record a to record b of every pair, for each (a, b). No two moves have the same b.

        Raises:
            InternalError: some of the tensors do not have a record.
        """
        for move in moves:
            if not all(
                0 <= place < count for place, count in zip(move, self._num_records, strict=True)
            ):
                raise InternalError(f"record {move[0]} to {move[1]} of {self._num_records}")
        places = torch.from_numpy(np.array(moves, np.int64).T.copy())  # sources, then targets
        launch_integers(
            moves_for(),
            len(moves) * len(self._pairs),
            (
                len(moves),
                len(self._pairs),
                self._table.data_ptr(),
                places.data_ptr(),
                places.data_ptr() + len(moves) * places.itemsize,
            ),
            self._team,
        )


@cache
def moves_for():
    def work(pointer):
        _move_records(pointer)

    return compile_kernel(work, _RECORDS, "move_records")


@njit(**PART)
def _move_records(pointer):
    """Run one thread: copy one record of a pair at a time until no items are left."""
    a = carray(pointer, 1)[0]
    pools = carray(pointer_to(a.pools, np.int64), (a.num_pools, _POOL_FIELDS))
    sources = carray(pointer_to(a.sources, np.int64), a.num_moves)
    targets = carray(pointer_to(a.targets, np.int64), a.num_moves)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        move = item // a.num_pools
        source_at, target_at, num_bytes = pools[item % a.num_pools]
        source = carray(pointer_to(source_at + sources[move] * num_bytes, np.uint8), num_bytes)
        target = carray(pointer_to(target_at + targets[move] * num_bytes, np.uint8), num_bytes)
        for place in range(num_bytes):
            target[place] = source[place]
        count_up(pointer, DONE)

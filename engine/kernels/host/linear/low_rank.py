"""Addition of low-rank updates to the rows of a product on the host: y += B h, in place.

Each row has factors of its own. An output is the sum over the terms of h in their order, with fused
multiply-adds in fp32, then the sum with y, rounded once. Its bits depend on its row of h and of y
and on its own factors, and on nothing else.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    compile_kernel,
    count_up,
    has_kernels,
    launch_integers,
    pointer_to,
    record,
    take_seat,
    wide,
)
from engine.kernels.host.codegen.launch_recorder import keep_for_replays
from engine.kernels.host.codegen.row_vectors import UPDATED_ROWS, update_row, update_rows
from engine.kernels.host.codegen.strided_loops import floats, integers, size_of
from runtime.errors import InternalError

_UPDATE = record("table", "h", "h_stride", "y", "y_stride", "index")
_TILE_OUTPUTS = 1024  # of an item; their part of B stays in a near cache
_ITEM_ROWS = 64
_FIELDS = 8
_MAX_TERMS = 512  # of a factor
_ROWS_BYTES = 8 * UPDATED_ROWS
_TERMS_BYTES = 4 * _MAX_TERMS


class UpFactor(NamedTuple):
    """One part of B for one interval of outputs.

    Attributes:
        matrix: [r, outputs], the transposed factor, dense, in the dtype of the product.
        first_term: the first of the r terms of h that it multiplies.
        first_output: the output of y to which its first column belongs.
    """

    matrix: Tensor
    first_term: int
    first_output: int


def update_items(factors: Sequence[UpFactor]) -> NDArray[np.int64]:
    """Return the items of an update without their rows, [n, 8].

    They have addresses within the factors, which must outlive them.

    Raises:
        InternalError: a factor has too many terms.
    """
    if any(len(matrix) > _MAX_TERMS for matrix, _, _ in factors):
        raise InternalError(f"an update of more than {_MAX_TERMS} terms")
    items = [
        (
            matrix.data_ptr() + start * matrix.itemsize,
            matrix.shape[1] * matrix.itemsize,
            matrix.shape[0],
            first_term,
            first_output + start,
            min(_TILE_OUTPUTS, matrix.shape[1] - start),
            0,
            0,
        )
        for matrix, first_term, first_output in factors
        for start in range(0, matrix.shape[1], _TILE_OUTPUTS)
    ]
    return np.array(items, np.int64).reshape(-1, _FIELDS)


def update_table(runs: Sequence[tuple[NDArray[np.int64], int]]) -> Tensor:
    """Return the items of an update of runs of rows, [n, 8] int64.

    Each run has its `update_items` and its number of rows, at least one.
    """
    pieces = list[NDArray[np.int64]]()
    rows = list[tuple[int, int]]()
    first_row = 0
    for items, num_rows in runs:
        for row in range(0, num_rows, _ITEM_ROWS):
            pieces.append(items)
            rows.append((first_row + row, min(_ITEM_ROWS, num_rows - row)))
        first_row += num_rows
    table = np.concatenate(pieces)
    table[:, -2:] = np.repeat(np.array(rows, np.int64), [len(piece) for piece in pieces], axis=0)
    # By frombuffer: recordings refuse tensors with values of the present run, but nothing in a
    # table or an index changes from one replay to the next.
    return torch.frombuffer(table, dtype=torch.int64).view(-1, _FIELDS)


def add_update(y: Tensor, h: Tensor, index: Tensor, table: Tensor, team: Team) -> None:
    """Add to row index[i] of y the update of row i of h.

    y is [T, out] and h [n, terms], dense within a row, of one dtype, bf16 or fp32. index is [n]
    int64 without duplicates, dense. The table covers the n rows.

    Raises:
        InternalError: y or h has another form.
    """
    if y.dtype is not h.dtype or not has_kernels(y.dtype) or y.stride(1) != 1 or h.stride(1) != 1:
        raise InternalError(f"an update of {y.dtype} {y.stride()} by {h.dtype} {h.stride()}")
    launch_integers(
        update_for(y.dtype),
        len(table),
        (
            table.data_ptr(),
            h.data_ptr(),
            h.stride(0) * h.itemsize,
            y.data_ptr(),
            y.stride(0) * y.itemsize,
            index.data_ptr(),
        ),
        team,
        scratch_bytes=_ROWS_BYTES + UPDATED_ROWS * _TERMS_BYTES,
    )
    keep_for_replays(table, index)


@cache
def update_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _update_rows(pointer, stored)

    return compile_kernel(work, _UPDATE, f"low_rank_update_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _update_rows(pointer, stored):
    """Run one thread: process items until none are left."""
    a = carray(pointer, 1)[0]
    size = size_of(stored)
    base = take_seat(pointer)
    rows = integers(base)
    factors = floats(base + _ROWS_BYTES)
    index = integers(a.index)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        fields = integers(a.table + item * _FIELDS * 8)
        matrix, stride, rank, outputs = fields[0], fields[1], fields[2], fields[5]
        row, end = fields[6], fields[6] + fields[7]
        while row < end:
            count = UPDATED_ROWS if end - row >= UPDATED_ROWS else 1
            for place in range(count):
                h = pointer_to(a.h + (row + place) * a.h_stride + fields[3] * size, stored)
                for term in range(rank):
                    factors[place * _MAX_TERMS + term] = wide(h[term])
                rows[place] = a.y + index[row + place] * a.y_stride + fields[4] * size
            if count == 1:
                update_row(
                    base + _ROWS_BYTES, _TERMS_BYTES, matrix, stride, rank, base, outputs, stored
                )
            else:
                update_rows(
                    base + _ROWS_BYTES, _TERMS_BYTES, matrix, stride, rank, base, outputs, stored
                )
            row += count
        count_up(pointer, DONE)

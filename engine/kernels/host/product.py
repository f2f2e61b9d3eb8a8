"""Products with packed weights on the host: one kernel for every number of rows, with an order of sums of its own.

Every output element is eight sums over eighths of K, added in a binary tree, ((0+1)+(2+3))+((4+5)+(6+7)), in fp32. An
eighth is ceil(S/8) of the S steps of K (pairs of terms of bf16, terms of fp32), and what is left of them at the end; so
where K is a multiple of 16 (of 8 in fp32) the eighths are equal, and processes that hold 1/2, 1/4 or 1/8 of K each can
keep the order by adding their parts as the tree does. In what order a sum goes through its terms is the CPU's class of
arithmetic: one after the other (`dot.py`), or for bf16 in 32s where it has matrix tiles (`tiles.py`).

What follows the product is done before it is rounded, once: bias, silu(gate) * up of two products, a residual.
An element's bits depend on its row of x and of the residual and on its column of the weights, on nothing else.
"""

from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host import dot, functions, tiles
from engine.kernels.host.amx import has_tiles
from engine.kernels.host.compiled import (
    DONE,
    NEXT,
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
    take_seat,
    wide,
)
from engine.kernels.host.dot import BLOCK_STEP_BYTES, LANES, has_pair_products, has_wide_vectors
from engine.kernels.host.functions import silu
from engine.kernels.host.packing import SEGMENTS, Segments, pack
from engine.kernels.host.tiles import LAYOUT_BYTES, is_tiled, make_tiles, release_tiles, rows_times_blocks
from runtime.errors import InternalError

REVISION = 2  # of sums and roundings: another number, other bits

_ARGUMENTS = record("tile_rows", "chunk_rows", "num_groups", "group_blocks", "num_shares", "share_rows", "num_rows",
                    "out_columns", "num_columns", "num_blocks", "segment_steps", "x", "x_row_bytes", "x_matrix_bytes",
                    "shares", "w", "w_up", "w_block_bytes", "bias", "bias_up", "residual", "residual_stride", "out")
_SHARE_FIELDS = 4  # of a matrix that has rows of its own: its address, the second's, the first row, their number
_GROUP_BLOCKS = 4
_GROUP_COLUMNS = _GROUP_BLOCKS * LANES
_SUM_ROW_BYTES = _GROUP_COLUMNS * 4
_TILE_ROWS, _TILE_BLOCKS = (6, 4) if has_wide_vectors() else (4, 1)  # all sums in registers
_CHUNK_ROWS = 24  # rows that share a pass over a segment of the weights while it is in the nearest cache
_ITEMS_PER_THREAD = 4


def arithmetic_class() -> str:
    """Processes that give the same one here give the same bits from the same weights and inputs."""
    return f"{REVISION}-{_instructions()}"


def _instructions() -> str:
    if has_tiles():
        return "tiles"
    return "pairs" if has_pair_products() else "widened"


class PackedWeight:
    """`weight` [N, K] or [H, N, K], bf16 or fp32 on the host, is copied into `blocks` (`packing.pack`). `bias`: one
    value for each of the N or H * N outputs, or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None, team: Team) -> None:
        matrices = weight if weight.dim() == 3 else weight[None]
        self.shape = tuple(matrices.shape)
        self.dtype = weight.dtype
        multiple = tiles.STEPS if is_tiled(STORED_AS[weight.dtype]) else 1
        self.segments = Segments(matrices.shape[2], weight.dtype, multiple)
        self.blocks = pack(matrices, self.segments, team)
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        self.addresses = self.blocks.data_ptr(), 0 if self.bias is None else self.bias.data_ptr()
        self._team = team

    def multiply(self, x: Tensor, *, residual: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x W^T + bias + residual. x: [M, K] in the weight's dtype; residual: [M, N] likewise. Returns [M, N] in
        `out_dtype`: the weight's, unless it is fp32. With H matrices x is [M, H, K], of which matrix h multiplies
        x[:, h], and residual and result are [M, H * N]."""
        return self._launch(x, None, residual, out_dtype or self.dtype)

    def multiply_gated(self, x: Tensor, up: "PackedWeight") -> Tensor:
        """silu(x W^T + bias) * (x U^T + bias of U), for U of the same shape. Returns [M, N] in the weight's dtype."""
        if (up.shape, up.dtype) != (self.shape, self.dtype):
            raise InternalError(f"gate {self.shape} {self.dtype} beside up {up.shape} {up.dtype}")
        return self._launch(x, up, None, self.dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of a single matrix as they were before packing. indices: [T] int64. Returns [T, K]."""
        taken = self.blocks[0][indices // LANES, :, indices % LANES]
        return self.segments.restored(taken.flatten(1))

    def _launch(self, x: Tensor, up: "PackedWeight | None", residual: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        count, columns, terms = self.shape
        num_rows, headwise = x.shape[0], x.dim() == 3
        if x.dtype is not self.dtype or x.shape[1:] != ((terms,) if count == 1 and not headwise else (count, terms)):
            raise InternalError(f"x {tuple(x.shape)} {x.dtype} for weights {self.shape} {self.dtype}")
        out = torch.empty(num_rows, count * columns, dtype=out_dtype)
        if not out.numel():
            return out
        x, item_bytes, num_blocks = self.segments.arranged(x), self.dtype.itemsize, self.blocks.shape[1]
        residual_at, residual_stride = 0, 0
        if residual is not None:
            residual = residual if residual.stride(1) == 1 else residual.contiguous()
            residual_at, residual_stride = residual.data_ptr(), residual.stride(0)
        w_up, bias_up = (0, 0) if up is None else up.addresses
        work = _share_out(num_rows, count, num_blocks, 1 if up is None else 2, self.segments.multiple > 1,
                          torch.get_num_threads())
        launch_integers(_compiled_for(self.dtype, out_dtype), work.num_items, (
            *work.fields, num_rows, count * columns, columns, num_blocks, self.segments.steps,
            x.data_ptr(), x.stride(0) * item_bytes, x.stride(1) * item_bytes if headwise else 0, 0,
            self.addresses[0], w_up, SEGMENTS * self.segments.steps * BLOCK_STEP_BYTES, self.addresses[1], bias_up,
            residual_at, residual_stride, out.data_ptr()), self._team, scratch_bytes=work.scratch_bytes)
        return out


class PackedGroup:
    """Matrices of one shape without biases, of which each multiplies rows of its own (experts), in one launch."""

    def __init__(self, weights: Sequence[PackedWeight], ups: Sequence[PackedWeight], team: Team) -> None:
        """`ups`: for each of the weights W one U of its shape, for silu(x W^T) * (x U^T); or none."""
        self._first = weights[0]
        if {(weight.shape, weight.dtype) for weight in (*weights, *ups)} != {(self._first.shape, self._first.dtype)}:
            raise InternalError("the matrices of a group have one shape and type")
        if any(weight.bias is not None for weight in (*weights, *ups)):
            raise InternalError("the matrices of a group have no biases")
        self._team = team
        self._kept = *weights, *ups  # the kernel has their addresses only
        self._addresses = [weight.addresses[0] for weight in weights]
        self._ups = [up.addresses[0] for up in ups] or [0] * len(weights)

    def multiply(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x: [M, K]; counts[i] of its rows, which follow those of i - 1, are the i-th matrix's. Returns [M, N] in the
        weights' dtype, each row with the bits that its matrix alone would give it."""
        first, num_rows = self._first, len(x)
        _, columns, terms = first.shape
        if x.dtype is not first.dtype or x.shape[1] != terms or sum(counts) != num_rows:
            raise InternalError(f"x {tuple(x.shape)} {x.dtype} for {sum(counts)} rows of weights {first.shape}")
        out = torch.empty(num_rows, columns, dtype=first.dtype)
        if not num_rows:
            return out
        table, start = array("q"), 0
        for address, up, count in zip(self._addresses, self._ups, counts, strict=True):
            if count:
                table.extend((address, up, start, count))
                start += count
        x, num_blocks = first.segments.arranged(x), first.blocks.shape[1]
        work = _share_out(max(counts), len(table) // _SHARE_FIELDS, num_blocks, 2 if self._ups[0] else 1,
                          first.segments.multiple > 1, torch.get_num_threads())
        launch_integers(_compiled_for(first.dtype, first.dtype), work.num_items, (
            *work.fields, num_rows, columns, columns, num_blocks, first.segments.steps, x.data_ptr(),
            x.stride(0) * first.dtype.itemsize, 0, table.buffer_info()[0], self._addresses[0], self._ups[0],
            SEGMENTS * first.segments.steps * BLOCK_STEP_BYTES, 0, 0, 0, 0, out.data_ptr()), self._team,
            scratch_bytes=work.scratch_bytes)
        return out


class _Work(NamedTuple):
    """How a product is shared out."""

    num_items: int
    scratch_bytes: int  # of a thread: the sums of an item, then the layout of tiles
    fields: tuple[int, ...]  # of the record, up to `share_rows`


@lru_cache(maxsize=4096)
def _share_out(num_rows: int, num_matrices: int, num_blocks: int, num_panels: int, tiled: bool,  # noqa: FBT001
               num_threads: int) -> _Work:
    """Items are groups of blocks, for all rows where that gives every thread some, else for shares of them."""
    tile_rows, chunk_rows = (tiles.MAX_ROWS, tiles.MAX_ROWS) if tiled else (_TILE_ROWS, _CHUNK_ROWS)
    has_many = num_blocks * num_matrices >= _GROUP_BLOCKS * num_threads
    group = _GROUP_BLOCKS if has_many or num_rows > tile_rows else 1
    num_groups, num_chunks = -(-num_blocks // group), -(-num_rows // chunk_rows)
    num_items = num_groups * num_matrices
    wanted = 1 if num_threads == 1 else max(1, -(-_ITEMS_PER_THREAD * num_threads // num_items))
    chunks = -(-num_chunks // min(wanted, num_chunks))
    num_shares = -(-num_chunks // chunks)
    rows = min(chunk_rows, num_rows)
    return _Work(num_items * num_shares, num_panels * SEGMENTS * rows * _SUM_ROW_BYTES + LAYOUT_BYTES,
                 (tile_rows, rows, num_groups, group, num_shares, chunks * chunk_rows))


@cache
def _compiled_for(dtype: torch.dtype, out_dtype: torch.dtype):
    stored, stored_out = STORED_AS[dtype], STORED_AS[out_dtype]

    def work(pointer):
        _take_items(pointer, stored, stored_out)

    name = f"product_{_instructions()}_{stored.__name__}_{stored_out.__name__}"
    parts = (__file__, dot.__file__, tiles.__file__, functions.__file__)
    return compile_kernel(work, _ARGUMENTS, name, *parts, numbers=STRICT)


_wide, _narrow = rows_times_blocks(_TILE_ROWS, _TILE_BLOCKS), rows_times_blocks(_TILE_ROWS, 1)


@njit(**STRICT_PART)
def _take_items(pointer, stored, stored_out):
    """One thread's part: some blocks of columns for some rows at a time, until none are left."""
    a = carray(pointer, 1)[0]
    num_panels = 2 if a.w_up else 1
    sums_at, panel_bytes = take_seat(pointer), SEGMENTS * a.chunk_rows * _SUM_ROW_BYTES
    sums = carray(pointer_to(sums_at, np.float32), (num_panels, SEGMENTS, a.chunk_rows, _GROUP_COLUMNS))
    layout = sums_at + num_panels * panel_bytes
    carray(pointer_to(layout, np.uint8), LAYOUT_BYTES)[:] = 0
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            release_tiles(stored)
            return
        panel_of_all, first_row = item // a.num_shares, item % a.num_shares * a.share_rows
        matrix, first_block = panel_of_all // a.num_groups, panel_of_all % a.num_groups * a.group_blocks
        num_blocks = min(a.group_blocks, a.num_blocks - first_block)
        num_columns = min(num_blocks * LANES, a.num_columns - first_block * LANES)
        weights, ups, start, num_rows, column, x_at = a.w, a.w_up, 0, a.num_rows, matrix * a.num_columns, a.x
        if a.shares:
            share = carray(pointer_to(a.shares + matrix * _SHARE_FIELDS * 8, np.int64), _SHARE_FIELDS)
            weights, ups, start, num_rows, column = share[0], share[1], share[2], share[3], 0
        else:
            weights += matrix * a.num_blocks * a.w_block_bytes
            ups += matrix * a.num_blocks * a.w_block_bytes
            x_at += matrix * a.x_matrix_bytes
        column += first_block * LANES
        for row in range(first_row, min(first_row + a.share_rows, num_rows), a.chunk_rows):
            rows, x = min(a.chunk_rows, num_rows - row), x_at + (start + row) * a.x_row_bytes
            make_tiles(stored, rows, layout)
            for panel in range(num_panels):
                w, bias = (ups, a.bias_up) if panel else (weights, a.bias)
                w += first_block * a.w_block_bytes
                _multiply(a, x, rows, w, num_blocks, sums_at + panel * panel_bytes, stored)
                _add_up(sums[panel], rows, num_columns, bias, column)
            if num_panels == 2:
                _gate(sums[0, 0], sums[1, 0], rows, num_columns)
            _store(a, sums[0, 0], start + row, rows, column, num_columns, stored, stored_out)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _multiply(a, x, rows, w, num_blocks, sums, stored):
    """The eight sums of `rows` rows and `num_blocks` blocks. A segment of the weights serves all rows at a time."""
    num_tiles = (rows + a.tile_rows - 1) // a.tile_rows
    for segment in range(SEGMENTS):
        first = segment * a.segment_steps
        for tile in range(num_tiles):
            start, end = rows * tile // num_tiles, rows * (tile + 1) // num_tiles
            x_at, count = x + start * a.x_row_bytes + first * 4, end - start
            y_at = sums + (segment * a.chunk_rows + start) * _SUM_ROW_BYTES
            block = 0
            while block < num_blocks:
                w_at, y = w + block * a.w_block_bytes + first * BLOCK_STEP_BYTES, y_at + block * BLOCK_STEP_BYTES
                steps, y_row = a.segment_steps, _SUM_ROW_BYTES
                if block + _TILE_BLOCKS <= num_blocks:
                    _wide(stored, count, x_at, a.x_row_bytes, w_at, a.w_block_bytes, y, y_row, steps)
                    block += _TILE_BLOCKS
                else:
                    _narrow(stored, count, x_at, a.x_row_bytes, w_at, a.w_block_bytes, y, y_row, steps)
                    block += 1


@njit(**STRICT_PART)
def _add_up(s, rows, num_columns, bias, column):
    """The tree, into the first of the eight sums; then the bias, if it is not at address 0."""
    offsets = pointer_to(bias, np.float32)
    for r in range(rows):
        for n in range(num_columns):
            s[0, r, n] = (((s[0, r, n] + s[1, r, n]) + (s[2, r, n] + s[3, r, n]))
                          + ((s[4, r, n] + s[5, r, n]) + (s[6, r, n] + s[7, r, n])))
        if bias:
            for n in range(num_columns):
                s[0, r, n] += offsets[column + n]


@njit(**STRICT_PART)
def _gate(gate, up, rows, num_columns):
    for r in range(rows):
        for n in range(num_columns):
            gate[r, n] = silu(gate[r, n]) * up[r, n]


@njit(**STRICT_PART)
def _store(a, totals, first_row, rows, column, num_columns, stored, stored_out):
    residual = carray(pointer_to(a.residual, stored), a.num_rows * a.residual_stride)
    out = carray(pointer_to(a.out, stored_out), (a.num_rows, a.out_columns))
    for r in range(rows):
        if a.residual:
            start = (first_row + r) * a.residual_stride + column
            for n in range(num_columns):
                totals[r, n] += wide(residual[start + n])
        for n in range(num_columns):
            out[first_row + r, column + n] = rounded(totals[r, n], stored_out)

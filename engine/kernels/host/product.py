"""Products with packed weights on the host: one kernel for every number of rows, with an order of sums of its own.

Every output element is eight sums over eighths of K, added in a binary tree, ((0+1)+(2+3))+((4+5)+(6+7)), in fp32. A
sum goes through its terms in order (`dot.py`). An eighth is ceil(S/8) of the S steps of K (pairs of terms of bf16,
terms of fp32), and what is left of them at the end; so where K is a multiple of 16 (of 8 in fp32) the eighths are
equal, and processes that hold 1/2, 1/4 or 1/8 of K each can keep the order by adding their parts as the tree does.

What follows the product is done before it is rounded, once: bias, silu(gate) * up of two products, a residual.
An element's bits depend on its row of x and of the residual and on its column of the weights, on nothing else.
"""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit
from torch import Tensor

from engine.kernels.host import dot, functions, packing
from engine.kernels.host.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    compile_kernel,
    count_up,
    launch,
    pointer_to,
    record,
    rounded,
    wide,
)
from engine.kernels.host.dot import BLOCK_STEP_BYTES, LANES, dot_rows, has_pair_products, has_wide_vectors
from engine.kernels.host.functions import silu
from engine.kernels.host.team import Team
from runtime.errors import InternalError

REVISION = 1  # of the order of sums: another number, other bits

_ARGUMENTS = record("num_rows", "num_matrices", "num_columns", "num_blocks", "steps", "segment_steps", "num_groups",
                    "group_blocks", "num_shares", "share_rows", "x", "x_row_bytes", "x_matrix_bytes", "w", "w_up",
                    "w_block_bytes", "bias", "bias_up", "residual", "residual_stride", "out")
_SEGMENTS = 8
_GROUP_BLOCKS = 4
_GROUP_COLUMNS = _GROUP_BLOCKS * LANES
_SUM_ROW_BYTES = _GROUP_COLUMNS * 4
_CHUNK_ROWS = 24  # rows that share a pass over a segment of the weights while it is in the nearest cache
_TILE_ROWS, _TILE_BLOCKS = (6, 4) if has_wide_vectors() else (4, 1)  # all sums in registers
_ITEMS_PER_THREAD = 4


def arithmetic_class() -> str:
    """Processes that give the same one here give the same bits from the same weights and inputs."""
    return f"{REVISION}-{'pairs' if has_pair_products() else 'widened'}"


class PackedWeight:
    """`weight` [N, K] or [H, N, K], bf16 or fp32 on the host, is copied into `blocks` (`packing.pack`). `bias`: one
    value for each of the N or H * N outputs, or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None, team: Team) -> None:
        matrices = weight if weight.dim() == 3 else weight[None]
        self.shape = tuple(matrices.shape)
        self.dtype = weight.dtype
        self.blocks = packing.pack(matrices, team)
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
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

    def _launch(self, x: Tensor, up: "PackedWeight | None", residual: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        count, columns, terms = self.shape
        x = x if x.dim() == 3 else x[:, None]
        if x.dtype is not self.dtype or tuple(x.shape[1:]) != (count, terms):
            raise InternalError(f"x {tuple(x.shape)} {x.dtype} for weights {self.shape} {self.dtype}")
        out = torch.empty(len(x), count * columns, dtype=out_dtype)
        if not out.numel():
            return out
        x = self._whole_steps(x)
        steps, blocks = self.blocks.shape[2], self.blocks.shape[1]
        arguments = np.zeros(1, _ARGUMENTS)
        a = arguments[0]
        a["num_rows"], a["num_matrices"], a["num_columns"], a["num_blocks"] = len(x), count, columns, blocks
        a["steps"], a["segment_steps"], a["w_block_bytes"] = steps, -(-steps // _SEGMENTS), steps * BLOCK_STEP_BYTES
        a["x"], a["x_row_bytes"] = x.data_ptr(), x.stride(0) * x.element_size()
        a["x_matrix_bytes"] = x.stride(1) * x.element_size()
        a["w"], a["bias"] = self.blocks.data_ptr(), 0 if self.bias is None else self.bias.data_ptr()
        if up is not None:
            a["w_up"], a["bias_up"] = up.blocks.data_ptr(), 0 if up.bias is None else up.bias.data_ptr()
        if residual is not None:
            residual = residual if residual.stride(1) == 1 else residual.contiguous()
            a["residual"], a["residual_stride"] = residual.data_ptr(), residual.stride(0)
        a["out"] = out.data_ptr()
        _share_out(a)
        launch(_compiled_for(self.dtype, out_dtype), arguments, self._team)
        return out

    def _whole_steps(self, x: Tensor) -> Tensor:
        """x with terms side by side, an even number of bf16."""
        if self.blocks.shape[2] * BLOCK_STEP_BYTES // LANES != x.shape[2] * x.element_size():
            return F.pad(x, (0, 1))
        return x if x.stride(2) == 1 else x.contiguous()


def _share_out(a: np.void) -> None:
    """Items are groups of blocks, for all rows where that gives every thread some, else for shares of them."""
    threads, num_rows, num_blocks = torch.get_num_threads(), int(a["num_rows"]), int(a["num_blocks"])
    all_blocks = num_blocks * int(a["num_matrices"])
    group = _GROUP_BLOCKS if all_blocks >= _GROUP_BLOCKS * threads or num_rows > _TILE_ROWS else 1
    num_groups, num_chunks = -(-num_blocks // group), -(-num_rows // _CHUNK_ROWS)
    num_items = num_groups * int(a["num_matrices"])
    wanted = 1 if threads == 1 else max(1, -(-_ITEMS_PER_THREAD * threads // num_items))
    chunks = -(-num_chunks // min(wanted, num_chunks))
    a["group_blocks"], a["num_groups"], a["share_rows"] = group, num_groups, chunks * _CHUNK_ROWS
    a["num_shares"] = -(-num_chunks // chunks)
    a["num_items"] = num_items * a["num_shares"]


@cache
def _compiled_for(dtype: torch.dtype, out_dtype: torch.dtype):
    stored, stored_out = STORED_AS[dtype], STORED_AS[out_dtype]

    def work(pointer):
        _take_items(pointer, stored, stored_out)

    name = f"product_{stored.__name__}_{stored_out.__name__}"
    return compile_kernel(work, _ARGUMENTS, name, __file__, dot.__file__, functions.__file__, numbers=STRICT)


_wide_tile, _narrow_tile = dot_rows(_TILE_ROWS, _TILE_BLOCKS), dot_rows(_TILE_ROWS, 1)


@njit(**STRICT_PART)
def _take_items(pointer, stored, stored_out):
    """One thread's part: some blocks of columns for some rows at a time, until none are left."""
    a = carray(pointer, 1)[0]
    num_panels = 2 if a.w_up else 1
    sums = np.empty((num_panels, _SEGMENTS, _CHUNK_ROWS, _GROUP_COLUMNS), np.float32)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        panel_of_all, first_row = item // a.num_shares, item % a.num_shares * a.share_rows
        matrix, first_block = panel_of_all // a.num_groups, panel_of_all % a.num_groups * a.group_blocks
        num_blocks = min(a.group_blocks, a.num_blocks - first_block)
        num_columns = min(num_blocks * LANES, a.num_columns - first_block * LANES)
        column = matrix * a.num_columns + first_block * LANES
        w_offset = (matrix * a.num_blocks + first_block) * a.w_block_bytes
        for row in range(first_row, min(first_row + a.share_rows, a.num_rows), _CHUNK_ROWS):
            rows, x = min(_CHUNK_ROWS, a.num_rows - row), a.x + row * a.x_row_bytes + matrix * a.x_matrix_bytes
            for panel in range(num_panels):
                w, bias = (a.w_up, a.bias_up) if panel else (a.w, a.bias)
                _multiply(a, x, rows, w + w_offset, num_blocks, sums[panel].ctypes.data, stored)
                _add_up(sums[panel], rows, num_columns, bias, column)
            if a.w_up:
                _gate(sums[0, 0], sums[1, 0], rows, num_columns)
            _store(a, sums[0, 0], row, rows, column, num_columns, stored, stored_out)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _multiply(a, x, rows, w, num_blocks, sums, stored):
    """The eight sums of `rows` rows and `num_blocks` blocks. A segment of the weights serves all rows at a time."""
    num_tiles = (rows + _TILE_ROWS - 1) // _TILE_ROWS
    for segment in range(_SEGMENTS):
        first = min(segment * a.segment_steps, a.steps)
        steps = min(a.segment_steps, a.steps - first)
        for tile in range(num_tiles):
            start, end = rows * tile // num_tiles, rows * (tile + 1) // num_tiles
            x_at = x + start * a.x_row_bytes + first * 4
            y_at = sums + (segment * _CHUNK_ROWS + start) * _SUM_ROW_BYTES
            block = 0
            while block < num_blocks:
                w_at = w + block * a.w_block_bytes + first * BLOCK_STEP_BYTES
                y, count = y_at + block * BLOCK_STEP_BYTES, end - start
                if block + _TILE_BLOCKS <= num_blocks:
                    _wide_tile(stored, count, x_at, a.x_row_bytes, w_at, a.w_block_bytes, y, _SUM_ROW_BYTES, steps)
                    block += _TILE_BLOCKS
                else:
                    _narrow_tile(stored, count, x_at, a.x_row_bytes, w_at, a.w_block_bytes, y, _SUM_ROW_BYTES, steps)
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
    out = carray(pointer_to(a.out, stored_out), (a.num_rows, a.num_matrices * a.num_columns))
    for r in range(rows):
        if a.residual:
            start = (first_row + r) * a.residual_stride + column
            for n in range(num_columns):
                totals[r, n] += wide(residual[start + n])
        for n in range(num_columns):
            out[first_row + r, column + n] = rounded(totals[r, n], stored_out)

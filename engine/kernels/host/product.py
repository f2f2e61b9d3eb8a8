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

from engine.kernels.host import dot, functions, strided, sums, tiles
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
from engine.kernels.host.strided import fetch_for_writing, floats, size_of
from engine.kernels.host.sums import join
from engine.kernels.host.tiles import LAYOUT_BYTES, in_tiles, is_tiled, make_tiles, release_tiles, rows_times_blocks
from runtime.errors import InternalError

REVISION = 2  # of sums and roundings: another number, other bits

_ARGUMENTS = record("tile_rows", "unit_rows", "chunk_rows", "share_chunks", "group_blocks", "num_groups", "num_rows",
                    "out_columns", "num_columns", "num_blocks", "num_matrices", "segment_steps", "x", "x_row_bytes",
                    "x_tile_bytes", "x_step_bytes", "x_matrix_bytes", "shares", "w", "w_up", "w_block_bytes", "bias",
                    "bias_up", "residual", "residual_stride", "out")
_SHARE_FIELDS = 4  # of a matrix that has rows of its own: its address, the second's, the first row, their number
_GROUP_BLOCKS = 4
_TILE_ROWS, _TILE_BLOCKS = (6, 4) if has_wide_vectors() else (4, 1)  # all sums in registers
_CHUNK_ROWS = 24  # rows that share a pass over two segments of the weights while they are in the nearest cache
_ITEMS_PER_THREAD = 4
_STEP_BYTES = 4  # of a row of x
_SHARE_BYTES = 5 << 18  # of x in tiles: stays in a core's own cache while the weights go by


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
        self._tiled, self._team = multiple > 1, team

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
        x, num_blocks = self.segments.arranged(x), self.blocks.shape[1]
        residual_at, residual_stride = 0, 0
        if residual is not None:
            residual = residual if residual.stride(1) == 1 else residual.contiguous()
            residual_at, residual_stride = residual.data_ptr(), residual.stride(0)
        w_up, bias_up = (0, 0) if up is None else up.addresses
        num_panels, num_threads = 1 if up is None else 2, torch.get_num_threads()
        if self._tiled and num_rows > tiles.MAX_ROWS and not headwise:
            x = in_tiles(x, self._team)
            tile_bytes = x.stride(0) * x.itemsize
            work = _share_out_tiles(num_rows, num_blocks, num_panels, tile_bytes, num_threads)
            distances = tiles.STEP_BYTES, tile_bytes, tiles.STEP_BYTES, 0
        else:
            row_bytes = x.stride(0) * x.itemsize
            work = _share_out(num_rows, count, num_blocks, num_panels, self._tiled, num_threads)
            distances = (row_bytes, tiles.TILE_ROWS * row_bytes, _STEP_BYTES,
                         x.stride(1) * x.itemsize if headwise else 0)
        launch_integers(_compiled_for(self.dtype, out_dtype), work.num_items, (
            *work.fields, num_rows, count * columns, columns, num_blocks, count, self.segments.steps, x.data_ptr(),
            *distances, 0,
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
        num_matrices, row_bytes = len(table) // _SHARE_FIELDS, x.stride(0) * x.itemsize
        work = _share_out(max(counts), num_matrices, num_blocks, 2 if self._ups[0] else 1, first.segments.multiple > 1,
                          torch.get_num_threads())
        launch_integers(_compiled_for(first.dtype, first.dtype), work.num_items, (
            *work.fields, num_rows, columns, columns, num_blocks, num_matrices, first.segments.steps, x.data_ptr(),
            row_bytes, tiles.TILE_ROWS * row_bytes, _STEP_BYTES, 0, table.buffer_info()[0], self._addresses[0],
            self._ups[0], SEGMENTS * first.segments.steps * BLOCK_STEP_BYTES, 0, 0, 0, 0, out.data_ptr()), self._team,
            scratch_bytes=work.scratch_bytes)
        return out


class _Work(NamedTuple):
    """How a product is shared out."""

    num_items: int
    scratch_bytes: int  # of a thread: the layout of tiles, then sums
    fields: tuple[int, ...]  # of the record, up to `num_groups`


@lru_cache(maxsize=4096)
def _share_out(num_rows: int, num_matrices: int, num_blocks: int, num_panels: int, tiled: bool,  # noqa: FBT001
               num_threads: int) -> _Work:
    """Items are groups of blocks, for all rows where that gives every thread some, else for shares of them."""
    tile_rows, chunk_rows = (tiles.MAX_ROWS, tiles.MAX_ROWS) if tiled else (_TILE_ROWS, _CHUNK_ROWS)
    has_many = num_blocks * num_matrices >= _GROUP_BLOCKS * num_threads
    group = _GROUP_BLOCKS if has_many or num_rows > tile_rows else 1
    num_groups, num_chunks = -(-num_blocks // group), -(-num_rows // chunk_rows)
    num_items, chunk_rows = num_groups * num_matrices, min(chunk_rows, num_rows)
    wanted = 1 if num_threads == 1 else max(1, -(-_ITEMS_PER_THREAD * num_threads // num_items))
    share_chunks = -(-num_chunks // min(wanted, num_chunks))
    return _Work(num_items * -(-num_chunks // share_chunks), _scratch_bytes(tile_rows, chunk_rows, group, num_panels),
                 (tile_rows, 1, chunk_rows, share_chunks, group, num_groups))


@lru_cache(maxsize=4096)
def _share_out_tiles(num_rows: int, num_blocks: int, num_panels: int, tile_bytes: int, num_threads: int) -> _Work:
    """The same for x in tiles, of which a share stays in a core's own cache while all groups go by."""
    num_groups, num_chunks = -(-num_blocks // _GROUP_BLOCKS), -(-num_rows // tiles.MAX_ROWS)
    wanted = max(-(-_ITEMS_PER_THREAD * num_threads // num_groups),
                 -(-num_rows // tiles.TILE_ROWS * tile_bytes // _SHARE_BYTES))
    share_chunks = -(-num_chunks // min(wanted, num_chunks))
    return _Work(num_groups * -(-num_chunks // share_chunks),
                 _scratch_bytes(tiles.MAX_ROWS, tiles.MAX_ROWS, _GROUP_BLOCKS, num_panels),
                 (tiles.MAX_ROWS, tiles.TILE_ROWS, tiles.MAX_ROWS, share_chunks, _GROUP_BLOCKS, num_groups))


def _scratch_bytes(tile_rows: int, chunk_rows: int, blocks: int, num_panels: int) -> int:
    return LAYOUT_BYTES + (2 * tile_rows + (1 + num_panels) * chunk_rows) * blocks * BLOCK_STEP_BYTES


@cache
def _compiled_for(dtype: torch.dtype, out_dtype: torch.dtype):
    stored, stored_out = STORED_AS[dtype], STORED_AS[out_dtype]

    def work(pointer):
        _take_items(pointer, stored, stored_out)

    name = f"product_{_instructions()}_{stored.__name__}_{stored_out.__name__}"
    parts = (__file__, dot.__file__, tiles.__file__, sums.__file__, strided.__file__, functions.__file__)
    return compile_kernel(work, _ARGUMENTS, name, *parts, numbers=STRICT)


_wide, _narrow = rows_times_blocks(_TILE_ROWS, _TILE_BLOCKS), rows_times_blocks(_TILE_ROWS, 1)


@njit(**STRICT_PART)
def _take_items(pointer, stored, stored_out):
    """One thread's part: some blocks of columns for some rows at a time, until none are left."""
    a = carray(pointer, 1)[0]
    layout, shaped_rows = take_seat(pointer), 0
    carray(pointer_to(layout, np.uint8), LAYOUT_BYTES)[:] = 0
    sums_at, all_groups, num_panels = layout + LAYOUT_BYTES, a.num_groups * a.num_matrices, 2 if a.w_up else 1
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            release_tiles(stored)
            return
        share, group = item // all_groups, item % all_groups
        matrix, block = group // a.num_groups, group % a.num_groups * a.group_blocks
        weights, ups, start, num_rows, column, x_at = a.w, a.w_up, 0, a.num_rows, matrix * a.num_columns, a.x
        if a.shares:
            own = carray(pointer_to(a.shares + matrix * _SHARE_FIELDS * 8, np.int64), _SHARE_FIELDS)
            weights, ups, start, num_rows, column = own[0], own[1], own[2], own[3], 0
        else:
            weights += matrix * a.num_blocks * a.w_block_bytes
            ups += matrix * a.num_blocks * a.w_block_bytes
            x_at += matrix * a.x_matrix_bytes
        num_blocks = min(a.group_blocks, a.num_blocks - block)
        num_columns = min(num_blocks * LANES, a.num_columns - block * LANES)
        column += block * LANES
        first_row = share * a.share_chunks * a.chunk_rows
        end_row = min(first_row + a.share_chunks * a.chunk_rows, num_rows)
        for row in range(first_row, end_row, a.chunk_rows):
            rows, first = min(a.chunk_rows, end_row - row), start + row
            tile_rows = rows if a.unit_rows == 1 else tiles.MAX_ROWS
            if tile_rows != shaped_rows:
                make_tiles(stored, tile_rows, layout)
                shaped_rows = tile_rows
            out = a.out + (first * a.out_columns + column) * size_of(stored_out)
            for panel in range(num_panels):
                w = (ups if panel else weights) + block * a.w_block_bytes
                _multiply(a, x_at + _row_offset(a, first), rows, w, num_blocks, sums_at, panel, stored)
                if panel == 0:
                    _claim(out, rows, a.out_columns * size_of(stored_out), num_columns * size_of(stored_out))
            _finish(a, sums_at, first, rows, column, num_columns, out, stored, stored_out)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _multiply(a, x, rows, w, num_blocks, sums_at, panel, stored):
    """`rows` rows times `num_blocks` blocks. Two segments of the weights serve all rows at a time."""
    sum_row = a.group_blocks * BLOCK_STEP_BYTES
    even, odd = sums_at, sums_at + a.tile_rows * sum_row
    half = odd + a.tile_rows * sum_row
    total = half + (1 + panel) * a.chunk_rows * sum_row
    num_tiles, units = (rows + a.tile_rows - 1) // a.tile_rows, (rows + a.unit_rows - 1) // a.unit_rows
    for pair in range(SEGMENTS // 2):
        for tile in range(num_tiles):
            start, end = units * tile // num_tiles * a.unit_rows, units * (tile + 1) // num_tiles * a.unit_rows
            for segment in range(2 * pair, 2 * pair + 2):
                first = segment * a.segment_steps
                _multiply_tile(a, end - start, x + _row_offset(a, start) + first * a.x_step_bytes,
                               w + first * BLOCK_STEP_BYTES, num_blocks, odd if segment % 2 else even, stored)
            join(pair, total + start * sum_row, half + start * sum_row, even, odd, (end - start) * a.group_blocks)


@njit(**STRICT_PART)
def _row_offset(a, row):
    """Where in x a row begins; of tiles, the first of each 16."""
    return row // tiles.TILE_ROWS * a.x_tile_bytes + row % tiles.TILE_ROWS * a.x_row_bytes


@njit(**STRICT_PART)
def _multiply_tile(a, rows, x, w, num_blocks, y, stored):
    """One segment's sums of one tile of rows."""
    block, y_row = 0, a.group_blocks * BLOCK_STEP_BYTES
    while block + _TILE_BLOCKS <= num_blocks:
        _wide(stored, rows, x, a.x_row_bytes, a.x_tile_bytes, a.x_step_bytes, w + block * a.w_block_bytes,
              a.w_block_bytes, y + block * BLOCK_STEP_BYTES, y_row, a.segment_steps)
        block += _TILE_BLOCKS
    while block < num_blocks:
        _narrow(stored, rows, x, a.x_row_bytes, a.x_tile_bytes, a.x_step_bytes, w + block * a.w_block_bytes,
                a.w_block_bytes, y + block * BLOCK_STEP_BYTES, y_row, a.segment_steps)
        block += 1


@njit(**STRICT_PART)
def _claim(out, rows, row_bytes, width):
    """The lines of the result into the cache while products are computed: the loads behind a store that waits for its
    line would wait, too."""
    for row in range(rows):
        for offset in range(0, width, BLOCK_STEP_BYTES):
            fetch_for_writing(out + row * row_bytes + offset)


@njit(**STRICT_PART)
def _finish(a, sums_at, first_row, rows, column, num_columns, out_at, stored, stored_out):
    """What follows the sums, by pointers: of such loops LLVM makes vectors."""
    sum_row = a.group_blocks * BLOCK_STEP_BYTES
    totals_at = sums_at + (2 * a.tile_rows + a.chunk_rows) * sum_row
    for r in range(rows):
        totals = floats(totals_at + r * sum_row)
        if a.bias:
            _add(totals, floats(a.bias + 4 * column), num_columns)
        if a.w_up:
            ups = floats(totals_at + (a.chunk_rows + r) * sum_row)
            if a.bias_up:
                _add(ups, floats(a.bias_up + 4 * column), num_columns)
            for n in range(num_columns):
                totals[n] = silu(totals[n]) * ups[n]
        if a.residual:
            at = (first_row + r) * a.residual_stride + column
            _add(totals, pointer_to(a.residual + at * size_of(stored), stored), num_columns)
        out = pointer_to(out_at + r * a.out_columns * size_of(stored_out), stored_out)
        for n in range(num_columns):
            out[n] = rounded(totals[n], stored_out)


@njit(**STRICT_PART)
def _add(totals, others, count):
    for n in range(count):
        totals[n] += wide(others[n])

"""Attention on the host with pages read in place, compiled by numba and cached on disk.

Keys are processed in blocks of 64 at absolute positions, whatever the page size. A block is packed
for the products of `dot.py` or the matrix unit (`kv_blocks.py`), or used as it is for few queries
(`small_batch.py`). It is multiplied by the queries of a tile: for a few tokens, the heads that
share a kv head. One step of an online softmax weighs it (`softmax_blocks.py`), and it is added up.

A head may have a sink, a learned score that takes part in the softmax and has no value. It is where
the softmax starts.

Every sum has one order: a score is summed in the order of channels, a token's output in the order
of positions. So a token's bits depend on its own keys and on nothing else: not on the other tokens
of the batch, not on whether it was prefilled, sampled or verified, and not on the number of
threads.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels.host.attention import row_tiling
from engine.kernels.host.attention.block_steps import add_block, add_to_few
from engine.kernels.host.attention.kv_blocks import (
    copy_values,
    pair_values,
    score_by_key,
    score_nothing,
)
from engine.kernels.host.attention.row_tiling import no_tiles, shape_tiles
from engine.kernels.host.attention.small_batch import (
    add_head,
    add_head_in_tiles,
    heads_of_item,
    most_rows,
    score_head,
    score_head_in_tiles,
)
from engine.kernels.host.attention.tile_loop import take_tiles
from engine.kernels.host.attention.workspace import CHUNK_ROWS, scratch_bytes_of
from engine.kernels.host.codegen.amx import TILE_ROWS, has_tiles, release_tiles
from engine.kernels.host.codegen.compiled import (
    STORED_AS,
    STRICT,
    Team,
    bits_of,
    compile_kernel,
    launch_integers,
    record,
)
from engine.kernels.host.codegen.dot import Form
from engine.kernels.host.tokens.row_ops import rows_for_product
from engine.kernels.rows_in_place import RowsInPlace

_ARGUMENTS = record(
    "num_rows",
    "num_tokens",
    "num_tiles",
    "tile_rows",
    "num_kv_heads",
    "share",
    "head_dim",
    "itemsize",
    "page_size",
    "table_width",
    "path_width",
    "window",
    "heads",
    "rows_by_key",
    "unit_bits",
    "pages",
    "queries",
    "query_stride",
    "tables",
    "tiles",
    "positions",
    "num_in_order",
    "paths",
    "out",
    "out_stride",
    "sinks",
)
_LOG2_E = 1.4426950408889634


def attend_in_place(
    pages: Tensor,
    queries: Tensor,
    rows: RowsInPlace,
    scale: float,
    team: Team,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with new tokens whose keys are written.

    pages is [P, 2 (k, v), num_kv_heads, page_size, D] bf16 or fp32, contiguous. queries is [T,
    num_heads, D] of the same dtype, dense within a token. scale is more than 0. sinks is
    [num_heads] fp32, as in `AttentionBackend.run`. The result is [T, num_heads, D] of the
    dtype of queries, dense within a token.

    Raises:
        InternalError: some items were not computed.
    """
    num_heads, head_dim = queries.shape[1:]
    out = rows_for_product(len(queries), num_heads * head_dim, queries.dtype).view(queries.shape)
    num_rows, table_width = rows.tables.shape
    num_kv_heads, page_size = pages.shape[2:4]
    num_tiles = rows.tiles.shape[0]
    share = num_heads // num_kv_heads
    tile_rows = share * rows.longest_tile
    tiled = pages.dtype is torch.bfloat16 and has_tiles()
    most = most_rows(pages.dtype, head_dim, tiled=tiled)
    few = 0 < tile_rows <= most
    limit = TILE_ROWS if tiled else CHUNK_ROWS
    heads = 1
    if few:
        heads = heads_of_item(num_tiles, num_kv_heads, tile_rows, limit, torch.get_num_threads())
    launch_integers(
        compiled_for(pages.dtype, tiled=tiled, few=few),
        num_tiles * num_kv_heads // heads,
        (
            num_rows,
            queries.shape[0],
            num_tiles,
            tile_rows,
            num_kv_heads,
            share,
            head_dim,
            pages.itemsize,
            page_size,
            table_width,
            rows.paths.shape[1],
            rows.window,
            heads,
            TILE_ROWS if tiled else 0,
            bits_of(scale * _LOG2_E),
            pages.data_ptr(),
            queries.data_ptr(),
            queries.stride(0) * queries.itemsize,
            rows.tables.data_ptr(),
            rows.tiles.data_ptr(),
            rows.positions.data_ptr(),
            rows.num_in_order.data_ptr(),
            rows.paths.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            0 if sinks is None else sinks.data_ptr(),
        ),
        team,
        scratch_bytes=scratch_bytes_of(head_dim, pages.itemsize, heads * tile_rows),
    )
    return out


@cache
def compiled_for(dtype: torch.dtype, *, tiled: bool, few: bool = False):
    """Compile the kernel for pages of this dtype.

    With `tiled` the matrix unit computes bf16 products. `few` selects the kernel for tiles of at
    most `small_batch.most_rows` rows.
    """
    if few:
        work = _attend_few_tiled if tiled else _attend_few
    else:
        work = _attend_tiled if tiled else _attend_fp32 if dtype is torch.float32 else _attend_bf16
    name = (
        f"attend_{STORED_AS[dtype].__name__}{'_few' if few else ''}_{'tiled' if tiled else 'plain'}"
    )
    return compile_kernel(work, _ARGUMENTS, name, numbers=STRICT)


# The parts of the kernels have module-level names. A function in a closure would be part of numba's
# cache key, which would then differ between processes.
_TILED_SCORE = row_tiling.tiled_product(adds=False)
_TILED_ADD = row_tiling.tiled_product(adds=True)
_BF16_SCORE = row_tiling.plain_product(Form.BF16, adds=False)
_BF16_ADD = row_tiling.plain_product(Form.BF16, adds=True)
_FP32_SCORE = row_tiling.plain_product(Form.FP32, adds=False)
_FP32_ADD = row_tiling.plain_product(Form.FP32, adds=True)
_SOFTEN_ROUNDED = row_tiling.softening(rounds=True)
_SOFTEN = row_tiling.softening(rounds=False)


def _attend_tiled(pointer):
    take_tiles(
        pointer,
        np.uint16,
        add_block,
        shape_tiles,
        score_by_key,
        _TILED_SCORE,
        _SOFTEN_ROUNDED,
        pair_values,
        _TILED_ADD,
    )
    release_tiles()


def _attend_bf16(pointer):
    take_tiles(
        pointer,
        np.uint16,
        add_block,
        no_tiles,
        score_nothing,
        _BF16_SCORE,
        _SOFTEN_ROUNDED,
        pair_values,
        _BF16_ADD,
    )


def _attend_few(pointer):
    take_tiles(
        pointer,
        np.uint16,
        add_to_few,
        no_tiles,
        score_nothing,
        score_head,
        _SOFTEN_ROUNDED,
        pair_values,
        add_head,
    )


def _attend_few_tiled(pointer):
    take_tiles(
        pointer,
        np.uint16,
        add_to_few,
        no_tiles,
        score_nothing,
        score_head_in_tiles,
        _SOFTEN_ROUNDED,
        pair_values,
        add_head_in_tiles,
    )
    release_tiles()


def _attend_fp32(pointer):
    take_tiles(
        pointer,
        np.float32,
        add_block,
        no_tiles,
        score_nothing,
        _FP32_SCORE,
        _SOFTEN,
        copy_values,
        _FP32_ADD,
    )

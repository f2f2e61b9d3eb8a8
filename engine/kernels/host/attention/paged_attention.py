"""Attention on the host with pages read in place, compiled by numba and cached on disk.

Keys are processed in blocks of 64 at absolute positions, whatever the page size. A block is packed
for the products of `dot.py` or the matrix unit (`kv_blocks.py`), or used as it is for few queries
(`small_batch.py`). It is multiplied by the queries of a tile: for a few tokens, the heads that
share a kv head. One step of an online softmax weighs it (`softmax_blocks.py`), and it is added up.

Every sum has one order: a score is summed in the order of channels, a token's output in the order
of positions. So a token's bits depend on its own keys and on nothing else: not on the other tokens
of the batch, not on whether it was prefilled, sampled or verified, and not on the number of
threads.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.attention import row_tiling
from engine.kernels.host.attention.kv_blocks import (
    behind_keys,
    copy_values,
    fetch_keys,
    fill_keys,
    find,
    first_block,
    first_seen,
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
from engine.kernels.host.attention.workspace import CHUNK_ROWS, list_rows, room_at, scratch_bytes_of
from engine.kernels.host.codegen.amx import TILE_ROWS, has_tiles, release_tiles
from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    bits_of,
    compile_kernel,
    count_up,
    counted_so_far,
    launch_integers,
    number_of,
    pointer_to,
    record,
    rounded,
    take_seat,
)
from engine.kernels.host.codegen.dot import LANES, Form
from engine.kernels.host.codegen.softmax_blocks import (
    BLOCK_KEYS,
    SCORE_ROW,
    STATE_BYTES,
    VECTOR_BYTES,
    turn,
)
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
)
_STATE_FLOATS = STATE_BYTES // 4
_LOG2_E = 1.4426950408889634


def attend_in_place(
    pages: Tensor, queries: Tensor, rows: RowsInPlace, scale: float, team: Team
) -> Tensor:
    """Attend with new tokens whose keys are written.

    pages is [P, 2 (k, v), num_kv_heads, page_size, D] bf16 or fp32, contiguous. queries is [T,
    num_heads, D] of the same dtype, dense within a token. scale is more than 0. The result is [T,
    num_heads, D] of that dtype, dense within a token.

    Raises:
        InternalError: some items were not computed.
    """
    num_heads, head_dim = queries.shape[1:]
    out = rows_for_product(len(queries), num_heads * head_dim, queries.dtype).view(
        len(queries), num_heads, head_dim
    )
    num_rows, table_width = rows.tables.shape
    num_kv_heads, page_size = pages.shape[2:4]
    num_tiles = rows.tiles.shape[0]
    share = num_heads // num_kv_heads
    tile_rows = share * rows.longest_tile
    tiled = pages.dtype is torch.bfloat16 and has_tiles()
    most = most_rows(pages.dtype, head_dim, tiled=tiled)
    few = 0 < tile_rows <= most
    heads = 1
    if few:
        heads = heads_of_item(
            num_tiles,
            num_kv_heads,
            tile_rows,
            TILE_ROWS if tiled else CHUNK_ROWS,
            torch.get_num_threads(),
        )
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


@njit(**STRICT_PART)
def _take_tiles(pointer, stored, add_block, shape, by_key, score, soften, fill_values, add_up):
    """Run one thread: process `a.heads` kv heads of a tile at a time until no items are left."""
    a = carray(pointer, 1)[0]
    tiles = carray(pointer_to(a.tiles, np.int32), (a.num_tiles, 3))
    positions = carray(pointer_to(a.positions, np.int32), a.num_tokens)
    in_order = carray(pointer_to(a.num_in_order, np.int32), a.num_rows)
    workspace = room_at(a, take_seat(pointer))
    found = workspace.found
    ahead = workspace.found + BLOCK_KEYS * 8
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        num_parts = a.num_kv_heads // a.heads
        kv_head = item % num_parts * a.heads
        row, first, count = tiles[item // num_parts]
        _begin(a, workspace, stored, kv_head, first, count)
        # Keys shared by all tokens come first, then the keys of each single token.
        num_shared = positions[first + count - 1] + 1
        num_passes = 1
        if a.path_width:
            num_shared = in_order[row] // BLOCK_KEYS * BLOCK_KEYS
            num_passes = 1 + count
        for own in range(num_passes):
            begin = first_block(a, positions[first])
            end = num_shared
            low = first
            high = first + count
            if own:
                begin = num_shared
                end = positions[first + own - 1] + 1
                low = first + own - 1
                high = first + own
            for start in range(begin, end, BLOCK_KEYS):
                found, ahead = ahead, found
                _find_both(
                    a,
                    pointer,
                    workspace.nothing,
                    found,
                    ahead,
                    row,
                    low,
                    kv_head,
                    start,
                    begin,
                    end,
                )
                while positions[low] < start:  # never true if each token has its own keys
                    low += 1
                add_block(
                    a,
                    workspace,
                    found,
                    ahead,
                    positions,
                    first,
                    count,
                    (low - first) * a.share,
                    (_last_seeing(a, positions, high, start) - first) * a.share,
                    start,
                    min(BLOCK_KEYS, end - start),
                    shape,
                    by_key,
                    score,
                    soften,
                    fill_values,
                    add_up,
                )
        _finish(a, workspace, stored, kv_head, first, count)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _find_both(a, pointer, nothing, found, ahead, row, token, kv_head, start, begin, end):
    """Find the addresses of the block at `start` and of the next one.

    Those of the block itself are known already, except for the first block.
    """
    # A loop, because every call site of `find` takes half a second to compile.
    for is_next in range(0 if start == begin else 1, 2):
        place = found
        of_row = row
        of_token = token
        head = kv_head
        first_key = start
        num_keys = end - start
        if is_next:
            place = ahead
            first_key = start + BLOCK_KEYS
            num_keys = num_keys - BLOCK_KEYS
        if num_keys <= 0:
            of_row, of_token, head, first_key, num_keys = _first_of_next(a, pointer)
        find(a, place, nothing, of_row, of_token, head, first_key, num_keys)


@njit(**STRICT_PART)
def _last_seeing(a, positions, high, start):
    """Return `high` without the last tokens whose windows begin after the block at `start`."""
    while first_seen(a, positions[high - 1]) >= start + BLOCK_KEYS:
        high -= 1
    return high


@njit(**STRICT_PART)
def _add_block(
    a,
    workspace,
    found,
    ahead,
    positions,
    first,
    count,
    begin,
    end,
    start,
    num_keys,
    shape,
    by_key,
    score,
    soften,
    fill_values,
    add_up,
):
    """Add the block at `start` to rows begin..end-1 of a tile of `count` tokens from `first`."""
    is_scored = count * a.share <= a.rows_by_key
    # If no other rows need the keys, the values overwrite them. With space for both and the
    # incoming page data, the nearest cache would evict each before it is needed again.
    values = workspace.values if is_scored or end - begin > CHUNK_ROWS else workspace.keys
    if is_scored:
        shape(workspace.layout, end - begin)
        by_key(a, workspace, found, 0, ahead, 0, num_keys)
    else:
        fill_keys(a, workspace, found, num_keys)
    fetched = 0
    for row in range(begin, end, CHUNK_ROWS):
        num_rows = min(CHUNK_ROWS, end - row)
        scores = workspace.scores
        fetched_then = BLOCK_KEYS * (row + num_rows - begin) // (end - begin)
        shape(workspace.layout, num_rows)
        if is_scored:  # the next keys have been prefetched already
            scores += row * SCORE_ROW
        else:
            fetch_keys(a, ahead, fetched, fetched_then, 0)
            score(
                workspace.queries + row * workspace.query_bytes,
                workspace.query_bytes,
                workspace.keys,
                workspace.key_block,
                scores,
                SCORE_ROW,
                -(-a.head_dim * a.itemsize // 4),
                num_rows,
                -(-_num_seen(a, positions, first, row + num_rows, start, num_keys) // LANES),
            )
        _weigh(
            a,
            workspace,
            positions,
            scores,
            workspace.weights,
            first,
            row,
            row,
            num_rows,
            start,
            num_keys,
            soften,
        )
        if row == begin:
            fill_values(a, workspace, values, found, num_keys)
        fetch_keys(a, ahead, fetched, fetched_then, behind_keys(a))
        fetched = fetched_then
        add_up(
            workspace.weights,
            workspace.weight_bytes,
            values,
            workspace.value_block,
            workspace.sums + row * workspace.sum_bytes,
            workspace.sum_bytes,
            -(-_num_seen(a, positions, first, row + num_rows, start, num_keys) * a.itemsize // 4),
            num_rows,
            workspace.value_blocks,
        )


@njit(**STRICT_PART)
def _num_seen(a, positions, first, end, start, num_keys):
    """Return the number of the block's keys that the tile's rows before `end` see.

    It is that of the last of these rows, at most the size of the block.
    """
    return min(num_keys, positions[first + (end - 1) // a.share] + 1 - start)


@njit(**STRICT_PART)
def _add_to_few(
    a,
    workspace,
    found,
    ahead,
    positions,
    first,
    count,
    begin,
    end,
    start,
    num_keys,
    shape,
    by_key,
    score,
    soften,
    fill_values,
    add_up,
):
    """Add the block to each of the item's heads, multiplying keys and values without packing."""
    num_rows = end - begin
    of_head = count * a.share
    for head in range(a.heads):
        row = head * of_head + begin
        score(a, workspace, found, head, row, num_rows, num_keys)
        _weigh(
            a,
            workspace,
            positions,
            workspace.scores + row * SCORE_ROW,
            workspace.weights + row * workspace.weight_bytes,
            first,
            begin,
            row,
            num_rows,
            start,
            num_keys,
            soften,
        )
    for head in range(a.heads):
        add_up(a, workspace, found, ahead, head, head * of_head + begin, num_rows, num_keys)


@njit(**STRICT_PART)
def _first_of_next(a, pointer):
    """Return the first block of the item that this thread probably processes next.

    The result is its row, token, kv head, position and number of keys; the number is 0 without such
    an item. Another thread may take the item first.
    """
    item = counted_so_far(pointer, NEXT)
    num_parts = a.num_kv_heads // a.heads
    tiles = carray(pointer_to(a.tiles, np.int32), (a.num_tiles, 3))
    row, first, _ = tiles[item // num_parts if item < a.num_items else 0]
    start = first_block(a, carray(pointer_to(a.positions, np.int32), a.num_tokens)[first])
    num_keys = carray(pointer_to(a.num_in_order, np.int32), a.num_rows)[row] - start
    return row, first, item % num_parts * a.heads, start, num_keys if item < a.num_items else 0


@njit(**STRICT_PART)
def _begin(a, workspace, stored, kv_head, first, count):
    """Copy the tile's queries to the workspace and clear the sums."""
    of_head = count * a.share
    num_rows = a.heads * of_head
    queries = carray(
        pointer_to(workspace.queries, stored), (num_rows, workspace.query_bytes // a.itemsize)
    )
    for row in range(num_rows):
        given = a.queries + (first + row % of_head // a.share) * a.query_stride
        head = (kv_head + row // of_head) * a.share + row % a.share
        source = carray(pointer_to(given + head * a.head_dim * a.itemsize, stored), a.head_dim)
        target = queries[row]
        for channel in range(a.head_dim):
            target[channel] = source[channel]
    if num_rows <= a.rows_by_key:
        list_rows(workspace.found, workspace.queries, workspace.query_bytes)
        for offset in range(0, workspace.query_bytes, VECTOR_BYTES):
            turn(workspace.found, offset, workspace.keys + offset * LANES, VECTOR_BYTES)
    state = carray(pointer_to(workspace.state, np.float32), (num_rows, _STATE_FLOATS))
    state[:] = 0
    state[:, LANES] = -np.inf
    carray(pointer_to(workspace.sums, np.float32), (num_rows, workspace.value_blocks * LANES))[
        :
    ] = 0


@njit(**STRICT_PART)
def _weigh(
    a,
    workspace,
    positions,
    scores,
    weights,
    first,
    tile_row,
    row,
    num_rows,
    start,
    num_keys,
    soften,
):
    """Convert the scores of rows from `row` on with the block at `start` to weights.

    `tile_row` is the place of the first row in its tile. The rows' sums are rescaled.
    """
    num_seen = workspace.seen
    if _all_see(
        a,
        positions,
        first + tile_row // a.share,
        first + (tile_row + num_rows - 1) // a.share,
        start,
        num_keys,
    ):
        num_seen = 0
    else:
        _hide(a, workspace, positions, scores, first, tile_row, num_rows, start, num_keys)
    soften(
        scores,
        weights,
        workspace.state + row * STATE_BYTES,
        num_seen,
        number_of(a.unit_bits),
        workspace.sums + row * workspace.sum_bytes,
        workspace.sum_bytes,
        workspace.value_blocks,
        num_rows,
    )


@njit(**STRICT_PART)
def _all_see(a, positions, first, last, start, num_keys):
    """Return whether the tokens first..last see the whole block of keys.

    The result is False if the answer would need a lookup for each token.
    """
    is_in_order = a.path_width == 0
    return (
        is_in_order
        and num_keys == BLOCK_KEYS
        and positions[first] + 1 >= start + BLOCK_KEYS
        and first_seen(a, positions[last]) <= start
    )


@njit(**STRICT_PART)
def _hide(a, workspace, positions, scores, first, tile_row, num_rows, start, num_keys):
    """Store the number of the block's keys that each row sees, and hide keys before its window."""
    seen = carray(pointer_to(workspace.seen, np.int64), CHUNK_ROWS)
    for place in range(num_rows):
        position = positions[first + (tile_row + place) // a.share]
        seen[place] = max(0, min(num_keys, position + 1 - start))
        hidden = first_seen(a, position) - start
        if hidden > 0:
            carray(pointer_to(scores + place * SCORE_ROW, np.float32), BLOCK_KEYS)[
                :hidden
            ] = -np.inf


@njit(**STRICT_PART)
def _finish(a, workspace, stored, kv_head, first, count):
    out = carray(pointer_to(a.out, stored), (a.num_tokens, a.out_stride))
    of_head = count * a.share
    state = carray(pointer_to(workspace.state, np.float32), (a.heads * of_head, _STATE_FLOATS))
    sums = carray(
        pointer_to(workspace.sums, np.float32), (a.heads * of_head, workspace.value_blocks * LANES)
    )
    for row in range(a.heads * of_head):
        total = np.float32(0)
        for lane in range(LANES):
            total += state[row, lane]
        source = sums[row]
        head = (kv_head + row // of_head) * a.share + row % a.share
        target = out[first + row % of_head // a.share, head * a.head_dim :][: a.head_dim]
        for channel in range(a.head_dim):
            # A sum of zero may be -0, depending on whether keys followed that the token does not
            # see.
            target[channel] = rounded(source[channel] / total + np.float32(0), stored)


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
    _take_tiles(
        pointer,
        np.uint16,
        _add_block,
        shape_tiles,
        score_by_key,
        _TILED_SCORE,
        _SOFTEN_ROUNDED,
        pair_values,
        _TILED_ADD,
    )
    release_tiles()


def _attend_bf16(pointer):
    _take_tiles(
        pointer,
        np.uint16,
        _add_block,
        no_tiles,
        score_nothing,
        _BF16_SCORE,
        _SOFTEN_ROUNDED,
        pair_values,
        _BF16_ADD,
    )


def _attend_few(pointer):
    _take_tiles(
        pointer,
        np.uint16,
        _add_to_few,
        no_tiles,
        score_nothing,
        score_head,
        _SOFTEN_ROUNDED,
        pair_values,
        add_head,
    )


def _attend_few_tiled(pointer):
    _take_tiles(
        pointer,
        np.uint16,
        _add_to_few,
        no_tiles,
        score_nothing,
        score_head_in_tiles,
        _SOFTEN_ROUNDED,
        pair_values,
        add_head_in_tiles,
    )
    release_tiles()


def _attend_fp32(pointer):
    _take_tiles(
        pointer,
        np.float32,
        _add_block,
        no_tiles,
        score_nothing,
        _FP32_SCORE,
        _SOFTEN,
        copy_values,
        _FP32_ADD,
    )

"""One block of keys in the attention of a tile: scores, weights, and the weighted sum."""

import numpy as np
from numba import carray, njit

from engine.kernels.host.attention.kv_blocks import behind_keys, fetch_keys, fill_keys, first_seen
from engine.kernels.host.attention.workspace import CHUNK_ROWS
from engine.kernels.host.codegen.compiled import STRICT_PART, number_of, pointer_to
from engine.kernels.host.codegen.softmax_blocks import BLOCK_KEYS, SCORE_ROW, STATE_BYTES
from engine.kernels.host.codegen.vectors import LANES


@njit(**STRICT_PART)
def add_block(
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
def add_to_few(
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

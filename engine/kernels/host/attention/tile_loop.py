"""The loop of a thread over the tiles of paged attention."""

import numpy as np
from numba import carray, njit

from engine.kernels.host.attention.kv_blocks import find, first_block, first_seen
from engine.kernels.host.attention.workspace import list_rows, room_at
from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STRICT_PART,
    count_up,
    counted_so_far,
    pointer_to,
    rounded,
    take_seat,
)
from engine.kernels.host.codegen.lane_shuffles import turn
from engine.kernels.host.codegen.softmax_blocks import BLOCK_KEYS, STATE_BYTES, VECTOR_BYTES
from engine.kernels.host.codegen.vectors import LANES

_STATE_FLOATS = STATE_BYTES // 4


@njit(**STRICT_PART)
def take_tiles(pointer, stored, add_block, shape, by_key, score, soften, fill_values, add_up):
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
    if a.sinks:
        # A sink is a first key without a value: it has the maximum so far, and the weight 1.
        sinks = carray(pointer_to(a.sinks, np.float32), a.num_kv_heads * a.share)
        for row in range(num_rows):
            state[row, 0] = 1
            state[row, LANES] = sinks[(kv_head + row // of_head) * a.share + row % a.share]
    carray(pointer_to(workspace.sums, np.float32), (num_rows, workspace.value_blocks * LANES))[
        :
    ] = 0


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

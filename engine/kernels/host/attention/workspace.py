"""Working memory of a thread of the attention kernel (`paged_attention.py`)."""

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import carray, njit

from engine.kernels.host.codegen.amx import LAYOUT_BYTES, MAX_ROWS
from engine.kernels.host.codegen.compiled import STRICT_PART, pointer_to
from engine.kernels.host.codegen.softmax_blocks import (
    BLOCK_KEYS,
    SCORE_ROW,
    STATE_BYTES,
    VECTOR_BYTES,
)
from engine.kernels.host.codegen.strided_loops import clear
from engine.kernels.host.codegen.vectors import LANES

# Rows of a tile that go through both products of a block before the next rows.
CHUNK_ROWS = MAX_ROWS


class KernelWorkspace(NamedTuple):
    """Addresses in a thread's working memory, and the distances of rows or blocks in bytes.

    Rows of queries, keys and values are padded to whole vectors.
    """

    queries: int  # [tile rows, words] in the dtype of queries; at least 16 rows
    query_bytes: int
    sums: int  # [tile rows, channels] fp32
    sum_bytes: int
    state: int  # [tile rows, 32] fp32, see `soften_for`
    scores: int  # [CHUNK_ROWS, BLOCK_KEYS] fp32
    weights: int  # [CHUNK_ROWS, BLOCK_KEYS] in the dtype of keys
    weight_bytes: int
    keys: int  # [BLOCK_KEYS / 16][words][16]
    key_block: int
    values: int  # [channels / 16][keys or pairs][16]
    value_block: int
    value_blocks: int
    by_key: int  # [BLOCK_KEYS, 16] fp32, scores by key
    lines: int  # [16] int64, the addresses of the first 16 lines of `by_key`
    found: int  # [2, BLOCK_KEYS] int64, the addresses of a block's keys and of the next block's
    tails: int  # [16] words that do not fill a whole vector
    found_tails: int  # [16] int64, the addresses of `tails`
    nothing: int  # a key of zeros
    seen: int  # [CHUNK_ROWS] int64, the number of a block's keys that a row sees
    layout: int  # configuration of the matrix unit's tiles


@cache
def scratch_bytes_of(head_dim: int, itemsize: int, num_rows: int) -> int:
    """Return the size of the memory that `room_at` divides.

    num_rows is the maximum of an item, all heads together.
    """
    key_bytes = -(-head_dim * itemsize // VECTOR_BYTES) * VECTOR_BYTES
    sum_bytes = -(-head_dim // LANES) * VECTOR_BYTES
    of_row = key_bytes + sum_bytes + STATE_BYTES
    of_key = key_bytes + sum_bytes * itemsize // 4 + VECTOR_BYTES + 2 * 8
    return (
        max(num_rows, LANES) * of_row
        + CHUNK_ROWS * BLOCK_KEYS * (4 + itemsize)
        + BLOCK_KEYS * of_key
        + LANES * (VECTOR_BYTES + 2 * 8)
        + key_bytes
        + CHUNK_ROWS * 8
        + LAYOUT_BYTES
    )


@njit(**STRICT_PART)
def room_at(a, memory):
    """Clear a thread's memory and divide it."""
    clear(memory, a.scratch_bytes // 4)
    query_bytes = -(-a.head_dim * a.itemsize // VECTOR_BYTES) * VECTOR_BYTES
    weight_bytes = BLOCK_KEYS * a.itemsize
    value_blocks = -(-a.head_dim // LANES)
    sum_bytes = value_blocks * VECTOR_BYTES
    key_block = query_bytes * LANES
    value_block = weight_bytes * LANES
    num_rows = max(a.heads * a.tile_rows, LANES)
    sums = memory + num_rows * query_bytes
    state = sums + num_rows * sum_bytes
    scores = state + num_rows * STATE_BYTES
    weights = scores + CHUNK_ROWS * SCORE_ROW
    keys = weights + CHUNK_ROWS * weight_bytes
    values = keys + (BLOCK_KEYS // LANES) * key_block
    by_key = values + value_blocks * value_block
    tails = by_key + BLOCK_KEYS * VECTOR_BYTES
    nothing = tails + LANES * VECTOR_BYTES
    seen = nothing + query_bytes
    layout = seen + CHUNK_ROWS * 8
    found = layout + LAYOUT_BYTES
    found_tails = found + 2 * BLOCK_KEYS * 8
    lines = found_tails + LANES * 8
    list_rows(found_tails, tails, VECTOR_BYTES)
    list_rows(lines, by_key, VECTOR_BYTES)
    return KernelWorkspace(
        memory,
        query_bytes,
        sums,
        sum_bytes,
        state,
        scores,
        weights,
        weight_bytes,
        keys,
        key_block,
        values,
        value_block,
        value_blocks,
        by_key,
        lines,
        found,
        tails,
        found_tails,
        nothing,
        seen,
        layout,
    )


@njit(**STRICT_PART)
def list_rows(addresses, first, row_bytes):
    """Store the addresses of 16 rows, for `turn`."""
    listed = carray(pointer_to(addresses, np.int64), LANES)
    for row in range(LANES):
        listed[row] = first + row * row_bytes

"""What a thread of the attention kernel (`in_place.py`) keeps between loads of its pages."""

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from engine.kernels.host.blocks import BLOCK_KEYS, VECTOR_BYTES
from engine.kernels.host.compiled import STRICT_PART, pointer_to
from engine.kernels.host.dot import LANES
from engine.kernels.host.strided import clear

STATE_BYTES = 2 * VECTOR_BYTES


class Room(NamedTuple):
    """Addresses of what a thread keeps, and how many bytes apart rows or blocks of it lie. Rows of queries, keys and
    values are padded to whole vectors."""

    queries: int  # [tile rows, words], as they are stored
    query_bytes: int
    scores: int  # [tile rows, BLOCK_KEYS] fp32
    weights: int  # [tile rows, BLOCK_KEYS], as keys are stored
    weight_bytes: int
    sums: int  # [tile rows, channels] fp32
    sum_bytes: int
    state: int  # [tile rows, 32] fp32, see `soften_for`
    keys: int  # [BLOCK_KEYS / 16][words][16]
    key_block: int
    values: int  # [channels / 16][keys or pairs][16]
    value_block: int
    value_blocks: int
    found: int  # [2, BLOCK_KEYS] int64, addresses of a block's keys and the next one's
    tails: int  # [16] words that fill no whole vector, and
    found_tails: int  # [16] int64, their addresses
    nothing: int  # a key of zeros
    shapes: int  # 64 bytes that configure the matrix unit


def scratch_bytes_of(head_dim: int, itemsize: int, tile_rows: int) -> int:
    """What `room_at` shares out."""
    key_bytes = -(-head_dim * itemsize // VECTOR_BYTES) * VECTOR_BYTES
    sum_bytes = -(-head_dim // LANES) * VECTOR_BYTES
    of_row = key_bytes + BLOCK_KEYS * (4 + itemsize) + sum_bytes + STATE_BYTES
    of_key = key_bytes + sum_bytes * itemsize // 4 + 16
    return tile_rows * of_row + BLOCK_KEYS * of_key + LANES * (VECTOR_BYTES + 8) + key_bytes + VECTOR_BYTES


@njit(**STRICT_PART)
def room_at(a, memory):
    """Of a thread's seat, which becomes zeros."""
    clear(memory, a.scratch_bytes // 4)
    query_bytes = -(-a.head_dim * a.itemsize // VECTOR_BYTES) * VECTOR_BYTES
    weight_bytes, value_blocks = BLOCK_KEYS * a.itemsize, -(-a.head_dim // LANES)
    sum_bytes, key_block, value_block = value_blocks * VECTOR_BYTES, query_bytes * LANES, weight_bytes * LANES
    scores = memory + a.tile_rows * query_bytes
    weights = scores + a.tile_rows * BLOCK_KEYS * 4
    sums = weights + a.tile_rows * weight_bytes
    state = sums + a.tile_rows * sum_bytes
    keys = state + a.tile_rows * STATE_BYTES
    values = keys + (BLOCK_KEYS // LANES) * key_block
    tails = values + value_blocks * value_block
    nothing = tails + LANES * VECTOR_BYTES
    shapes = nothing + query_bytes
    found = shapes + VECTOR_BYTES
    found_tails = found + 2 * BLOCK_KEYS * 8
    addresses = carray(pointer_to(found_tails, np.int64), LANES)
    for row in range(LANES):
        addresses[row] = tails + row * VECTOR_BYTES
    return Room(memory, query_bytes, scores, weights, weight_bytes, sums, sum_bytes, state, keys, key_block, values,
                 value_block, value_blocks, found, tails, found_tails, nothing, shapes)

"""Transfer of key and value blocks from pages to the products of attention (`paged_attention.py`).

Pages come from memory, and a thread with few queries per key is limited by memory. So the next
block is prefetched: with few queries while this block is read, with many while this block is
multiplied.
"""

import numpy as np
from numba import carray, njit

from engine.kernels.host.codegen.amx import tile_block
from engine.kernels.host.codegen.compiled import STRICT_PART, pointer_to
from engine.kernels.host.codegen.lane_shuffles import put_in_pairs, turn, turn_and_fetch
from engine.kernels.host.codegen.softmax_blocks import BLOCK_KEYS, SCORE_ROW, VECTOR_BYTES
from engine.kernels.host.codegen.strided_loops import fetch_line, integers
from engine.kernels.host.codegen.vectors import LANES


@njit(**STRICT_PART)
def first_seen(a, position):
    """Return the first key that a token at `position` sees."""
    return max(0, position - a.window)


@njit(**STRICT_PART)
def first_block(a, position):
    """Return the start of the block that contains that key."""
    return first_seen(a, position) // BLOCK_KEYS * BLOCK_KEYS


@njit(**STRICT_PART)
def find(a, found, nothing, row, token, kv_head, start, num_keys):
    """Find the addresses of the block's keys start .. start + num_keys - 1 as `token` sees them.

    The remaining places get the address of the last key, or `nothing` if there are no keys.
    """
    num_keys = max(0, min(BLOCK_KEYS, num_keys))
    found = carray(pointer_to(found, np.int64), BLOCK_KEYS)
    table = carray(pointer_to(a.tables, np.int32), (a.num_rows, a.table_width))[row]
    path = carray(pointer_to(a.paths, np.int64), (a.num_tokens, a.path_width))[token]
    in_order = carray(pointer_to(a.num_in_order, np.int32), a.num_rows)[row]
    key_bytes = a.head_dim * a.itemsize
    page_size = a.page_size
    of_page = 2 * a.num_kv_heads * page_size * key_bytes
    of_head = kv_head * page_size * key_bytes
    base = a.pages + of_head
    place = start // page_size
    offset = start % page_size
    key = 0
    while key < min(num_keys, in_order - start):
        last = min(num_keys, in_order - start, key + page_size - offset)
        address = base + table[place] * of_page + offset * key_bytes
        while key < last:
            found[key] = address
            address += key_bytes
            key += 1
        place = place + 1
        offset = 0
    while key < num_keys:
        slot = path[start + key - in_order]
        found[key] = base + slot // page_size * of_page + slot % page_size * key_bytes
        key += 1
    while key < BLOCK_KEYS:
        found[key] = found[key - 1] if key else nothing
        key += 1
    # The content before the window is arbitrary. Any visible key can take its place, because its
    # weight is 0.
    hidden = first_seen(a, carray(pointer_to(a.positions, np.int32), a.num_tokens)[token]) - start
    for key in range(hidden):
        found[key] = found[hidden]


@njit(**STRICT_PART)
def fill_keys(a, room, found, num_keys):
    """Pack a block's keys in the layout of `dot.py`, leaving out groups of 16 without any key."""
    key_bytes = a.head_dim * a.itemsize
    whole = key_bytes // VECTOR_BYTES * VECTOR_BYTES
    num_groups = -(-num_keys // LANES)
    for group in range(num_groups):
        at = found + group * LANES * 8
        for offset in range(0, whole, VECTOR_BYTES):
            turn(at, offset, room.keys + group * room.key_block + offset * LANES, VECTOR_BYTES)
        if whole < key_bytes:
            _copy_halves(at, whole, (key_bytes - whole) // 2, room.tails, VECTOR_BYTES)
            turn(
                room.found_tails,
                0,
                room.keys + group * room.key_block + whole * LANES,
                VECTOR_BYTES,
            )


@njit(**STRICT_PART)
def score_by_key(a, room, found, offset, ahead, then, num_keys):
    """Score a block by transposing the queries, at most 16, instead of the keys.

    Keys are multiplied in place, `offset` bytes after the addresses. Each score is the same sum as
    that of `fill_keys` and a product of the queries. The data `then` bytes after the addresses at
    `ahead` is prefetched.
    """
    key_bytes = a.head_dim * a.itemsize
    words = room.query_bytes // 4
    copied = room.keys + room.key_block
    num_groups = -(-num_keys // LANES)
    for group in range(num_groups):
        at = found + group * LANES * 8
        keys = integers(at)[0] + offset
        distance = key_bytes
        if key_bytes < room.query_bytes or not _lie_in_line(at, key_bytes):
            _copy_halves(at, offset, a.head_dim, copied, room.query_bytes)
            _clear_ends(copied, key_bytes, room.query_bytes)
            keys = copied
            distance = room.query_bytes
        by_key = group * LANES * VECTOR_BYTES
        # Consecutive lines are prefetched, half of a group's keys in each part: they are on one
        # page, unless pages are smaller.
        _KEYS_BY_QUERIES(
            keys,
            distance,
            room.keys,
            room.key_block,
            room.by_key + by_key,
            VECTOR_BYTES,
            words,
            integers(ahead)[group * LANES] + then,
        )
        turn_and_fetch(
            room.lines,
            by_key,
            room.scores + group * VECTOR_BYTES,
            SCORE_ROW,
            integers(ahead)[group * LANES + LANES // 2] + then,
            words,
        )
    fetch_keys(a, ahead, num_groups * LANES, BLOCK_KEYS, then)


# A step has 16 words of 16 keys. For each step, half of those keys have that number of lines.
_KEYS_BY_QUERIES = tile_block(1, 1, second=True, fetched=LANES // 2)


@njit(**STRICT_PART)
def score_nothing(a, room, found, offset, ahead, then, num_keys):
    """Do nothing; used by products without rows of keys."""


@njit(**STRICT_PART)
def _lie_in_line(found, distance):
    addresses = carray(pointer_to(found, np.int64), LANES)
    apart = 0
    for key in range(1, LANES):
        apart |= addresses[key] - addresses[key - 1] ^ distance
    return apart == 0


@njit(**STRICT_PART)
def _copy_halves(found, offset, num_halves, out, out_row):
    """Copy `num_halves` 16-bit words from `offset` bytes after each of 16 addresses."""
    addresses = carray(pointer_to(found, np.int64), LANES)
    for row in range(LANES):
        source = carray(pointer_to(addresses[row] + offset, np.uint16), num_halves)
        target = carray(pointer_to(out + row * out_row, np.uint16), num_halves)
        for place in range(num_halves):
            target[place] = source[place]


@njit(**STRICT_PART)
def _clear_ends(rows, begin, row_bytes):
    for row in range(LANES):
        ends = carray(
            pointer_to(rows + row * row_bytes + begin, np.uint16), (row_bytes - begin) // 2
        )
        ends[:] = 0


@njit(**STRICT_PART)
def pair_values(a, room, values, found, num_keys):
    """Pack a block's values in bf16, [channels / 16][pairs][16][2].

    Zeros fill up the pairs to a multiple of 16.
    """
    pair_values_at(a, room, values, found, behind_keys(a), found, 0, num_keys, 0)


@njit(**STRICT_PART)
def pair_values_at(a, room, values, found, offset, ahead, then, num_keys, fetched):
    """Pack the bf16 values that are `offset` bytes after the addresses.

    For each pair of values, `fetched` of the addresses at `ahead` are prefetched, `then` bytes
    after them.
    """
    found = carray(pointer_to(found, np.int64), BLOCK_KEYS)
    whole = a.head_dim // (2 * LANES) * 2 * LANES
    num_pairs = -(-num_keys // (2 * LANES)) * LANES
    for pair in range(num_pairs):
        first = room.nothing
        second = room.nothing
        if 2 * pair < num_keys:
            first = found[2 * pair] + offset
        if 2 * pair + 1 < num_keys:
            second = found[2 * pair + 1] + offset
        fetch_keys(a, ahead, fetched * pair, fetched * (pair + 1), then)
        for channel in range(0, whole, 2 * LANES):
            put_in_pairs(
                first + channel * 2,
                second + channel * 2,
                values + channel // LANES * room.value_block + pair * VECTOR_BYTES,
                room.value_block,
            )
        for channel in range(whole, a.head_dim):
            place = (
                values
                + channel // LANES * room.value_block
                + pair * VECTOR_BYTES
                + channel % LANES * 4
            )
            words = carray(pointer_to(place, np.uint16), 2)
            words[0] = carray(pointer_to(first + channel * 2, np.uint16), 1)[0]
            words[1] = carray(pointer_to(second + channel * 2, np.uint16), 1)[0]
    fetch_keys(a, ahead, fetched * num_pairs, fetched * BLOCK_KEYS // 2, then)


@njit(**STRICT_PART)
def copy_values(a, room, values, found, num_keys):
    """Copy a block's values in fp32, [channels / 16][keys][16]."""
    found = carray(pointer_to(found, np.int64), BLOCK_KEYS)
    behind = behind_keys(a)
    for key in range(num_keys):
        source = carray(pointer_to(found[key] + behind, np.float32), a.head_dim)
        for channel in range(0, a.head_dim, LANES):
            place = values + channel // LANES * room.value_block + key * VECTOR_BYTES
            target = carray(pointer_to(place, np.float32), LANES)
            for lane in range(min(LANES, a.head_dim - channel)):
                target[lane] = source[channel + lane]


@njit(**STRICT_PART)
def behind_keys(a):
    """Return the distance in bytes from a key to its value."""
    return a.num_kv_heads * a.page_size * a.head_dim * a.itemsize


@njit(**STRICT_PART)
def fetch_keys(a, found, begin, end, offset):
    """Prefetch the data `offset` bytes after some of the addresses, line by line.

    The hardware prefetcher follows such a pattern. Only a few lines are requested at a time: more
    than the number of possible outstanding loads would have to wait.
    """
    addresses = carray(pointer_to(found, np.int64), BLOCK_KEYS)
    for key in range(begin, end):
        for line in range(0, a.head_dim * a.itemsize, VECTOR_BYTES):
            fetch_line(addresses[key] + offset + line)

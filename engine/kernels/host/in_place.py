"""Attention on the host, over pages where they lie. Compiled by numba, kept for the next process.

Keys are taken in blocks of 64 at absolute positions, whatever the page size. A block is packed for the products of
`dot.py`, multiplied with all queries of a tile (of a few tokens the heads that share a kv head), weighed by one step of
an online softmax (`blocks.py`) and added up. Every sum has one order: a score's is that of the channels, a token's
output takes its keys by position. So a token's bits depend on its own keys and on nothing else: not on what it was
computed with, not on whether it was read, drawn or verified, not on the number of threads.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host import amx, any_rows, blocks, dot, room, strided
from engine.kernels.host.amx import TILE_ROWS, has_tiles
from engine.kernels.host.blocks import BLOCK_KEYS, VECTOR_BYTES, put_in_pairs, soften_for, turn
from engine.kernels.host.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    bits_of,
    compile_kernel,
    count_up,
    launch_integers,
    number_of,
    pointer_to,
    record,
    rounded,
    take_seat,
)
from engine.kernels.host.dot import LANES, Form
from engine.kernels.host.room import STATE_BYTES, room_at, scratch_bytes_of
from engine.kernels.host.strided import fetch_line
from engine.kernels.rows_in_place import RowsInPlace

_ARGUMENTS = record("num_rows", "num_tokens", "num_tiles", "tile_rows", "num_kv_heads", "share", "head_dim", "itemsize",
                    "page_size", "table_width", "path_width", "unit_bits", "pages", "queries", "tables", "tiles",
                    "positions", "num_in_order", "paths", "out")
_STATE_FLOATS = STATE_BYTES // 4
_FEW_ROWS = 32  # a thread that multiplies keys by no more waits for memory
_LOG2_E = 1.4426950408889634


def attend_in_place(pages: Tensor, queries: Tensor, rows: RowsInPlace, scale: float, team: Team) -> Tensor:
    """Softmax attention of new tokens whose keys are written.

    pages: [P, 2 (k, v), num_kv_heads, page_size, D] bf16 or fp32, contiguous; queries: [T, num_heads, D] of the same
    type, contiguous; scale: more than 0. Returns [T, num_heads, D] of that type.

    Raises:
        InternalError: not all of it was computed.
    """
    out = torch.empty_like(queries)
    num_rows, table_width = rows.tables.shape
    num_kv_heads, page_size, head_dim = pages.shape[2:]
    num_tiles, share = rows.tiles.shape[0], queries.shape[1] // num_kv_heads
    tile_rows = share * rows.longest_tile
    launch_integers(
        compiled_for(pages.dtype, tiled=pages.dtype is torch.bfloat16 and has_tiles()), num_tiles * num_kv_heads,
        (num_rows, queries.shape[0], num_tiles, tile_rows, num_kv_heads, share, head_dim, pages.itemsize, page_size,
         table_width, rows.paths.shape[1], bits_of(scale * _LOG2_E), pages.data_ptr(), queries.data_ptr(),
         rows.tables.data_ptr(), rows.tiles.data_ptr(), rows.positions.data_ptr(), rows.num_in_order.data_ptr(),
         rows.paths.data_ptr(), out.data_ptr()),
        team, scratch_bytes=scratch_bytes_of(head_dim, pages.itemsize, tile_rows))
    return out


@cache
def compiled_for(dtype: torch.dtype, *, tiled: bool):
    """The kernel for pages of this type, with bf16's products by the matrix unit if `tiled`."""
    work = _attend_tiled if tiled else _attend_fp32 if dtype is torch.float32 else _attend_bf16
    name = f"attend_{STORED_AS[dtype].__name__}_{'tiled' if tiled else 'plain'}"
    parts = (__file__, any_rows.__file__, blocks.__file__, dot.__file__, amx.__file__, strided.__file__, room.__file__)
    return compile_kernel(work, _ARGUMENTS, name, *parts, numbers=STRICT)


@njit(**STRICT_PART)
def _take_tiles(pointer, stored, score, soften, fill_values, add_up, shape_tiles):
    """One thread's part: a tile's heads of one kv head at a time, until none is left."""
    a = carray(pointer, 1)[0]
    tiles = carray(pointer_to(a.tiles, np.int32), (a.num_tiles, 3))
    positions = carray(pointer_to(a.positions, np.int32), a.num_tokens)
    in_order = carray(pointer_to(a.num_in_order, np.int32), a.num_rows)
    room = room_at(a, take_seat(pointer))
    found, ahead = room.found, room.found + BLOCK_KEYS * 8
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        kv_head = item % a.num_kv_heads
        row, first, count = tiles[item // a.num_kv_heads]
        _begin(a, room, stored, kv_head, first, count)
        # The keys that all tokens have in common, then those that each has of its own.
        num_shared, num_passes = positions[first + count - 1] + 1, 1
        if a.path_width:
            num_shared, num_passes = in_order[row] // BLOCK_KEYS * BLOCK_KEYS, 1 + count
        for own in range(num_passes):
            begin, end, low, high = 0, num_shared, first, first + count
            if own:
                begin, end, low, high = num_shared, positions[first + own - 1] + 1, first + own - 1, first + own
            shape_tiles(room.shapes, (high - low) * a.share)
            for start in range(begin, end, BLOCK_KEYS):
                num_keys = min(BLOCK_KEYS, end - start)
                found, ahead = ahead, found
                if start == begin:
                    _find(a, found, room.nothing, row, low, kv_head, start, num_keys)
                _find(a, ahead, room.nothing, row, low, kv_head, start + BLOCK_KEYS, end - start - BLOCK_KEYS)
                _fill_keys(a, room, found, num_keys)
                while positions[low] < start:  # never where each has its own
                    low += 1
                first_row, end_row = _rows_of(a, low - first, high - first)
                _weigh(a, room, positions, first, first_row, end_row, start, num_keys, score, soften)
                fill_values(a, room, found, ahead, num_keys)
                add_up(room.weights + first_row * room.weight_bytes, room.weight_bytes, room.values, room.value_block,
                       room.sums + first_row * room.sum_bytes, room.sum_bytes, -(-num_keys * a.itemsize // 4),
                       end_row - first_row, room.value_blocks)
        _finish(a, room, stored, kv_head, first, count)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _begin(a, room, stored, kv_head, first, count):
    """The tile's queries side by side; nothing is added up yet."""
    num_rows = count * a.share
    given = carray(pointer_to(a.queries, stored), (a.num_tokens, a.num_kv_heads, a.share, a.head_dim))
    queries = carray(pointer_to(room.queries, stored), (a.tile_rows, room.query_bytes // a.itemsize))
    for row in range(num_rows):
        source, target = given[first + row // a.share, kv_head, row % a.share], queries[row]
        for channel in range(len(source)):
            target[channel] = source[channel]
    state = carray(pointer_to(room.state, np.float32), (a.tile_rows, _STATE_FLOATS))
    state[:num_rows] = 0
    state[:num_rows, LANES] = -np.inf
    carray(pointer_to(room.sums, np.float32), (a.tile_rows, room.value_blocks * LANES))[:num_rows] = 0


@njit(**STRICT_PART)
def _rows_of(a, low, high):
    """The rows of tokens low..high-1 of a tile."""
    begin, end = low * a.share, high * a.share
    if not a.path_width:  # so that the rows that fill no tile are the last ones
        begin = begin // TILE_ROWS * TILE_ROWS
    return begin, end


@njit(**STRICT_PART)
def _weigh(a, room, positions, first, begin, end, start, num_keys, score, soften):
    """Scores of these rows with the block of keys at `start` become weights; what the rows have added up is brought to
    the same scale."""
    score(room.queries + begin * room.query_bytes, room.query_bytes, room.keys, room.key_block,
          room.scores + begin * BLOCK_KEYS * 4, BLOCK_KEYS * 4, -(-a.head_dim * a.itemsize // 4), end - begin,
          -(-num_keys // LANES))
    state = carray(pointer_to(room.state, np.float32), (a.tile_rows, _STATE_FLOATS))
    sums = carray(pointer_to(room.sums, np.float32), (a.tile_rows, room.value_blocks * LANES))
    for row in range(begin, end):
        num_seen = max(0, min(num_keys, positions[first + row // a.share] + 1 - start))
        soften(room.scores + row * BLOCK_KEYS * 4, room.weights + row * room.weight_bytes,
               room.state + row * STATE_BYTES, num_seen, number_of(a.unit_bits))
        factor, target = state[row, LANES + 1], sums[row]
        if factor != np.float32(1):
            for channel in range(len(target)):
                target[channel] *= factor


@njit(**STRICT_PART)
def _finish(a, room, stored, kv_head, first, count):
    out = carray(pointer_to(a.out, stored), (a.num_tokens, a.num_kv_heads, a.share, a.head_dim))
    state = carray(pointer_to(room.state, np.float32), (a.tile_rows, _STATE_FLOATS))
    sums = carray(pointer_to(room.sums, np.float32), (a.tile_rows, room.value_blocks * LANES))
    for row in range(count * a.share):
        total = np.float32(0)
        for lane in range(LANES):
            total += state[row, lane]
        source, target = sums[row], out[first + row // a.share, kv_head, row % a.share]
        for channel in range(len(target)):
            # A sum that came to nothing may be -0, or not if keys followed that the token does not see.
            target[channel] = rounded(source[channel] / total + np.float32(0), stored)


@njit(**STRICT_PART)
def _find(a, found, nothing, row, token, kv_head, start, num_keys):
    """The addresses of the block's keys start .. start + num_keys - 1 as `token` sees them; `nothing` in place of the
    others."""
    num_keys = max(0, min(BLOCK_KEYS, num_keys))
    found = carray(pointer_to(found, np.int64), BLOCK_KEYS)
    table = carray(pointer_to(a.tables, np.int32), (a.num_rows, a.table_width))[row]
    path = carray(pointer_to(a.paths, np.int64), (a.num_tokens, a.path_width))[token]
    in_order = carray(pointer_to(a.num_in_order, np.int32), a.num_rows)[row]
    key_bytes, page_size = a.head_dim * a.itemsize, a.page_size
    of_page, of_head = 2 * a.num_kv_heads * page_size * key_bytes, kv_head * page_size * key_bytes
    base = a.pages + of_head
    place, offset, key = start // page_size, start % page_size, 0
    while key < min(num_keys, in_order - start):
        last = min(num_keys, in_order - start, key + page_size - offset)
        address = base + table[place] * of_page + offset * key_bytes
        while key < last:
            found[key] = address
            address += key_bytes
            key += 1
        place, offset = place + 1, 0
    while key < num_keys:
        slot = path[start + key - in_order]
        found[key] = base + slot // page_size * of_page + slot % page_size * key_bytes
        key += 1
    while key < BLOCK_KEYS:
        found[key] = nothing
        key += 1


@njit(**STRICT_PART)
def _fill_keys(a, room, found, num_keys):
    """A block's keys as `dot.py` takes them. Groups of 16 without any key are left out. The values are fetched until
    scores are weighed, the next keys until these are added up."""
    key_bytes = a.head_dim * a.itemsize
    behind = a.num_kv_heads * a.page_size * key_bytes
    whole = key_bytes // VECTOR_BYTES * VECTOR_BYTES
    for group in range(-(-num_keys // LANES)):
        at = found + group * LANES * 8
        for offset in range(0, whole, VECTOR_BYTES):
            if a.tile_rows <= _FEW_ROWS:
                step, steps = offset // VECTOR_BYTES, whole // VECTOR_BYTES
                _fetch_rows(at, LANES * step // steps, LANES * (step + 1) // steps, behind, key_bytes)
            turn(at, offset, room.keys + group * room.key_block + offset * LANES)
        if whole < key_bytes:
            _copy_tails(at, whole, (key_bytes - whole) // 2, room.tails)
            turn(room.found_tails, 0, room.keys + group * room.key_block + whole * LANES)


@njit(**STRICT_PART)
def _fetch_rows(found, begin, end, offset, num_bytes):
    """Bring what lies `offset` bytes behind some of the addresses into the cache, line after line: what fetches lines
    ahead by itself follows such a way."""
    addresses = carray(pointer_to(found, np.int64), BLOCK_KEYS)
    for row in range(begin, end):
        for line in range(0, num_bytes, VECTOR_BYTES):
            fetch_line(addresses[row] + offset + line)


@njit(**STRICT_PART)
def _copy_tails(found, offset, num_halves, tails):
    addresses = carray(pointer_to(found, np.int64), LANES)
    for row in range(LANES):
        source = carray(pointer_to(addresses[row] + offset, np.uint16), num_halves)
        tail = carray(pointer_to(tails + row * VECTOR_BYTES, np.uint16), num_halves)
        for place in range(num_halves):
            tail[place] = source[place]


@njit(**STRICT_PART)
def _pair_values(a, room, found, ahead, num_keys):
    """A block's values in bf16, [channels / 16][pairs][16][2], with zeros up to a multiple of 16 pairs."""
    found = carray(pointer_to(found, np.int64), BLOCK_KEYS)
    whole = a.head_dim // (2 * LANES) * 2 * LANES
    behind = a.num_kv_heads * a.page_size * a.head_dim * 2
    for pair in range(-(-num_keys // (2 * LANES)) * LANES):
        first, second = room.nothing, room.nothing
        if 2 * pair < num_keys:
            first = found[2 * pair] + behind
        if 2 * pair + 1 < num_keys:
            second = found[2 * pair + 1] + behind
        if a.tile_rows <= _FEW_ROWS:
            _fetch_rows(ahead, 2 * pair, 2 * pair + 2, 0, a.head_dim * 2)
        for channel in range(0, whole, 2 * LANES):
            put_in_pairs(first + channel * 2, second + channel * 2,
                         room.values + channel // LANES * room.value_block + pair * VECTOR_BYTES, room.value_block)
        for channel in range(whole, a.head_dim):
            place = room.values + channel // LANES * room.value_block + pair * VECTOR_BYTES + channel % LANES * 4
            words = carray(pointer_to(place, np.uint16), 2)
            words[0] = carray(pointer_to(first + channel * 2, np.uint16), 1)[0]
            words[1] = carray(pointer_to(second + channel * 2, np.uint16), 1)[0]


@njit(**STRICT_PART)
def _copy_values(a, room, found, ahead, num_keys):
    """A block's values in fp32, [channels / 16][keys][16]."""
    found = carray(pointer_to(found, np.int64), BLOCK_KEYS)
    behind = a.num_kv_heads * a.page_size * a.head_dim * 4
    for key in range(num_keys):
        source = carray(pointer_to(found[key] + behind, np.float32), a.head_dim)
        for channel in range(0, a.head_dim, LANES):
            place = room.values + channel // LANES * room.value_block + key * VECTOR_BYTES
            target = carray(pointer_to(place, np.float32), LANES)
            for lane in range(min(LANES, a.head_dim - channel)):
                target[lane] = source[channel + lane]


# What the three kernels are made of has names of the module: a function in a closure would be part of the name that
# numba keeps code under, and no two processes spell it alike.
_TILED_SCORE, _TILED_ADD = any_rows.tiled_product(adds=False), any_rows.tiled_product(adds=True)
_BF16_SCORE, _BF16_ADD = any_rows.plain_product(Form.BF16, adds=False), any_rows.plain_product(Form.BF16, adds=True)
_FP32_SCORE, _FP32_ADD = any_rows.plain_product(Form.FP32, adds=False), any_rows.plain_product(Form.FP32, adds=True)
_SOFTEN_ROUNDED, _SOFTEN = soften_for(rounds=True), soften_for(rounds=False)
_SHAPE_TILES, _END_TILES = any_rows.shape_tiles, any_rows.end_tiles
_NO_TILES, _END_NO_TILES = any_rows.no_tiles, any_rows.end_no_tiles


def _attend_tiled(pointer):
    _take_tiles(pointer, np.uint16, _TILED_SCORE, _SOFTEN_ROUNDED, _pair_values, _TILED_ADD, _SHAPE_TILES)
    _END_TILES()


def _attend_bf16(pointer):
    _take_tiles(pointer, np.uint16, _BF16_SCORE, _SOFTEN_ROUNDED, _pair_values, _BF16_ADD, _NO_TILES)
    _END_NO_TILES()


def _attend_fp32(pointer):
    _take_tiles(pointer, np.float32, _FP32_SCORE, _SOFTEN, _copy_values, _FP32_ADD, _NO_TILES)
    _END_NO_TILES()

"""Attention products for few rows, for which packing a block would cost as much as reading it.

Keys are transposed in registers, 16 keys by 8 words at a time, and multiplied at once. The values
of two keys become pairs in the same way. A sum has the same terms in the same order as with a
packed block (`dot.py`), and so the same bits. The matrix unit multiplies keys in place, by
transposed queries.

On a page the keys of all kv heads are consecutive, followed by their values. So the kv heads of an
item take turns at each block: its keys from the first head to the last one, then its values. While
one head's data is multiplied, the next head's is prefetched. Processing one head after the other
over all blocks would read scattered pieces of 16 KB, which takes 1.5 times as long: the hardware
prefetcher follows long sequences only.
"""

import itertools
from functools import cache

import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.host.attention.kv_blocks import behind_keys, pair_values_at, score_by_key
from engine.kernels.host.attention.row_tiling import shape_tiles
from engine.kernels.host.codegen.amx import STEPS, TILE_ROWS, tile_block
from engine.kernels.host.codegen.compiled import STRICT_PART
from engine.kernels.host.codegen.lane_shuffles import (
    mixed_halves,
    mixed_quarters,
    pairs_of,
    words_of,
)
from engine.kernels.host.codegen.softmax_blocks import BLOCK_KEYS, SCORE_ROW, VECTOR_BYTES
from engine.kernels.host.codegen.strided_loops import counted, integers, write_fetch
from engine.kernels.host.codegen.vectors import LANES, add_pairs, has_pair_products, in_all_lanes

_FEW_ROWS = 8  # rows of a tile at most, without the matrix unit
CHANNELS = 2 * LANES  # channels of one vector of bf16; the head dimension must be a multiple
_PIECE_BYTES = 32  # bytes of each key that go through the registers at a time
_KEYS = 2 * LANES  # keys at a time; with more, lines would be needed before they arrive
_PIECE_LINES = _KEYS * _PIECE_BYTES // VECTOR_BYTES  # number of lines read in that time

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


@cache
def most_rows(dtype: torch.dtype, head_dim: int, *, tiled: bool) -> int:
    """Return the maximum rows of a tile for the small-batch kernel; 0 if it is not available."""
    if dtype is not torch.bfloat16 or head_dim % CHANNELS or not (tiled or has_pair_products()):
        return 0
    return TILE_ROWS if tiled else _FEW_ROWS


@cache
def heads_of_item(
    num_tiles: int, num_kv_heads: int, tile_rows: int, most: int, num_threads: int
) -> int:
    """Return the number of kv heads of a small tile that one thread processes at a time.

    The heads have at most `most` rows together. With several threads there are at least two items
    for each.
    """
    num_items = 2 * num_threads if num_threads > 1 else 1
    return max(
        (
            heads
            for heads in range(1, num_kv_heads + 1)
            if num_kv_heads % heads == 0
            and heads * tile_rows <= most
            and num_tiles * num_kv_heads // heads >= num_items
        ),
        default=1,
    )


@cache
def score_block(rows: int):
    """Return a function for compiled code that scores keys.

    It is f(found, offset, queries, query_row, scores, score_row, pieces, then), all int64. Scores
    [rows, _KEYS] are fp32, `score_row` bytes apart; queries are `query_row` bytes apart. The keys
    are `offset` bytes after each of the _KEYS addresses at `found`; a key has `pieces` times
    _PIECE_BYTES. The same number of bytes, `then` bytes after the addresses, is prefetched.
    """

    @intrinsic
    def score(typing, found, offset, queries, query_row, scores, score_row, pieces, then):
        def generate(context, builder, signature, arguments):
            _write_scores(builder, rows, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return score


def _write_scores(b, rows, found, offset, queries, query_row, scores, score_row, pieces, then):
    groups = range(_KEYS // LANES)
    # Consecutive lines are prefetched, 16 keys at a time: they are on one page, unless pages are
    # smaller.
    of_group = b.sdiv(pieces, _I64(len(groups)))
    first, second = (b.add(_address(b, found, _I64(8 * LANES * group)), then) for group in groups)
    second = b.sub(second, b.mul(of_group, _I64(_PIECE_LINES * VECTOR_BYTES)))

    def step(piece, sums):
        # Prefetches are spread over the step: more than the number of possible outstanding ones
        # would delay the following loads.
        lines = b.add(
            b.select(b.icmp_signed("<", piece, of_group), first, second),
            b.mul(piece, _I64(_PIECE_LINES * VECTOR_BYTES)),
        )
        byte = b.mul(piece, _I64(_PIECE_BYTES))
        results = list(sums)
        key_offset = b.add(offset, byte)
        for group in groups:
            keys = [
                b.add(_address(b, found, _I64(8 * (group * LANES + key))), key_offset)
                for key in range(LANES)
            ]
            for word, vector in enumerate(words_of(b, keys)):
                write_fetch(b, b.add(lines, _I64(VECTOR_BYTES * (8 * group + word))))
                for row in range(rows):
                    query = b.add(
                        b.add(queries, b.mul(query_row, _I64(row))), b.add(byte, _I64(4 * word))
                    )
                    place = group * rows + row
                    results[place] = add_pairs(b, results[place], vector, _word(b, query))
        return results

    sums = counted(b, pieces, [ir.Constant(_FLOATS, None)] * (rows * len(groups)), step)
    for group in groups:
        for row in range(rows):
            at = b.add(b.add(scores, b.mul(score_row, _I64(row))), _I64(group * VECTOR_BYTES))
            b.store(sums[group * rows + row], _pointer(b, at, _FLOATS), align=4)


@cache
def add_block(rows: int, vectors: int):
    """Return a function for compiled code that adds weighted values.

    It is f(found, offset, weights, weight_row, sums, sum_row, pairs, ahead, ahead_offset). Sums
    [rows, CHANNELS * vectors], fp32, `sum_row` bytes apart, are increased by weights [rows, 2 *
    pairs], bf16, `weight_row` bytes apart, times the values. These are `offset` bytes after each of
    2 * `pairs` addresses at `found`. The data `ahead_offset` bytes after the addresses at `ahead`
    is prefetched.
    """

    @intrinsic
    def add(typing, found, offset, weights, weight_row, sums, sum_row, pairs, ahead, ahead_offset):
        def generate(context, builder, signature, arguments):
            _write_sums(builder, rows, vectors, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return add


def _write_sums(
    b, rows, vectors, found, offset, weights, weight_row, sums, sum_row, pairs, ahead, ahead_offset
):
    def at(row, half):
        return _pointer(
            b, b.add(b.add(sums, b.mul(sum_row, _I64(row))), _I64(VECTOR_BYTES * half)), _FLOATS
        )

    def step(pair, totals):
        both = b.mul(pair, _I64(16))
        keys, next_keys = (
            [b.add(_address(b, listed, b.add(both, _I64(8 * key))), behind) for key in (0, 1)]
            for listed, behind in ((found, offset), (ahead, ahead_offset))
        )
        for key, vector in itertools.product(next_keys, range(vectors)):
            write_fetch(b, b.add(key, _I64(VECTOR_BYTES * vector)))
        factors = [
            _word(b, b.add(b.add(weights, b.mul(weight_row, _I64(row))), b.mul(pair, _I64(4))))
            for row in range(rows)
        ]
        results = []
        for vector in range(vectors):
            for half, values in enumerate(
                pairs_of(b, *(b.add(key, _I64(VECTOR_BYTES * vector)) for key in keys))
            ):
                first = (2 * vector + half) * rows
                results += [
                    add_pairs(b, totals[first + row], values, factors[row]) for row in range(rows)
                ]
        return results

    places = list(itertools.product(range(vectors), range(rows)))
    first = [None] * (2 * len(places))
    for vector, row in places:
        halves = mixed_quarters(
            b, *(b.load(at(row, 2 * vector + half), align=4) for half in (0, 1))
        )
        first[2 * vector * rows + row], first[(2 * vector + 1) * rows + row] = halves
    totals = counted(b, pairs, first, step)
    for vector, row in places:
        halves = mixed_halves(b, *(totals[(2 * vector + half) * rows + row] for half in (0, 1)))
        for half, total in enumerate(halves):
            b.store(total, at(row, 2 * vector + half), align=4)


def _address(b, listed, offset):
    return b.load(_pointer(b, b.add(listed, offset), _I64), align=8)


def _word(b, address):
    """Return the pair of bf16 at the address, in all lanes."""
    return in_all_lanes(b, b.load(_pointer(b, address, _I32), align=2))


def _pointer(b, address, kind):
    return b.inttoptr(address, kind.as_pointer())


def _of_any_width(wide, width, narrow):
    @njit(**STRICT_PART)
    def add(
        found, offset, weights, weight_row, sums, sum_row, pairs, ahead, ahead_offset, num_vectors
    ):
        vector = 0
        while vector + width <= num_vectors:
            at = vector * VECTOR_BYTES
            wide(
                found,
                offset + at,
                weights,
                weight_row,
                sums + 2 * at,
                sum_row,
                pairs,
                ahead,
                ahead_offset + at,
            )
            vector += width
        while vector < num_vectors:
            at = vector * VECTOR_BYTES
            narrow(
                found,
                offset + at,
                weights,
                weight_row,
                sums + 2 * at,
                sum_row,
                pairs,
                ahead,
                ahead_offset + at,
            )
            vector += 1

    return add


# The maximum number of sums that fits into registers next to the operands.
_SCORE_4, _SCORE_2 = (score_block(rows) for rows in (4, 2))
_ADD_4, _ADD_2 = (
    _of_any_width(add_block(rows, width), width, add_block(rows, 1))
    for rows, width in ((4, 2), (2, 4))
)


@njit(**STRICT_PART)
def score_head(a, room, found, head, begin, num_rows, num_keys):
    """Score the item's rows of this head, from `begin` on, with a block of `num_keys` keys."""
    num_pieces = a.head_dim * a.itemsize // _PIECE_BYTES
    last = begin + num_rows
    offset, then = _keys_and_next(a, head)
    for key in range(0, num_keys, _KEYS):
        row = begin
        at = found + 8 * key
        while row < last:
            queries = room.queries + row * room.query_bytes
            scores = room.scores + row * SCORE_ROW + 4 * key
            if row + 4 <= last:
                _SCORE_4(at, offset, queries, room.query_bytes, scores, SCORE_ROW, num_pieces, then)
                row += 4
            else:
                # A single row is processed as two rows at the same address.
                others = min(1, last - row - 1)
                _SCORE_2(
                    at,
                    offset,
                    queries,
                    others * room.query_bytes,
                    scores,
                    others * SCORE_ROW,
                    num_pieces,
                    then,
                )
                row += 2


@njit(**STRICT_PART)
def add_head(a, room, found, ahead, head, begin, num_rows, num_keys):
    """Add the block's values, weighted, to the sums of the rows of this head."""
    num_vectors = a.head_dim // CHANNELS
    num_pairs = -(-num_keys // 2)
    row = begin
    last = begin + num_rows
    offset, next_found, then = _values_and_next(a, found, ahead, head)
    if num_keys % 2:  # the partner of the last value is 0
        integers(found)[num_keys] = room.nothing - offset
    while row < last:
        weights = room.weights + row * room.weight_bytes
        sums = room.sums + row * room.sum_bytes
        if row + 4 <= last:
            _ADD_4(
                found,
                offset,
                weights,
                room.weight_bytes,
                sums,
                room.sum_bytes,
                num_pairs,
                next_found,
                then,
                num_vectors,
            )
            row += 4
        else:
            others = min(1, last - row - 1)
            _ADD_2(
                found,
                offset,
                weights,
                others * room.weight_bytes,
                sums,
                others * room.sum_bytes,
                num_pairs,
                next_found,
                then,
                num_vectors,
            )
            row += 2


@njit(**STRICT_PART)
def score_head_in_tiles(a, room, found, head, begin, num_rows, num_keys):
    """Score the rows by the matrix unit.

    The rows of other heads are scored with these keys as well, which takes no longer; their earlier
    scores are lost.
    """
    shape_tiles(room.layout, num_rows)
    offset, then = _keys_and_next(a, head)
    score_by_key(a, room, found, offset, found, then, num_keys)


@njit(**STRICT_PART)
def add_head_in_tiles(a, room, found, ahead, head, begin, num_rows, num_keys):
    """Add the block's weighted values by the matrix unit."""
    offset, next_found, then = _values_and_next(a, found, ahead, head)
    pair_values_at(a, room, room.values, found, offset, next_found, then, num_keys, 1)
    sums = room.sums + begin * room.sum_bytes
    steps = -(-num_keys // (2 * STEPS)) * STEPS
    for block in range(0, room.value_blocks, 2):
        lines = (
            integers(next_found)[BLOCK_KEYS // 2 + BLOCK_KEYS // 2 * block // room.value_blocks]
            + then
        )
        _ADD_TILES(
            room.weights + begin * room.weight_bytes,
            room.weight_bytes,
            room.values + block * room.value_block,
            room.value_block,
            sums + block * VECTOR_BYTES,
            room.sum_bytes,
            steps,
            lines,
        )


# Prefetches the other half of a whole block's keys.
_ADD_TILES = tile_block(1, 2, adds=True, fetched=LANES)


@njit(**STRICT_PART)
def _keys_and_next(a, head):
    """Return the distance from the first head's keys to those of `head`, and to the next data read.

    The next data are the next head's keys, or the first head's values.
    """
    head_bytes = a.page_size * a.head_dim * a.itemsize
    offset = head * head_bytes
    return offset, offset + head_bytes if head + 1 < a.heads else behind_keys(a)


@njit(**STRICT_PART)
def _values_and_next(a, found, ahead, head):
    """Return the distance from the first head's keys to `head`'s values, and the next data.

    The next data are the next head's values or the next block's keys, given as the addresses and
    the distance from them.
    """
    head_bytes = a.page_size * a.head_dim * a.itemsize
    offset = behind_keys(a) + head * head_bytes
    if head + 1 < a.heads:
        return offset, found, offset + head_bytes
    return offset, ahead, 0

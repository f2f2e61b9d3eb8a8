"""Key selection (DSA) on the host: index scores with pages read in place, and the best keys.

A score is sum_h w_h * relu(q_h . k * dim^-0.5). A product is summed over channels in order, a score
over heads in order. The selection rule is that of `engine/backends/selection.py`.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    compile_kernel,
    count_up,
    launch,
    pointer_to,
    record,
    take_seat,
    wide,
)
from engine.kernels.host.codegen.strided_loops import add_product, clear, floats, integers, shorts
from engine.kernels.latent_rows import LatentRows

_SCORED = record(
    "num_blocks",
    "num_heads",
    "dim",
    "page_size",
    "table_width",
    "score_width",
    "first_token",
    "end_token",
    "q",
    "weights",
    "pages",
    "tables",
    "starts",
    "contexts",
    "scores",
    scale=np.float32,
)
_CHOSEN = record(
    "first_token", "score_width", "num_listed", "count", "scores", "num_common", "listed", "chosen"
)
_BLOCK = 64  # keys of an item
_LINE = _BLOCK * 4
_TILE_SCORES = 1 << 24  # bounds the memory of one step, which processes a few tokens at a time
_BIN_BITS = 11


def select_keys(
    pages: Tensor, q: Tensor, weights: Tensor, rows: LatentRows, *, count: int, team: Team
) -> Tensor:
    """Return the `count` best keys of each token, [T, count] int32, ascending, padded with -1.

    pages is [P, page_size, dim] bf16 or fp32; q is [T, heads, dim] fp32; weights is [T, heads]
    fp32. All are contiguous.
    """
    num_tokens, num_heads, dim = q.shape
    chosen = torch.empty(num_tokens, count, dtype=torch.int32)
    longest = int((rows.contexts + rows.starts.diff()).max())
    num_blocks = -(-longest // _BLOCK)
    step = max(1, _TILE_SCORES // (num_blocks * _BLOCK))
    scores = torch.empty(min(step, num_tokens), num_blocks * _BLOCK)
    for first in range(0, num_tokens, step):
        launch(
            scores_for(pages.dtype),
            _SCORED,
            team,
            num_items=len(rows.contexts) * num_blocks,
            scratch_bytes=(dim + num_heads) * _LINE,
            num_blocks=num_blocks,
            num_heads=num_heads,
            dim=dim,
            scale=dim**-0.5,
            page_size=pages.shape[1],
            table_width=rows.tables.shape[1],
            score_width=scores.shape[1],
            first_token=first,
            end_token=min(first + step, num_tokens),
            q=q,
            weights=weights,
            pages=pages,
            tables=rows.tables,
            starts=rows.starts,
            contexts=rows.contexts,
            scores=scores,
        )
        _choose(scores, rows, chosen[first : first + step], first, team)
    return chosen


def _choose(scores: Tensor, rows: LatentRows, chosen: Tensor, first: int, team: Team) -> None:
    """Fill `chosen` for the tokens from `first` on."""
    num_items, count = chosen.shape
    launch(
        choice(),
        _CHOSEN,
        team,
        num_items=num_items,
        scratch_bytes=8 << _BIN_BITS,
        count=count,
        first_token=first,
        score_width=scores.shape[1],
        num_listed=rows.listed.shape[1],
        scores=scores,
        num_common=rows.num_common,
        listed=rows.listed,
        chosen=chosen,
    )


@cache
def scores_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_blocks(pointer, stored)

    return compile_kernel(work, _SCORED, f"index_scores_{stored.__name__}", numbers=STRICT)


@cache
def choice():
    def work(pointer):
        _take_choices(pointer)

    return compile_kernel(work, _CHOSEN, "choose_keys", numbers=STRICT)


@njit(**STRICT_PART)
def _take_blocks(pointer, stored):
    """Run one thread: score 64 keys of a row at a time with all tokens that see them."""
    a = carray(pointer, 1)[0]
    starts = integers(a.starts)
    contexts = integers(a.contexts)
    turned_at = take_seat(pointer)
    products_at = turned_at + a.dim * _LINE
    turned = floats(turned_at)
    products = floats(products_at)
    pages = pointer_to(a.pages, stored)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        row = item // a.num_blocks
        first = item % a.num_blocks * _BLOCK
        # A token's own key is the last one that it sees, at context + token - start.
        own = contexts[row] - starts[row]
        start = max(starts[row], a.first_token, first - own)
        end = min(starts[row + 1], a.end_token)
        if start < end:
            table = shorts(a.tables + row * a.table_width * 4)
            count = min(_BLOCK, own + end - first)
            clear(turned_at, a.dim * _BLOCK)
            for key in range(count):
                page = np.int64(table[(first + key) // a.page_size])
                offset = (first + key) % a.page_size
                entry = (page * a.page_size + offset) * a.dim
                for channel in range(a.dim):
                    turned[channel * _BLOCK + key] = wide(pages[entry + channel])
            for token in range(start, end):
                clear(products_at, a.num_heads * _BLOCK)
                add_product(
                    a.q + token * a.num_heads * a.dim * 4,
                    a.dim * 4,
                    4,
                    turned_at,
                    _LINE,
                    products_at,
                    _LINE,
                    a.num_heads,
                    _BLOCK,
                    a.dim,
                )
                at = a.scores + ((token - a.first_token) * a.score_width + first) * 4
                scores = floats(at)
                weights = floats(a.weights + token * a.num_heads * 4)
                clear(at, _BLOCK)
                for head in range(a.num_heads):
                    for key in range(_BLOCK):
                        product = products[head * _BLOCK + key] * a.scale
                        scores[key] += weights[head] * (product if product > 0 else np.float32(0))
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _take_choices(pointer):
    """Run one thread: select the keys of one token at a time until no items are left."""
    a = carray(pointer, 1)[0]
    bins = integers(take_seat(pointer))
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        token = a.first_token + item
        num_common = integers(a.num_common)[token]
        listed = shorts(a.listed + token * a.num_listed * 4)
        num_seen = num_common
        while num_seen < num_common + a.num_listed and listed[num_seen - num_common] >= 0:
            num_seen += 1
        scores = floats(a.scores + item * a.score_width * 4)
        chosen = shorts(a.chosen + item * a.count * 4)
        lowest = np.int64(-1)
        num_lowest = np.int64(0)
        if num_seen > a.count:
            lowest, num_lowest = _threshold(scores, num_seen, num_common, listed, a.count, bins)
        taken = 0
        for place in range(num_seen):
            position = place if place < num_common else np.int64(listed[place - num_common])
            rank = _rank(scores[position]) if num_seen > a.count else np.int64(0)
            is_chosen = rank > lowest
            if rank == lowest and num_lowest > 0:
                is_chosen = True
                num_lowest -= 1
            if is_chosen:
                chosen[taken] = position
                taken += 1
        for place in range(taken, a.count):
            chosen[place] = -1
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _rank(score):
    """Return the rank of a score, 0 .. 2^32 - 1; 0 and -0 are equal, and NaN is the highest."""
    positive_zero = np.float32(score + np.float32(0))
    bits = np.int64(positive_zero.view(np.int32))
    rank = bits + np.int64(0x80000000) if bits >= 0 else np.int64(-1) - bits
    return rank if score == score else np.int64(0xFFFFFFFF)


@njit(**STRICT_PART)
def _threshold(scores, num_seen, num_common, listed, count, bins):
    """Return the rank of the `count`-th best score, and how many scores of that rank are selected.

    The rank is found from its highest bits on. Each round counts the scores by their next bits,
    among those whose earlier bits equal the threshold's.
    """
    found = np.int64(0)
    shift = np.int64(33)
    remaining = np.int64(count)
    for _ in range(3):
        shift -= _BIN_BITS
        for number in range(1 << _BIN_BITS):
            bins[number] = 0
        for place in range(num_seen):
            position = place if place < num_common else np.int64(listed[place - num_common])
            rank = _rank(scores[position])
            if rank >> (shift + _BIN_BITS) == found:
                bins[(rank >> shift) & ((1 << _BIN_BITS) - 1)] += 1
        highest = np.int64((1 << _BIN_BITS) - 1)
        while bins[highest] < remaining:
            remaining -= bins[highest]
            highest -= 1
        found = (found << _BIN_BITS) | highest
    return found, remaining

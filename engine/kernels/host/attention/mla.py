"""Attention over compressed keys (MLA, absorbed) on the host, with pages read in place.

A token's keys are processed in the order of its list of visible keys, 64 at a time, through an
online softmax (Milakov and Gimelshein, 2018). A score is summed over channels in order, an output
over keys in order, each head separately. So a token's bits depend on its own keys only. They do not
depend on the other tokens of the batch, nor on whether the token was prefilled, sampled or
verified. Of a page only the keys that the token sees are read.
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
    rounded,
    take_seat,
    wide,
)
from engine.kernels.host.codegen.functions import exp
from engine.kernels.host.codegen.strided_loops import (
    LANES,
    add_product,
    clear,
    floats,
    integers,
    scale,
    shorts,
    size_of,
)
from engine.kernels.latent_rows import LatentRows

_ARGUMENTS = record(
    "num_heads",
    "group",
    "entry_dim",
    "latent_dim",
    "page_size",
    "table_width",
    "num_listed",
    "q",
    "pages",
    "tables",
    "token_rows",
    "num_common",
    "listed",
    "out",
    scale=np.float32,
)
_BLOCK = 64  # keys of one step of the online softmax
_GROUP = 64  # heads of an item; fewer if there are not enough items for all threads


def attend_latent(
    pages: Tensor, q: Tensor, rows: LatentRows, *, latent_dim: int, scale: float, team: Team
) -> Tensor:
    """Attend to the visible entries of each token and return [T, heads, latent_dim] in q's dtype.

    pages is [P, page_size, entry]; q is [T, heads, entry], contiguous; each is bf16 or fp32. Each
    token sees at least one key.
    """
    num_tokens, num_heads, entry_dim = q.shape
    out = q.new_empty(num_tokens, num_heads, latent_dim)
    group = _GROUP if num_tokens * num_heads >= 4 * _GROUP * torch.get_num_threads() else LANES
    width = min(group, -(-num_heads // LANES) * LANES)
    scratch_floats = (entry_dim + _BLOCK + 3) * width + _BLOCK * entry_dim + width * latent_dim
    launch(
        compiled_for(q.dtype, pages.dtype),
        _ARGUMENTS,
        team,
        num_items=num_tokens * -(-num_heads // width),
        scratch_bytes=4 * scratch_floats,
        num_heads=num_heads,
        group=width,
        entry_dim=entry_dim,
        latent_dim=latent_dim,
        page_size=pages.shape[1],
        table_width=rows.tables.shape[1],
        num_listed=rows.listed.shape[1],
        scale=scale,
        q=q,
        pages=pages,
        out=out,
        tables=rows.tables,
        token_rows=rows.token_rows,
        num_common=rows.num_common,
        listed=rows.listed,
    )
    return out


@cache
def compiled_for(dtype: torch.dtype, page_dtype: torch.dtype):
    stored = STORED_AS[dtype]
    cached = STORED_AS[page_dtype]

    def work(pointer):
        _take_tokens(pointer, stored, cached)

    return compile_kernel(
        work, _ARGUMENTS, f"attend_latent_{stored.__name__}_{cached.__name__}", numbers=STRICT
    )


@njit(**STRICT_PART)
def _take_tokens(pointer, stored, cached):
    """Run one thread: process some heads of a token at a time until no items are left."""
    a = carray(pointer, 1)[0]
    seat = take_seat(pointer)
    num_groups = (a.num_heads + a.group - 1) // a.group
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        token = item // num_groups
        first = item % num_groups * a.group
        _attend(a, token, first, min(a.group, a.num_heads - first), seat, stored, cached)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _attend(a, token, first, num_heads, seat, stored, cached):
    """Attend with the heads first .. first + num_heads - 1 of a token.

    The computation uses whole vectors of heads; padding heads have queries of 0.
    """
    width = (num_heads + LANES - 1) // LANES * LANES
    entry_dim = a.entry_dim
    latent_dim = a.latent_dim
    line = width * 4
    queries_at = seat
    keys_at = queries_at + entry_dim * line
    scores_at = keys_at + _BLOCK * entry_dim * 4
    total_at = scores_at + _BLOCK * line
    highest_at = total_at + num_heads * latent_dim * 4
    sums_at = highest_at + line
    factors_at = sums_at + line
    highest = floats(highest_at)
    sums = floats(sums_at)
    factors = floats(factors_at)

    clear(queries_at, entry_dim * width)
    own = (token * a.num_heads + first) * size_of(stored)
    _turn_queries(
        pointer_to(a.q + own * entry_dim, stored),
        floats(queries_at),
        num_heads,
        width,
        entry_dim,
        a.scale,
    )
    clear(total_at, num_heads * latent_dim)
    clear(sums_at, width)
    for head in range(width):
        highest[head] = -np.inf
    # Places in the list of all keys that the token sees.
    place = np.int64(0)
    end = integers(a.num_common)[token] + a.num_listed
    while place < end:
        count, place = _gather(a, token, place, end, floats(keys_at), cached)
        if count > 0:
            clear(scores_at, count * width)
            add_product(
                keys_at,
                entry_dim * 4,
                4,
                queries_at,
                line,
                scores_at,
                line,
                count,
                width,
                entry_dim,
            )
            _soften(floats(scores_at), highest, sums, factors, count, width)
            for head in range(num_heads):
                scale(total_at + head * latent_dim * 4, latent_dim, factors[head])
            add_product(
                scores_at,
                4,
                line,
                keys_at,
                entry_dim * 4,
                total_at,
                latent_dim * 4,
                num_heads,
                latent_dim,
                count,
            )
    total = floats(total_at)
    out = pointer_to(a.out + own * latent_dim, stored)
    for head in range(num_heads):
        for channel in range(latent_dim):
            out[head * latent_dim + channel] = rounded(
                total[head * latent_dim + channel] / sums[head], stored
            )


@njit(**STRICT_PART)
def _turn_queries(q, queries, num_heads, width, entry_dim, factor):
    for head in range(num_heads):
        for channel in range(entry_dim):
            queries[channel * width + head] = wide(q[head * entry_dim + channel]) * factor


@njit(**STRICT_PART)
def _gather(a, token, place, end, keys, cached):
    """Gather up to 64 entries from `place` on; return their number and the next place."""
    pages = pointer_to(a.pages, cached)
    table = shorts(a.tables + integers(a.token_rows)[token] * a.table_width * 4)
    listed = shorts(a.listed + token * a.num_listed * 4)
    num_common = integers(a.num_common)[token]
    count = np.int64(0)
    while count < _BLOCK and place < end:
        position = place if place < num_common else np.int64(listed[place - num_common])
        place += 1
        if position >= 0:
            page = np.int64(table[position // a.page_size])
            entry = (page * a.page_size + position % a.page_size) * a.entry_dim
            for channel in range(a.entry_dim):
                keys[count * a.entry_dim + channel] = wide(pages[entry + channel])
            count += 1
    return count, place


@njit(**STRICT_PART)
def _soften(scores, highest, sums, factors, count, width):
    """Perform one step of the online softmax; scores [count, width] become weights.

    `factors` are the factors by which all earlier sums must be multiplied.
    """
    for head in range(width):
        factors[head] = highest[head]
    for key in range(count):
        for head in range(width):
            score = scores[key * width + head]
            highest[head] = score if score > highest[head] else highest[head]
    for head in range(width):
        factors[head] = exp(factors[head] - highest[head])
        sums[head] *= factors[head]
    for key in range(count):
        for head in range(width):
            scores[key * width + head] = exp(scores[key * width + head] - highest[head])
            sums[head] += scores[key * width + head]

"""Sums and copies of rows on the host, keys and values into their pages, and states to where they stay: what stands
between the products of a step, and between two steps, as launches.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host import strided
from engine.kernels.host.compiled import (
    DONE,
    NEXT,
    PART,
    STORED_AS,
    Team,
    compile_kernel,
    count_up,
    launch_integers,
    pointer_to,
    record,
    rounded,
    wide,
)
from engine.kernels.host.strided import size_of
from runtime.errors import InternalError

_SUM = record("num_values", "x", "y", "out")
_COPIES = record("num_rows", "width", "stride", "x", "out")
_WRITES = record("num_tokens", "num_heads", "width", "page_size", "page_values", "k", "k_stride", "v", "v_stride",
                 "pages", "write_pages", "write_offsets")
_RECORDS = record("num_moves", "num_pools", "pools", "sources", "targets")
_POOL_FIELDS = 3
_ITEM_TOKENS = 16
_ITEM_VALUES = 1 << 14


def add_rows(x: Tensor, y: Tensor, team: Team) -> Tensor:
    """x + y, of one shape and type, bf16 or fp32, dense: in fp32 and rounded once, as torch does. Returns a new tensor
    of the same."""
    out = torch.empty(x.shape, dtype=x.dtype)
    launch_integers(sum_for(x.dtype), -(-x.numel() // _ITEM_VALUES), (
        x.numel(), x.data_ptr(), y.data_ptr(), out.data_ptr()), team)
    return out


@cache
def sum_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _add_values(pointer, stored)

    return compile_kernel(work, _SUM, f"add_rows_{stored.__name__}", __file__)


@njit(**PART)
def _add_values(pointer, stored):
    a = carray(pointer, 1)[0]
    x, y = carray(pointer_to(a.x, stored), a.num_values), carray(pointer_to(a.y, stored), a.num_values)
    out = carray(pointer_to(a.out, stored), a.num_values)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for place in range(item * _ITEM_VALUES, min((item + 1) * _ITEM_VALUES, a.num_values)):
            out[place] = rounded(wide(x[place]) + wide(y[place]), stored)
        count_up(pointer, DONE)


def copy_rows(x: Tensor, team: Team) -> Tensor:
    """x: [T, ...] bf16 or fp32, each row dense. Returns a dense copy."""
    out = torch.empty(x.shape, dtype=x.dtype)
    launch_integers(copies_for(x.dtype), -(-len(x) // _ITEM_TOKENS), (
        len(x), x[0].numel(), x.stride(0), x.data_ptr(), out.data_ptr()), team)
    return out


@cache
def copies_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _copy_rows(pointer, stored)

    return compile_kernel(work, _COPIES, f"copy_rows_{stored.__name__}", __file__, strided.__file__)


@njit(**PART)
def _copy_rows(pointer, stored):
    """One thread's part: a few rows at a time, until none is left."""
    a = carray(pointer, 1)[0]
    out = carray(pointer_to(a.out, stored), (a.num_rows, a.width))
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for row in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_rows)):
            x = carray(pointer_to(a.x + row * a.stride * size_of(stored), stored), a.width)
            for place in range(a.width):
                out[row, place] = x[place]
        count_up(pointer, DONE)


def write_tokens(k: Tensor, v: Tensor, pages: Tensor, write_pages: Tensor, write_offsets: Tensor, team: Team) -> None:
    """Copy k and v [T, heads, D], dense within a token, to pages [P, 2 (k, v), heads, page_size, D], dense, all of one
    type, bf16 or fp32: token t to page write_pages[t] at write_offsets[t], both [T] int64.

    Raises:
        InternalError: shapes that do not belong together.
    """
    num_tokens, num_heads, width = k.shape
    if (v.shape, pages.shape[2], pages.shape[4], *write_pages.shape, *write_offsets.shape) != (
            k.shape, num_heads, width, num_tokens, num_tokens):
        raise InternalError(f"k {tuple(k.shape)} and v {tuple(v.shape)} for {len(write_pages)} places in pages of "
                            f"{tuple(pages.shape[1:])}")
    launch_integers(writes_for(k.dtype), -(-num_tokens // _ITEM_TOKENS), (
        num_tokens, num_heads, width, pages.shape[3], pages.stride(1), k.data_ptr(), k.stride(0), v.data_ptr(),
        v.stride(0), pages.data_ptr(), write_pages.data_ptr(), write_offsets.data_ptr()), team)


@cache
def writes_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _write_tokens(pointer, stored)

    return compile_kernel(work, _WRITES, f"write_tokens_{stored.__name__}", __file__, strided.__file__)


@njit(**PART)
def _write_tokens(pointer, stored):
    """One thread's part: a few tokens at a time, until none is left."""
    a = carray(pointer, 1)[0]
    size = size_of(stored)
    write_pages = carray(pointer_to(a.write_pages, np.int64), a.num_tokens)
    write_offsets = carray(pointer_to(a.write_offsets, np.int64), a.num_tokens)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            page = a.pages + 2 * write_pages[token] * a.page_values * size
            _write(a, a.k + token * a.k_stride * size, page, write_offsets[token], stored)
            _write(a, a.v + token * a.v_stride * size, page + a.page_values * size, write_offsets[token], stored)
        count_up(pointer, DONE)


@njit(**PART)
def _write(a, token, page, offset, stored):
    x = carray(pointer_to(token, stored), (a.num_heads, a.width))
    out = carray(pointer_to(page, stored), (a.num_heads, a.page_size, a.width))
    for head in range(a.num_heads):
        for place in range(a.width):
            out[head, offset, place] = x[head, place]


class RecordMoves:
    """Copies of records [N, ...] from tensors to others of the same records, in pairs; each dense."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Source and target of each pair; both are kept."""
        self._pairs, self._team = tuple(pairs), Team()
        self._num_records = (min(len(source) for source, _ in pairs), min(len(target) for _, target in pairs))
        self._table = torch.tensor([(source.data_ptr(), target.data_ptr(), target[0].nbytes)
                                    for source, target in pairs])

    def run(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy record a to record b of every pair, for each (a, b). No two have the same b.

        Raises:
            InternalError: a record that some of the tensors do not have.
        """
        for move in moves:
            if not all(0 <= place < count for place, count in zip(move, self._num_records, strict=True)):
                raise InternalError(f"record {move[0]} to {move[1]} of {self._num_records}")
        sources, targets = torch.tensor(moves).t().contiguous()
        launch_integers(moves_for(), len(moves) * len(self._pairs), (
            len(moves), len(self._pairs), self._table.data_ptr(), sources.data_ptr(), targets.data_ptr()),
            self._team)


@cache
def moves_for():
    return compile_kernel(_move_records, _RECORDS, "move_records", __file__)


@njit(**PART)
def _move_records(pointer):
    """One thread's part: a record of a pair at a time, until none is left."""
    a = carray(pointer, 1)[0]
    pools = carray(pointer_to(a.pools, np.int64), (a.num_pools, _POOL_FIELDS))
    sources = carray(pointer_to(a.sources, np.int64), a.num_moves)
    targets = carray(pointer_to(a.targets, np.int64), a.num_moves)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        move = item // a.num_pools
        source_at, target_at, num_bytes = pools[item % a.num_pools]
        source = carray(pointer_to(source_at + sources[move] * num_bytes, np.uint8), num_bytes)
        target = carray(pointer_to(target_at + targets[move] * num_bytes, np.uint8), num_bytes)
        for place in range(num_bytes):
            target[place] = source[place]
        count_up(pointer, DONE)

"""Sums and copies of rows on the host, and keys and values into their pages: what stands between the products of a
step, as launches, so that a recording of the step has nothing else.
"""

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
